"""The definition of an image with a recipe's environment, as text.

The image runs the same steps as a build on a machine: the definition contains the script of
``plan --format bash``, quoted. The library hpccm knows the formats, the package managers and how
to build Open MPI from source.
"""

import re
import shlex
from pathlib import Path
from typing import Any, Literal, NamedTuple

import hpccm  # type: ignore[import-untyped]
from hpccm.building_blocks import mpich, openmpi, packages  # type: ignore[import-untyped]
from hpccm.primitives import (  # type: ignore[import-untyped]
    baseimage,
    comment,
    label,
    raw,
    shell,
)

from hvdenv.base.errors import IncompatibleError, RecipeError
from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import parse_toml
from hvdenv.environments.activation import left_open
from hvdenv.model.cluster import Container
from hvdenv.model.facts import Facts, Interpreter, Tool
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import Plan, make_plan, render_bash, steps_of

FormatName = Literal["singularity", "docker"]


class Distribution(NamedTuple):
    """What an image of a Linux distribution has.

    Attributes:
        pattern: found in the name of an image of it.
        hpccm: the name hpccm knows it by, or one with the same package manager.
        pythons: their versions, the best first.
    """

    pattern: str
    name: str
    hpccm: str
    glibc: str
    gcc: str
    pythons: tuple[str, ...]

    def packages(self, python: str) -> set[str]:
        """What a build and mpirun need, and a Python.

        Without ssh, mpirun of a package starts no ranks, not even on one host.
        """
        if self.hpccm.startswith("ubuntu"):
            parts = {f"python{python}", f"python{python}-dev", f"python{python}-venv"}
            return {"ca-certificates", "g++", "gcc", "openssh-client", *parts}
        # Red Hat's own Python.
        name = "python3" if (self.name, python) == ("Red Hat 9", "3.9") else f"python{python}"
        return {"ca-certificates", "gcc", "gcc-c++", "openssh-clients", name, f"{name}-devel"}


# In the order of the fields. One line adds a distribution.
_ROWS = (
    (r"ubuntu[:-]?20\.04|\bfocal\b", "Ubuntu 20.04", "ubuntu20", "2.31", "9.4.0", ("3.9", "3.8")),
    (r"ubuntu[:-]?22\.04|\bjammy\b", "Ubuntu 22.04", "ubuntu22", "2.35", "11.4.0", ("3.10",)),
    (r"ubuntu[:-]?24\.04|\bnoble\b", "Ubuntu 24.04", "ubuntu24", "2.39", "13.3.0", ("3.12",)),
    (r"debian[:-]?12|\bbookworm\b", "Debian 12", "ubuntu22", "2.36", "12.2.0", ("3.11",)),
    (r"debian[:-]?13|\btrixie\b", "Debian 13", "ubuntu24", "2.41", "14.2.0", ("3.13",)),
    (r"(rockylinux|almalinux|ubi)[:-]?8\b", "Red Hat 8", "rockylinux8", "2.28", "8.5.0", ("3.11", "3.12")),
    (r"(rockylinux|almalinux|ubi)[:-]?9\b", "Red Hat 9", "rockylinux9", "2.34", "11.5.0", ("3.11", "3.12", "3.9")),
)  # fmt: skip
DISTRIBUTIONS = tuple(map(Distribution._make, _ROWS))


def find_distribution(base: str) -> Distribution:
    """The distribution of a base image, by its name.

    Raises:
        IncompatibleError: the name does not say it.
    """
    for each in DISTRIBUTIONS:
        if re.search(each.pattern, base):
            return each
    raise IncompatibleError(
        "the name of this image does not say which distribution it is",
        where=f"container.base: {base}",
        remedy="choose an image whose name includes the release, such as debian:bookworm-slim or"
        " nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04; hvdenv supports "
        + ", ".join(each.name for each in DISTRIBUTIONS),
    )


# Where the environment and the script that makes it are in an image.
FOLDER = Path("/opt/horovod")
SCRIPT = "/usr/local/share/horovod/build.sh"
_MPI_SOURCES = Path(__file__).parents[1] / "knowledge/mpi_sources.toml"
_RUNSCRIPT = '%runscript\n    [ $# -gt 0 ] || set -- python\n    exec "$@"'


def image_facts(container: Container | None, machine: str, cores: int) -> Facts:
    """Facts about the image during its build, from what its distribution is known to have."""
    base = _base_image(container)
    distribution = find_distribution(base)
    return Facts(
        origin="declared",
        host=base,
        system="Linux",
        machine=machine,
        glibc=distribution.glibc,
        cpu_flags=(),
        cores=cores,
        interpreters=tuple(
            Interpreter(f"/usr/bin/python{version}", version) for version in distribution.pythons
        ),
        cc=Tool("/usr/bin/gcc", distribution.gcc),
        cxx=Tool("/usr/bin/g++", distribution.gcc),
    )


def _base_image(container: Container | None) -> str:
    """The image to start from.

    Raises:
        RecipeError: none is named: the recipe has no image, or one that exists.
    """
    if container is None or container.base is None:
        raise RecipeError(
            "the recipe does not say which image to start from",
            where="container.base",
            remedy="name one: --set container.base=debian:bookworm-slim; to run an existing image,"
            " no definition is needed",
        )
    return container.base


def _for_image(recipe: Recipe) -> Recipe:
    """The recipe without modules, which an image does not have.

    Raises:
        IncompatibleError: it uses something of the modules, the site or conda.
    """
    wrong = {
        "python.provider": recipe.python.provider != "venv",
        "python.from_modules": recipe.python.from_modules,
        "horovod.provider": recipe.horovod.provider == "present",
    }
    for name, package in recipe.frameworks.items():
        used = name in recipe.horovod.frameworks
        wrong[f"frameworks.{name}.provider"] = used and package.provider == "present"
    unfit = [key for key, is_wrong in wrong.items() if is_wrong]
    if unfit:
        raise IncompatibleError(
            "an image has the Python of its distribution and what pip installs or a source"
            " provides, but no modules and no conda",
            where=", ".join(unfit),
            remedy="use a recipe or a variant that installs these with pip, such as `hvdenv"
            " container local --set container.base=debian:bookworm-slim`",
        )
    return recipe._replace(modules=None)


def image_plan(
    recipe: Recipe, variants: tuple[str, ...], facts: Facts, python: Interpreter
) -> Plan:
    maker = steps_of(_for_image(recipe), facts, python)._replace(alone=True)
    return make_plan(maker, variants).at(FOLDER)


def define(recipe: Recipe, plan: Plan, form: FormatName) -> str:
    """The definition; the plan is from image_plan().

    Raises:
        IncompatibleError: its MPI cannot be in an image.
    """
    container = recipe.container or Container()
    base = _base_image(container)
    distribution = find_distribution(base)
    # hpccm stores these for the whole process.
    hpccm.config.set_container_format(form)
    hpccm.config.set_working_directory("/var/tmp")
    stage = hpccm.Stage()
    name = "+".join((plan.recipe, *plan.variants))
    stage += comment(f"Horovod environment {name}, plan {plan.digest[:12]}", reformat=False)
    arch = plan.wheel.stem.rpartition("-linux_")[2]
    stage += baseimage(image=base, _distro=distribution.hpccm, _arch=arch)
    mpi = _mpi(recipe)
    wanted = {*distribution.packages(plan.python.version), *container.packages}
    wanted |= {"wget"} if mpi else set()
    stage += packages(ospackages=[shlex.quote(each) for each in sorted(wanted)])
    if mpi is not None:
        stage += comment("Checked here: hpccm's own wget keeps a file that exists", reformat=False)
        stage += shell(commands=_checked_download(recipe, str(mpi)), chdir=False)
        stage += mpi
    stage += comment("The steps of the plan", reformat=False)
    script = written(render_bash(plan, FOLDER), SCRIPT)
    stage += shell(commands=[script, f"PIP_NO_CACHE_DIR=1 bash {SCRIPT}"])
    if form == "singularity":
        stage += raw(singularity=_singularity_environment(recipe))
    else:
        stage += raw(docker=_docker_environment(recipe, plan))
    labels = {
        "hvdenv.recipe": plan.recipe,
        "hvdenv.variants": ",".join(plan.variants) or "none",
        "hvdenv.plan": plan.digest,
        "hvdenv.base": base,
    }
    stage += label(metadata=labels)
    if form == "singularity":
        stage += raw(singularity=_RUNSCRIPT)
    stage += shell(commands=list(checks(recipe)), chdir=False, _test=True)
    return f"{stage}\n"


def _singularity_environment(recipe: Recipe) -> str:
    """The section %environment, which overrides what the host's mpirun or modules pass on.

    Apptainer passes on the host's value of a variable that is unset here. Open MPI and Python
    treat empty variables as unset, so these are set to the empty string.
    """
    lines = [
        "%environment",
        "unset OPAL_PREFIX",
        f". {FOLDER}/activate.sh",
        *(f'export {name}="${{{name}-}}"' for name in ("OPAL_PREFIX", "PYTHONHOME", "PYTHONPATH")),
        # Set by the host's mpirun; Open MPI 4 hangs if the two differ.
        'export PMIX_INSTALL_PREFIX="$OPAL_PREFIX"',
        *(f"export {name}={shlex.quote(value)}" for name, value in _mpi_variables(recipe).items()),
    ]
    return "\n    ".join(lines)


def _docker_environment(recipe: Recipe, plan: Plan) -> str:
    """The instruction ENV, with values in which Docker expands no variables.

    Raises:
        IncompatibleError: a value depends on the job.
    """
    if names := left_open(plan.variables):
        raise IncompatibleError(
            "its value depends on the job, but all users of a Dockerfile get the same variables",
            where=f"environment.run.{names[0]}",
            remedy="use --format singularity, or set a value without {user} and {jobid}",
        )
    variables = {**plan.variables, **_mpi_variables(recipe)}
    words = [
        f'VIRTUAL_ENV="{plan.environment}"',
        f'PATH="{plan.environment}/bin:$PATH"',
        'PYTHONNOUSERSITE="1"',
    ]
    for name, value in variables.items():
        escaped = re.sub(r'([\\"$])', r"\\\1", value)
        words.append(f'{name}="{escaped}"')
    return "ENV " + " \\\n    ".join(words)


def _mpi_variables(recipe: Recipe) -> dict[str, str]:
    """Variables that Open MPI needs in an image.

    Each rank may be in a user namespace of its own, which may not read another's memory.
    """
    if recipe.mpi is None or recipe.mpi.kind != "openmpi":
        return {}
    if (recipe.mpi.version or "").startswith("5."):
        return {"OMPI_MCA_smsc": "^cma"}
    return {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def written(text: str, path: str) -> str:
    """A shell command that writes a text to a file, safe in all formats.

    Every line of the text is a quoted word on its own line. So no line begins with a character
    that has a meaning in definitions (%, #), none ends with a line continuation, and Apptainer's
    {{ }} does not occur.
    """
    lines = [
        re.sub(r"\{(?=\{)", "{''", "'" + line.replace("'", "'\\''") + "'")
        for line in text.removesuffix("\n").split("\n")
    ]
    words = " \\\n".join(f"        {line}" for line in lines)
    target = shlex.quote(path)
    return f"mkdir -p {shlex.quote(str(Path(path).parent))} && printf '%s\\n' \\\n{words} \\\n        > {target}"


def checks(recipe: Recipe) -> tuple[str, ...]:
    """Shell commands that fail if Horovod in the image is not as requested.

    ``horovodrun --check-build`` never fails; its output is for people.
    """
    requested = [f"hvd.{controller}_built()" for controller in recipe.horovod.controllers]
    gpu = recipe.horovod.gpu
    if gpu and "nccl" in gpu.libraries.values():
        requested.append("hvd.nccl_built()")
    return (
        "horovodrun --check-build",
        *(
            f"python -c 'import horovod.{framework} as hvd; assert {' and '.join(requested)}'"
            for framework in recipe.horovod.frameworks
        ),
    )


def _mpi(recipe: Recipe) -> Any:
    """hpccm's block that builds MPI from source in /usr/local; None if a package provides it."""
    mpi = recipe.mpi
    if mpi is None or mpi.package or "mpi" not in recipe.horovod.controllers:
        return None
    blocks = {"openmpi": openmpi, "mpich": mpich}
    if mpi.kind not in blocks or mpi.version is None:
        raise IncompatibleError(
            f"an image needs a version of Open MPI or MPICH to build, not {mpi.kind}"
            f" {mpi.version or 'without a version'}",
            where="mpi.kind" if mpi.version else "mpi.version",
            remedy="state the Open MPI of the hosts: --set mpi.kind=openmpi --set mpi.version=4.1.8",
        )
    more: dict[str, object] = {}
    if mpi.kind == "openmpi":
        # Since version 4, Open MPI uses InfiniBand through UCX, which configure finds by its
        # headers. Only the BTL openib needs verbs.
        transports = recipe.launch.mca.get("btl", "")
        verbs = not transports.startswith("^") and "openib" in transports.split(",")
        more = {"cuda": "/usr/local/cuda" if mpi.cuda_aware else False, "infiniband": verbs}
    return blocks[mpi.kind](
        version=mpi.version, prefix="/usr/local", ldconfig=True, environment=False, **more
    )


def _checked_download(recipe: Recipe, block: str) -> list[str]:
    """Shell commands that download the source of MPI and compare its hash.

    Raises:
        IncompatibleError: the hash is not known.
    """
    mpi = recipe.mpi
    address = re.search(r" -P /var/tmp (\S+)", block)
    assert mpi is not None
    assert address is not None
    url = address[1]
    known = parse_toml(read_text(_MPI_SOURCES, OWN))
    sha256 = mpi.sha256 or known[mpi.kind].get(mpi.version)
    if not sha256:
        raise IncompatibleError(
            f"hvdenv does not know the hash of {mpi.kind} {mpi.version}, so it does not compile it",
            where="mpi.sha256",
            remedy=f"set it to the SHA-256 of {url}: --set mpi.sha256=HASH",
        )
    file = f"/var/tmp/{url.rpartition('/')[2]}"
    return [
        f"wget -q -O {file} {shlex.quote(url)}",
        f"echo '{sha256}  {file}' | sha256sum -c -",
    ]
