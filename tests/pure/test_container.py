"""Definitions of images: what stands in them, and that nothing gets out of its quotes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.base.errors import IncompatibleError
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Gpu, Mpi, Recipe
from hvdenv.plans.images import (
    DISTRIBUTIONS,
    FOLDER,
    SCRIPT,
    FormatName,
    checks,
    define,
    find_distribution,
    image_facts,
    image_plan,
    written,
)
from hvdenv.plans.plan import TEMPORARY, Plan, candidates, render_bash
from hvdenv.plans.steps import GENERATION
from tests.support.commands import Hvdenv

DEBIAN = "debian:bookworm-slim"
CUDA = "nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04"


def torch_on(base: str, *overrides: str) -> Recipe:
    return load_recipe(
        "local", variants=["torch"], overrides=[f"container.base={base}", *overrides]
    ).recipe


def on_gpus() -> Recipe:
    """NCCL, and an Open MPI of the hosts' version that no package brings."""
    recipe = torch_on(CUDA, 'container.packages=["libucx-dev"]', "container.gpu=nvidia")
    gpu = Gpu(operations="nccl", cuda_home="/usr/local/cuda", nccl_home="/usr")
    return recipe._replace(
        mpi=Mpi(version="4.1.8", cuda_aware=True), horovod=recipe.horovod._replace(gpu=gpu)
    )


def plan_of(recipe: Recipe) -> Plan:
    assert recipe.container
    facts = image_facts(recipe.container, "x86_64", 4)
    return image_plan(recipe, ("torch",), facts, candidates(recipe, facts)[0])


RECIPES = {
    "local-torch": torch_on(DEBIAN),
    "rocky": torch_on("rockylinux:9", 'container.packages=["ucx-devel"]'),
    "nccl": on_gpus(),
}
SUFFIX = {"singularity": "def", "docker": "Dockerfile"}


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, as Docker reads them: comments out, lines joined."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, _, rest in found]


def shell(script: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["sh", "-eu"], input=script.encode(), capture_output=True, check=False)


@pytest.mark.parametrize("form", get_args(FormatName))
@pytest.mark.parametrize("name", RECIPES)
def test_definitions(
    name: str, form: FormatName, cases: Path, golden: Callable[[Path, str], None]
) -> None:
    """The script and the digest have tests of their own, and change with every patch."""
    recipe = RECIPES[name]
    plan = plan_of(recipe)
    script = written(render_bash(plan, FOLDER), SCRIPT)
    text = define(recipe, plan, form)
    assert text.count(script) == 1
    assert str(GENERATION) not in text and str(TEMPORARY) not in text
    if form == "singularity":
        assert f"hvdenv.plan {plan.digest}\n" in text
    text = text.replace(script, f"<the script, into {SCRIPT}>")
    text = text.replace(plan.digest, "<digest>").replace(plan.digest[:12], "<digest>")
    golden(cases / f"containers/{name}.{SUFFIX[form]}", text)


def test_an_image_must_have_nccl_whichever_collective_it_is_for() -> None:
    horovod = on_gpus().horovod
    for gpu, built in ((Gpu(allreduce="mpi", allgather="nccl"), True), (Gpu("cuda", "mpi"), False)):
        _, check = checks(on_gpus()._replace(horovod=horovod._replace(gpu=gpu)))
        assert ("hvd.nccl_built()" in check) is built


HOSTILE = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.sampled_from(list("'\"\\$`%#{}\n &;<>")),
    max_size=60,
)


@given(HOSTILE)
def test_a_text_is_written_as_it_is_and_no_line_of_it_means_anything(text: str) -> None:
    command = written(text, "file")
    lines = [line.strip() for line in command.split("\n")[1:-1]]
    assert all(line.startswith("'") and line.endswith("' \\") for line in lines)
    assert "{{" not in command
    done = shell(command.replace("> file", ">&1"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (text.removesuffix("\n") + "\n").encode()


@pytest.mark.parametrize("form", get_args(FormatName))
def test_packages_are_words(form: FormatName) -> None:
    """The format lets & and | through, for constraints of schedulers."""
    packages = ["a&touch", "b|c", "d*", "libfoo=1.2-3"]
    recipe = torch_on(DEBIAN, f"container.packages={packages}")
    text = define(recipe, plan_of(recipe), form)
    install = text[text.index("apt-get install") : text.index("rm -rf /var/lib/apt")]
    words = shlex.split(install.replace("\\\n", " ").strip().removesuffix("&&"))
    own = "ca-certificates g++ gcc openssh-client python3.11 python3.11-dev python3.11-venv"
    assert set(words[4:]) == {*packages, *own.split()}


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40))
def test_values_of_the_environment_stay_values_in_a_dockerfile(value: str) -> None:
    recipe = RECIPES["local-torch"]
    plan = plan_of(recipe)
    text = define(recipe, plan._replace(variables={"A": value}), "docker")
    (env,) = [rest for name, rest in instructions(text) if name == "ENV"]
    word = next(word for word in re.findall(r'\w+="(?:[^"\\]|\\.)*"', env) if word.startswith("A="))
    # What Docker does with a quoted value: a backslash takes the meaning of the next character.
    assert re.sub(r"\\(.)", r"\1", word[3:-1]) == value
    assert re.search(r"(?<!\\)(\\\\)*\$", word) is None


def test_what_differs_from_job_to_job_is_for_activate_only() -> None:
    recipe = torch_on(DEBIAN, 'environment.run.CACHE="/tmp/{user}"')
    with pytest.raises(IncompatibleError) as caught:
        define(recipe, plan_of(recipe), "docker")
    assert caught.value.where == "environment.run.CACHE"
    assert "$(id -un)" in define(recipe, plan_of(recipe), "singularity")


BASES = {
    "ubuntu:20.04": "Ubuntu 20.04",
    "nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04": "Ubuntu 22.04",
    "debian:bookworm-slim": "Debian 12",
    "debian:trixie": "Debian 13",
    "nvidia/cuda:12.4.1-devel-rockylinux8": "Red Hat 8",
    "rockylinux:9": "Red Hat 9",
    "registry.access.redhat.com/ubi9:9.4": "Red Hat 9",
}


@pytest.mark.parametrize("base", BASES)
def test_the_name_of_an_image_says_its_distribution(base: str) -> None:
    assert find_distribution(base).name == BASES[base]
    assert [each.name for each in DISTRIBUTIONS if re.search(each.pattern, base)] == [BASES[base]]


def test_what_comes_from_the_cluster_cannot_be_in_an_image() -> None:
    recipe = torch_on(DEBIAN)
    site = recipe._replace(
        python=recipe.python._replace(provider="conda"),
        horovod=recipe.horovod._replace(provider="present"),
    )
    with pytest.raises(IncompatibleError) as caught:
        plan_of(site)
    assert caught.value.where == "python.provider, horovod.provider"


@pytest.mark.parametrize(
    ("mpi", "where"),
    [(Mpi("cray-mpich", "8.1.25"), "mpi.kind"), (Mpi("openmpi"), "mpi.version")],
)
def test_an_mpi_of_the_site_cannot_be_in_an_image(mpi: Mpi, where: str) -> None:
    recipe = RECIPES["local-torch"]
    with pytest.raises(IncompatibleError) as caught:
        define(recipe._replace(mpi=mpi), plan_of(recipe), "docker")
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "which image to start from"),
        (["--set", "container.base=debian:sid"], 3, "does not say which distribution"),
        (["--set", f"container.base={DEBIAN}", "--python", "3.12"], 3, "--python requests 3.12"),
        # torch 2.13 needs a newer g++ than Red Hat 8 has.
        (["--set", "container.base=rockylinux:8", "--python", "3.11"], 3, "known incompatibility"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], code: int, said: str, hvdenv: Hvdenv
) -> None:
    captured = hvdenv("container", "local", "--variant", "torch", *words, code=code)
    assert said in captured.err
    assert captured.out == ""


def test_the_definition_on_standard_output(hvdenv: Hvdenv) -> None:
    words = ["container", "local", "--variant", "torch", "--set", f"container.base={DEBIAN}"]
    text = hvdenv(*words).out
    assert f"From: {DEBIAN}\n" in text
    assert json.loads(hvdenv(*words, "--json").out)["definition"] == text


def test_the_source_of_mpi() -> None:
    """Its hash is compared before it is compiled: see the golden file."""
    unknown = on_gpus()._replace(mpi=Mpi(version="4.1.99"))
    with pytest.raises(IncompatibleError, match=r"hash of openmpi 4\.1\.99"):
        define(unknown, plan_of(unknown), "docker")
    named = on_gpus()._replace(mpi=Mpi(version="4.1.99", sha256="a" * 64))
    assert f"{'a' * 64}  /var/tmp/openmpi-4.1.99.tar.bz2" in define(named, plan_of(named), "docker")
    mpich = on_gpus()._replace(mpi=Mpi(kind="mpich", version="4.3.2"))
    assert "/var/tmp/mpich-4.3.2.tar.gz" in define(mpich, plan_of(mpich), "docker")
    openib = load_recipe("singularity", variants=["openib"]).recipe
    text = define(openib, plan_of(openib), "singularity")
    assert "--with-verbs" in text
    assert "openmpi-3.1.2.tar.bz2" in text
    assert "--with-verbs" not in define(on_gpus(), plan_of(on_gpus()), "singularity")
