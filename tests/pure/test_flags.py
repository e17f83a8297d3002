from __future__ import annotations

import pytest

from hvdenv.base.errors import IncompatibleError
from hvdenv.environments.installation import expectation_of
from hvdenv.knowledge.flags import compute_capabilities, horovod_variables
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe


def recipe(settings: str, table: str = "horovod.") -> Recipe:
    """The recipe ``local`` with other values, separated by spaces, such as ``gpu.operations=nccl``."""
    return load_recipe("local", overrides=[table + each for each in settings.split()]).recipe


def variables(settings: str = "") -> dict[str, str]:
    return horovod_variables(recipe(settings), "x86_64")


# Without HOROVOD_.
SWITCHES = {
    "": "WITH_TENSORFLOW WITH_PYTORCH WITHOUT_MXNET WITH_MPI WITH_GLOO WITHOUT_NVTX",
    'frameworks=["torch"] controllers=["gloo"]': "WITHOUT_TENSORFLOW WITH_PYTORCH WITHOUT_MXNET WITHOUT_MPI WITH_GLOO WITHOUT_NVTX",
    'frameworks=["tensorflow"] controllers=["mpi"]': "WITH_TENSORFLOW WITHOUT_PYTORCH WITHOUT_MXNET WITH_MPI WITHOUT_GLOO WITHOUT_NVTX",
}


@pytest.mark.parametrize(("settings", "expected"), SWITCHES.items())
def test_what_is_not_asked_for_is_refused_by_name(settings: str, expected: str) -> None:
    seen = variables(settings)
    switches = {name for name in seen if name.startswith("HOROVOD_WITH")}
    assert switches == {f"HOROVOD_{each}" for each in expected.split()}
    assert {seen[name] for name in switches} == {"1"}
    assert not any(name.startswith("HOROVOD_GPU") for name in seen)
    assert seen["HOROVOD_BUILD_ARCH_FLAGS"] == "-mf16c -mavx -mfma"
    assert all(seen.values())


# Without HOROVOD_.
GPU = {
    "gpu.operations=nccl": "GPU=CUDA GPU_OPERATIONS=NCCL",
    "gpu.allreduce=nccl gpu.broadcast=nccl": "GPU_ALLREDUCE=NCCL GPU_BROADCAST=NCCL",
    "gpu.platform=rocm gpu.operations=nccl gpu.rocm_home=/opt/rocm": "GPU=ROCM ROCM_HOME=/opt/rocm",
    "gpu.operations=nccl gpu.nccl_home=$EBROOTNCCL gpu.nccl_link=shared": "NCCL_HOME=$EBROOTNCCL NCCL_LINK=SHARED",
    "gpu.operations=nccl gpu.nccl=torch": "NCCL_LINK=SHARED",
    'gpu.operations=nccl gpu.capabilities=["70","80"]': "BUILD_CUDA_CC_LIST=70,80",
    "gpu.allreduce=nccl gpu.allgather=mpi gpu.allow_mixed=true": "ALLOW_MIXED_GPU_IMPL=1 GPU_ALLGATHER=MPI",
    "cpu_operations=gloo": "CPU_OPERATIONS=GLOO",
}


@pytest.mark.parametrize(("settings", "expected"), GPU.items())
def test_typed_values_are_spelled_as_horovod_reads_them(settings: str, expected: str) -> None:
    assert {f"HOROVOD_{each}" for each in expected.split()} <= {
        f"{name}={value}" for name, value in variables(settings).items()
    }


def test_the_nccl_of_torch_is_found_at_run_time() -> None:
    """Beside the extension, where the wheels of torch and of NCCL have it."""
    assert variables("gpu.operations=nccl gpu.nccl=torch")["HVDENV_INSTALL_RPATH"] == (
        "$ORIGIN/../../../..:$ORIGIN/../../torch/lib:$ORIGIN/../../nvidia/nccl/lib"
    )


REFUSED = {
    "gpu.nccl_link=shared": ("gpu", "nothing would be built for GPUs"),
    "version=0.19.5": ("version", "0.20.0 and newer, not 0.19.5"),
    "version=0.24.3 gpu.reducescatter=nccl": ("gpu.reducescatter", "read since 0.25.0"),
    "gpu.operations=nccl gpu.broadcast=nccl": ("gpu.broadcast", "only one of the two"),
    "gpu.allreduce=nccl gpu.broadcast=mpi": ("gpu.broadcast", "can deadlock"),
    "gpu.operations=nccl gpu.nccl=torch gpu.nccl_home=/usr": ("gpu.nccl", "together with another"),
    'gpu.operations=nccl gpu.nccl=torch frameworks=["tensorflow"]': ("gpu.nccl", "but not torch"),
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_a_release_would_ignore_is_refused(settings: str) -> None:
    where, message = REFUSED[settings]
    with pytest.raises(IncompatibleError, match=message) as caught:
        variables(settings)
    assert caught.value.where == f"horovod.{where}"
    assert caught.value.remedy


def test_one_build_is_for_the_gpus_of_all_partitions() -> None:
    several = recipe(
        'a.capability="80" b.capability="70" c.capability="100" d.cores=4', "partitions."
    )
    assert compute_capabilities(several) == ("70", "80", "100")


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ("", ()),
        ("gpu.operations=nccl", ("NCCL",)),
        ("gpu.allreduce=ddl", ("DDL",)),
        ("cpu_operations=ccl", ("CCL",)),
    ],
)
def test_operations_that_verify_expects(settings: str, more: tuple[str, ...]) -> None:
    assert expectation_of(recipe(settings)).operations == ("MPI", "Gloo", *more)
