#!/bin/bash
#COBALT --jobname hvdenv
#COBALT -n 4
#COBALT -t 60
#COBALT -q training
#COBALT -A SDL_Workshop
#COBALT -o theta.out
#COBALT -e theta.err
#COBALT --attrs mcdram=cache:numa=quad

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $COBALT_JOBID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'
export OMP_NUM_THREADS=32

aprun -n 16 -N 4 -d 32 -j 2 -cc depth python pytorch_mnist.py --device cpu
