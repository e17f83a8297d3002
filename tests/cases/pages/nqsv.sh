#!/bin/bash
#PBS -q gpu
#PBS -A NBB
#PBS -b 2
#PBS -T openmpi
#PBS -l elapstim_req=01:00:00
#PBS -v NQSV_MPI_VER=4.1.4/gcc9.4.0
module load openmpi/$NQSV_MPI_VER
mpirun ${NQSII_MPIOPTS} -np 2 python train.py
