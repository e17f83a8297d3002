#!/bin/bash
#BSUB -P ABC123
#BSUB -W 1:01
#BSUB -nnodes 2
#BSUB -q batch
#BSUB -U week3
#BSUB -J train
#BSUB -Jd proof
#BSUB -M 16GB
#BSUB -o train.%J
#BSUB -e train.%J.err
#BSUB -x
#BSUB -alloc_flags "smt4 nvme"

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $LSB_JOBID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'
hosts=$(awk '!/^(batch|login)/ && !seen[$0]++' "$LSB_DJOB_HOSTFILE" | sed 's/$/:4/' | paste -sd, -)

horovodrun -np 8 -H "$hosts" python train.py
