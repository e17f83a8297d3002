#!/bin/bash
#BSUB -W 1:01
#BSUB -nnodes 2
#BSUB -U week3
#BSUB -J hvdenv
#BSUB -Jd proof
#BSUB -M 16GB
#BSUB -o hvdenv.%J
#BSUB -x

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $LSB_JOBID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'
hosts=$(awk '!/^(batch|login)/ && !seen[$0]++' "$LSB_DJOB_HOSTFILE" | sed 's/$/:4/' | paste -sd, -)

horovodrun -np 8 -H "$hosts" python train.py
