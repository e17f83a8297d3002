# Horovod environment local+torch, plan <digest>

FROM debian:bookworm-slim

RUN apt-get update -y && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates \
        g++ \
        gcc \
        openssh-client \
        python3.11 \
        python3.11-dev \
        python3.11-venv && \
    rm -rf /var/lib/apt/lists/*

# The steps of the plan

RUN <the script, into /usr/local/share/horovod/build.sh> && \
    PIP_NO_CACHE_DIR=1 bash /usr/local/share/horovod/build.sh

ENV VIRTUAL_ENV="/opt/horovod/venv" \
    PATH="/opt/horovod/venv/bin:$PATH" \
    PYTHONNOUSERSITE="1" \
    OPAL_PREFIX="/opt/horovod/venv" \
    OMPI_MCA_btl_vader_single_copy_mechanism="none"

LABEL hvdenv.base=debian:bookworm-slim \
    hvdenv.plan=<digest> \
    hvdenv.recipe=local \
    hvdenv.variants=torch

RUN horovodrun --check-build && \
    python -c 'import horovod.torch as hvd; assert hvd.mpi_built() and hvd.gloo_built()'
