#!/bin/bash
#PBS -q gpuvolta
#PBS -P ab12
#PBS -l ncpus=96,ngpus=8
#PBS -l mem=760GB
#PBS -l walltime=01:00:00,jobfs=100GB
#PBS -l storage=gdata/ab12+scratch/ab12
#PBS -l wd
#PBS -M ann@fell.example
#PBS -m ae
cd $PBS_O_WORKDIR
module use /g/data/ab12/modulefiles
module load torch-deps/2
module reset
. /g/data/ab12/env.sh
mpirun -np 8 --map-by ppr:4:node -x NCCL_DEBUG=INFO -mca pml ucx python train.py
