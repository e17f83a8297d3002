# Horovod environment local+torch, plan <digest>

FROM nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04

RUN apt-get update -y && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates \
        g++ \
        gcc \
        libucx-dev \
        openssh-client \
        python3.10 \
        python3.10-dev \
        python3.10-venv \
        wget && \
    rm -rf /var/lib/apt/lists/*

# Checked here: hpccm's own wget keeps a file that exists

RUN wget -q -O /var/tmp/openmpi-4.1.8.tar.bz2 https://www.open-mpi.org/software/ompi/v4.1/downloads/openmpi-4.1.8.tar.bz2 && \
    echo '466f68e3132a1dc02710cc2011fafced8336d98359fa2dae4dddcfd5719f12a9  /var/tmp/openmpi-4.1.8.tar.bz2' | sha256sum -c -

# OpenMPI version 4.1.8
RUN apt-get update -y && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        bzip2 \
        file \
        hwloc \
        libnuma-dev \
        make \
        openssh-client \
        perl \
        tar \
        wget && \
    rm -rf /var/lib/apt/lists/*
RUN mkdir -p /var/tmp && wget -q -nc -P /var/tmp https://www.open-mpi.org/software/ompi/v4.1/downloads/openmpi-4.1.8.tar.bz2 && \
    mkdir -p /var/tmp && tar -x -f /var/tmp/openmpi-4.1.8.tar.bz2 -C /var/tmp -j && \
    cd /var/tmp/openmpi-4.1.8 &&   ./configure --prefix=/usr/local --disable-getpwuid --enable-orterun-prefix-by-default --with-cuda=/usr/local/cuda --without-verbs && \
    make -j$(nproc) && \
    make -j$(nproc) install && \
    echo "/usr/local/lib" >> /etc/ld.so.conf.d/hpccm.conf && ldconfig && \
    rm -rf /var/tmp/openmpi-4.1.8 /var/tmp/openmpi-4.1.8.tar.bz2

# The steps of the plan

RUN <the script, into /usr/local/share/horovod/build.sh> && \
    PIP_NO_CACHE_DIR=1 bash /usr/local/share/horovod/build.sh

ENV VIRTUAL_ENV="/opt/horovod/venv" \
    PATH="/opt/horovod/venv/bin:$PATH" \
    PYTHONNOUSERSITE="1" \
    OMPI_MCA_btl_vader_single_copy_mechanism="none"

LABEL hvdenv.base=nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04 \
    hvdenv.plan=<digest> \
    hvdenv.recipe=local \
    hvdenv.variants=torch

RUN horovodrun --check-build && \
    python -c 'import horovod.torch as hvd; assert hvd.mpi_built() and hvd.gloo_built() and hvd.nccl_built()'
