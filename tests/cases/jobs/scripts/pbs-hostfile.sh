#!/bin/bash
#PBS -N hvdenv
#PBS -l select=2:ncpus=24:mpiprocs=4:mem=96Gb
#PBS -l place=excl
#PBS -l walltime=36:00:00
#PBS -k doe
#PBS -o train.out
#PBS -e train.err

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $PBS_JOBID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'

mpirun -n 8 --hostfile "$PBS_NODEFILE" python train.py
