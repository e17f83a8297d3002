#!/bin/bash
#BSUB -P ABC123
#BSUB -nnodes 2
#BSUB -W 1:00
#BSUB -J train
#BSUB -alloc_flags "gpumps smt4"
#BSUB -u ann@hill.example
module load open-ce/1.5.2
conda activate /ccs/proj/abc123/env
jsrun -n 12 -a 1 -c 7 -g 1 -r 6 python train.py
