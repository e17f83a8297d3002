# Training on two nodes of Moor
#SBATCH --job-name=train
#SBATCH -n 8 --ntasks-per-node=4
#SBATCH --gres=gpu:a100:4
#SBATCH --partition=gpu
#SBATCH --mail-user=ann@moor.example
#SBATCH --mail-type=END
#SBATCH --export=NONE
#SBATCH --time=02:00:00
set -euo pipefail
module purge
module load GCC/11.3.0 \
    OpenMPI/4.1.4 \
    CUDA/11.7.0
source /proj/moor/setup-horovod.sh
source ~/envs/horovod/bin/activate
export NCCL_DEBUG=INFO
export HOROVOD_TIMELINE=/tmp/$USER/timeline.json
for i in 1 2 3; do
    echo "round $i"
done
srun --mpi=pmix --export=ALL,NCCL_DEBUG \
    --prolog=/proj/moor/prolog.sh \
    python train.py \
    --epochs 10
