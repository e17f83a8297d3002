#!/bin/bash
#SBATCH -J hvdenv
#SBATCH --time=00:10:00
#SBATCH -p alvis
#SBATCH -A NAISS2024-22-219
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=A100:4

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $SLURM_JOB_ID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
# srun passes on what it sees here, also after `sbatch --export=NONE`.
export SLURM_EXPORT_ENV=ALL
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'

srun python hvd.py
