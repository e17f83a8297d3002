#!/bin/bash
#COBALT --jobname hvdenv
#COBALT -n 2
#COBALT -t 60
#COBALT -q full-node
#COBALT -A SDL_Workshop
#COBALT -O results/$jobid.x
#COBALT --attrs filesystems=home,grand:pubnet=true

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $COBALT_JOBID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'

mpirun -x LD_LIBRARY_PATH -x PATH -n 16 -npernode 8 --hostfile "$COBALT_NODEFILE" python pytorch_mnist.py --device gpu
