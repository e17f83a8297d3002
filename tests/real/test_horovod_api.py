"""docs/horovod-api.toml lists what the installed Horovod has, and what ranks really call."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from docs import horovod_api
from hvdenv.base.runner import Runner
from hvdenv.environments.installation import Installation
from hvdenv.standalone.ranks.events import Operation
from tests.real.doctored import run_ranks

NAMES = """
import importlib, json, types
FOREIGN = {"tensorflow", "keras", "torch", "packaging", "contextlib", "typing"}
found = {}
for module in %r:
    for name, value in vars(importlib.import_module(module)).items():
        origin = (getattr(value, "__module__", None) or "").partition(".")[0]
        if not name.startswith("_") and not isinstance(value, types.ModuleType):
            if origin not in FOREIGN:
                found.setdefault(module, []).append(name)
print(json.dumps(found))
"""
PACKAGES = ("horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras")
MODULES = [
    *PACKAGES,
    *(f"{package}.elastic" for package in PACKAGES),
    *(f"{package}.callbacks" for package in PACKAGES[2:]),
]


def test_every_public_name_is_listed(original: Installation) -> None:
    words = [original.python, "-c", NAMES % MODULES]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    installed = {(module, name) for module, names in json.loads(output).items() for name in names}
    assert len(installed) > 200
    assert installed - horovod_api.known(horovod_api.groups()) == set()


def test_every_option_of_horovodrun_is_listed(original: Installation) -> None:
    words = [original.program("horovodrun"), "--help"]
    output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", output))
    assert len(options) > 40
    listed = {name for _, name in horovod_api.known(horovod_api.groups())}
    assert options - listed - {"--help", "--map-by", "--rankfile"} == set()  # the latter of mpirun


# Over MPI only, and what every rank asks before its exercises.
ELSEWHERE = re.compile(r"Adasum|\w+_(built|enabled)|init|shutdown|cross_\w+|local_\w+")


@pytest.mark.parametrize(
    "framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.optin)]
)
def test_ranks_read_every_name_that_is_exercised_by_default(
    original: Installation, runner: Runner, framework: str
) -> None:
    place = str(Path(__file__).parent)
    variables = (("PYTHONPATH", place), ("HOROVOD_DYNAMIC_PROCESS_SETS", "1"))
    doctored = original._replace(env=(*original.env, *variables))
    run = run_ranks(
        doctored, runner, "Gloo", size=3, framework=framework, exercises=("recorded",), timeout=400
    )
    read = {
        (event.operation.removeprefix("read: "), name)
        for event in run.ranks[0].all(Operation)
        for name in event.types
    }
    chosen = [group for group in horovod_api.groups() if group.exercised == "default"]
    packages = PACKAGES[:1] if framework == "torch" else PACKAGES[1:]
    listed = {
        (module, name)
        for module, name in horovod_api.known(chosen)
        if module.startswith(packages) and "." not in name and not ELSEWHERE.fullmatch(name)
    }
    assert len(listed) > 20
    # The packages for Keras have the functions of horovod.tensorflow.
    inherited = {pair for pair in listed if ("horovod.tensorflow", pair[1]) in read}
    assert listed - read - inherited == set()
