#!/bin/bash
#SBATCH -J pytorch_horovod
#SBATCH --time=24:00:00
#SBATCH --comment=pytorch
#SBATCH -p amd_a100nv_8
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH -o %x_%j.out
#SBATCH -e %x_%j.err
#SBATCH --gres=gpu:8

# The last line of the output records the exit code.
trap 'echo "hvdenv: job $SLURM_JOB_ID ended with exit code $?"' EXIT
fail() { echo "hvdenv: on $(hostname): $1" >&2; exit 1; }
# srun passes on what it sees here, also after `sbatch --export=NONE`.
export SLURM_EXPORT_ENV=ALL
# Since Slurm 22.05, srun no longer takes this from sbatch.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
cd -- /scratch/ann/train || fail 'cannot enter /scratch/ann/train'
. /scratch/ann/envs/train/activate.sh || fail '/scratch/ann/envs/train/activate.sh did not activate the environment; is its file system there?'

srun -n 32 python ./train_hvd.py
