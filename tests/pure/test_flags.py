from __future__ import annotations

import json
from typing import Any

import pytest

from hvdenv.errors import IncompatibleError
from hvdenv.knowledge.flags import Split, compute_capabilities, horovod_variables, operations, split
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe


def recipe(**values: Any) -> Recipe:
    """The recipe ``local`` with other values; ``__`` in a name is a dot."""
    texts = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in values.items()]
    return load_recipe("local", overrides=texts).recipe


def variables(**values: Any) -> dict[str, str]:
    return horovod_variables(recipe(**values), "x86_64")


def test_what_is_not_asked_for_is_refused_by_name() -> None:
    seen = variables(horovod__frameworks=["torch"], horovod__controllers=["gloo"])
    assert seen["HOROVOD_WITH_PYTORCH"] == "1"
    assert seen["HOROVOD_WITHOUT_TENSORFLOW"] == seen["HOROVOD_WITHOUT_MXNET"] == "1"
    assert seen["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITHOUT_GLOO" not in seen
    assert not any(name.startswith("HOROVOD_GPU") for name in seen)


GPU: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {"horovod__gpu__operations": "nccl"},
        {"HOROVOD_GPU": "CUDA", "HOROVOD_GPU_OPERATIONS": "NCCL"},
    ),
    (
        {"horovod__gpu__allreduce": "nccl", "horovod__gpu__broadcast": "nccl"},
        {"HOROVOD_GPU_ALLREDUCE": "NCCL", "HOROVOD_GPU_BROADCAST": "NCCL"},
    ),
    (
        {
            "horovod__gpu__platform": "rocm",
            "horovod__gpu__operations": "nccl",
            "horovod__gpu__rocm_home": "/opt/rocm",
        },
        {"HOROVOD_GPU": "ROCM", "HOROVOD_ROCM_HOME": "/opt/rocm"},
    ),
    (
        {
            "horovod__gpu__operations": "nccl",
            "horovod__gpu__nccl_home": "$EBROOTNCCL",
            "horovod__gpu__nccl_link": "shared",
        },
        {"HOROVOD_NCCL_HOME": "$EBROOTNCCL", "HOROVOD_NCCL_LINK": "SHARED"},
    ),
    (
        {"horovod__gpu__operations": "nccl", "horovod__gpu__nccl": "torch"},
        {
            "HOROVOD_NCCL_LINK": "SHARED",
            "HVDENV_INSTALL_RPATH": "$ORIGIN/../../../..:$ORIGIN/../../torch/lib:$ORIGIN/../../nvidia/nccl/lib",
        },
    ),
    (
        {"horovod__gpu__operations": "nccl", "horovod__gpu__capabilities": ["70", "80"]},
        {"HOROVOD_BUILD_CUDA_CC_LIST": "70,80"},
    ),
    (
        {
            "horovod__gpu__allreduce": "nccl",
            "horovod__gpu__allgather": "mpi",
            "horovod__gpu__allow_mixed": True,
        },
        {"HOROVOD_ALLOW_MIXED_GPU_IMPL": "1", "HOROVOD_GPU_ALLGATHER": "MPI"},
    ),
    ({"horovod__cpu_operations": "gloo"}, {"HOROVOD_CPU_OPERATIONS": "GLOO"}),
]


@pytest.mark.parametrize(("values", "expected"), GPU)
def test_typed_values_are_spelled_as_horovod_reads_them(
    values: dict[str, Any], expected: dict[str, str]
) -> None:
    seen = variables(**values)
    assert {name: seen.get(name) for name in expected} == expected


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"horovod__gpu__nccl_link": "shared"}, "horovod.gpu", "nothing would be built for GPUs"),
    (
        {"horovod__version": "0.19.5", "horovod__gpu__operations": "nccl"},
        "horovod.gpu.operations",
        "read since 0.20.0",
    ),
    (
        {"horovod__version": "0.24.3", "horovod__gpu__reducescatter": "nccl"},
        "horovod.gpu.reducescatter",
        "read since 0.25.0",
    ),
    (
        {"horovod__gpu__operations": "nccl", "horovod__gpu__broadcast": "nccl"},
        "horovod.gpu.broadcast",
        "only one of the two",
    ),
    (
        {"horovod__gpu__allreduce": "nccl", "horovod__gpu__broadcast": "mpi"},
        "horovod.gpu.broadcast",
        "can deadlock",
    ),
    (
        {"horovod__version": "0.19.5", "horovod__gpu__allgather": "nccl"},
        "horovod.gpu.allgather",
        "only over MPI",
    ),
    (
        {
            "horovod__gpu__operations": "nccl",
            "horovod__gpu__nccl": "torch",
            "horovod__gpu__nccl_home": "/usr",
        },
        "horovod.gpu.nccl",
        "together with another",
    ),
    (
        {
            "horovod__gpu__operations": "nccl",
            "horovod__gpu__nccl": "torch",
            "horovod__frameworks": ["tensorflow"],
        },
        "horovod.gpu.nccl",
        "but not torch",
    ),
]


@pytest.mark.parametrize(("values", "where", "message"), REFUSED)
def test_what_a_release_would_ignore_is_refused(
    values: dict[str, Any], where: str, message: str
) -> None:
    with pytest.raises(IncompatibleError) as caught:
        variables(**values)
    assert caught.value.where == where
    assert message in caught.value.message
    assert caught.value.remedy


def test_gloo_is_asked_for_or_refused() -> None:
    """Before 0.20 it has to be asked for; sites' documents go on doing so."""
    assert variables(horovod__version="0.19.5")["HOROVOD_WITH_GLOO"] == "1"
    assert variables()["HOROVOD_WITH_GLOO"] == "1"
    without = variables(horovod__controllers=("mpi",))
    assert without["HOROVOD_WITHOUT_GLOO"] == "1"
    assert "HOROVOD_WITH_GLOO" not in without


def test_one_build_is_for_the_gpus_of_all_partitions() -> None:
    several = recipe(
        partitions__a__capability="80",
        partitions__b__capability="70",
        partitions__c__capability="100",
        partitions__d__cores=4,
    )
    assert compute_capabilities(several) == ("70", "80", "100")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ("MPI", "Gloo")),
        ({"horovod__gpu__operations": "nccl"}, ("MPI", "Gloo", "NCCL")),
        ({"horovod__gpu__allreduce": "ddl"}, ("MPI", "Gloo", "DDL")),
        ({"horovod__cpu_operations": "ccl"}, ("MPI", "Gloo", "CCL")),
    ],
)
def test_operations_that_verify_expects(values: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert operations(recipe(**values)) == expected


def test_what_begins_with_a_variable_of_the_modules_is_told_apart() -> None:
    given = {"A": "$CUDA_HOME/lib64", "B": "/x", "C": "$ORIGIN/../lib", "D": "-mavx"}
    assert split(given) == Split(
        {"B": "/x", "C": "$ORIGIN/../lib", "D": "-mavx"}, {"A": "$CUDA_HOME/lib64"}
    )
