#!/bin/bash
#SBATCH -J hvdenv
#SBATCH --time=02:00:00
#SBATCH -A m1234_g
#SBATCH --qos=regular
#SBATCH --reservation=maintenance-7
#SBATCH -C gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --exclusive

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $SLURM_JOB_ID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
# srun passes on what it sees here, also after `sbatch --export=NONE`.
export SLURM_EXPORT_ENV=ALL
# Since Slurm 22.05, srun no longer takes this from sbatch.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'

srun --cpu-bind=cores python train.py
