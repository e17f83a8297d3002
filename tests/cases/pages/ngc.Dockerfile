# syntax=docker/dockerfile:1
FROM nvcr.io/nvidia/pytorch:22.10-py3
ENV HOROVOD_VERSION=0.28.1 HOROVOD_GPU_OPERATIONS=NCCL
RUN apt-get update && apt-get install -y --no-install-recommends openmpi-bin \
    # the compiler
    g++-9 && rm -rf /var/lib/apt/lists/*
RUN pip install torch==1.13.1 && \
    #pip install horovod==0.26.1 && \
    pip install tqdm==4.64.0
RUN HOROVOD_WITH_MPI=1 \
    # not: pip install horovod==0.27.0
    pip install horovod[pytorch]==${HOROVOD_VERSION}
RUN <<END
pip install psutil==5.9.5
END
RUN ["pip", "install", "h5py==3.8.0"]
