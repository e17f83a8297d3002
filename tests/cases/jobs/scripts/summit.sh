#!/bin/bash
#BSUB -P ABC123
#BSUB -W 0:10
#BSUB -nnodes 2
#BSUB -q batch
#BSUB -J train
#BSUB -o train.%J
#BSUB -e train.%J.err
#BSUB -alloc_flags "smt4 nvme"

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $LSB_JOBID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'

jsrun -r1 -g6 -a6 -c42 -bpacked:7 python train.py
