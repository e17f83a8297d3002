# Horovod environment local+torch, plan <digest>

FROM rockylinux:9

RUN yum install -y \
        ca-certificates \
        gcc \
        gcc-c++ \
        openssh-clients \
        python3.11 \
        python3.11-devel \
        ucx-devel && \
    rm -rf /var/cache/yum/*

# The steps of the plan

RUN <the script, into /usr/local/share/horovod/build.sh> && \
    PIP_NO_CACHE_DIR=1 bash /usr/local/share/horovod/build.sh

ENV VIRTUAL_ENV="/opt/horovod/venv" \
    PATH="/opt/horovod/venv/bin:$PATH" \
    PYTHONNOUSERSITE="1" \
    OPAL_PREFIX="/opt/horovod/venv" \
    OMPI_MCA_btl_vader_single_copy_mechanism="none"

LABEL hvdenv.base=rockylinux:9 \
    hvdenv.plan=<digest> \
    hvdenv.recipe=local \
    hvdenv.variants=torch

RUN horovodrun --check-build && \
    python -c 'import horovod.torch as hvd; assert hvd.mpi_built() and hvd.gloo_built()'
