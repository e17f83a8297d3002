#!/bin/bash
#PBS -N hvdenv
#PBS -l select=8:ngpus=4:system=polaris
#PBS -l walltime=00:30:00
#PBS -q debug-scaling
#PBS -A datascience
#PBS -k doe
#PBS -j oe
#PBS -l place=scatter
#PBS -l filesystems=home:eagle:grand

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $PBS_JOBID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'

mpiexec -n 32 -ppn 4 --cpu-bind depth -d 16 python3 train.py
