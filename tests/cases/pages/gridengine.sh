#!/bin/bash
#$ -N train
#$ -cwd
#$ -l h_rt=01:00:00
#$ -pe mpi 16
#$ -M ann@dale.example
#$ -v OMP_NUM_THREADS=4
#$ -l gpu=2
. /etc/profile.d/modules.sh
module load gcc/12.2.0 openmpi/4.1.6
mpirun -np $NSLOTS python train.py
