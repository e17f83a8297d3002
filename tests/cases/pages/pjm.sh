#!/bin/bash
#PJM -L rscgrp=cx-small
#PJM -L node=2
#PJM --mpi proc=8
#PJM -L elapse=1:00:00
#PJM -j
module load gcc/11.3.0 openmpi_cuda/4.1.2
mpirun -n 8 -machinefile $PJM_O_NODEINF python train.py
