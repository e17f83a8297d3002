"""A recipe as an image: a Singularity/Apptainer definition or a Dockerfile, as text.

The image runs the same steps as a build on a machine: the script of
``plan --format bash`` stands in the definition, quoted, and is run in the image. Nothing
is run here. The library hpccm knows the two formats, the package managers and how Open
MPI is built from source.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hvdenv.command import Command, Outcome
from hvdenv.environments.activation import left_open
from hvdenv.errors import IncompatibleError, RecipeError, StepError, UsageError
from hvdenv.model.cluster import Container
from hvdenv.model.facts import Facts, Interpreter, Tool
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import Plan, candidates, make_plan
from hvdenv.plans.script import render_bash
from hvdenv.reading import OWN, read_text
from hvdenv.schema import parse_toml

Format = Literal["singularity", "docker"]

FOLDER = Path("/opt/horovod")
SCRIPT = "/usr/local/share/horovod/build.sh"
_MPI_SOURCES = Path(__file__).parents[1] / "knowledge/mpi_sources.toml"

# The first that is on the machine builds.
TOOLS: dict[Format, tuple[str, ...]] = {
    "singularity": ("apptainer", "singularity"),
    "docker": ("podman", "buildah", "docker"),
}


class PythonPackages(NamedTuple):
    """A Python of a distribution: its version, and the packages that bring all of it."""

    version: str
    packages: tuple[str, ...]


class Distribution(NamedTuple):
    """What an image of a Linux distribution has.

    Attributes:
        pattern: found in the name of an image of it.
        name: for people.
        hpccm: the name of it, or of one with the same package manager, to hpccm.
        glibc, gcc: versions there.
        packages: what a build and mpirun need.
        pythons: the best first.
    """

    pattern: str
    name: str
    hpccm: str
    glibc: str
    gcc: str
    packages: tuple[str, ...]
    pythons: tuple[PythonPackages, ...]


# mpirun of a package starts nothing where it finds no ssh, not even on one host.
_DEBIAN = ("ca-certificates", "g++", "gcc", "openssh-client")
_REDHAT = ("ca-certificates", "gcc", "gcc-c++", "openssh-clients")


def _debian(*versions: str) -> tuple[PythonPackages, ...]:
    return tuple(
        PythonPackages(each, (f"python{each}", f"python{each}-dev", f"python{each}-venv"))
        for each in versions
    )


def _redhat(*versions: str) -> tuple[PythonPackages, ...]:
    return tuple(
        PythonPackages(each, (f"python{each}", f"python{each}-devel")) for each in versions
    )


# One line adds a distribution.
DISTRIBUTIONS = (
    Distribution(
        r"ubuntu[:-]?20\.04|\bfocal\b", "Ubuntu 20.04", "ubuntu20", "2.31", "9.4.0",
        _DEBIAN, _debian("3.9", "3.8"),
    ),
    Distribution(
        r"ubuntu[:-]?22\.04|\bjammy\b", "Ubuntu 22.04", "ubuntu22", "2.35", "11.4.0",
        _DEBIAN, _debian("3.10"),
    ),
    Distribution(
        r"ubuntu[:-]?24\.04|\bnoble\b", "Ubuntu 24.04", "ubuntu24", "2.39", "13.3.0",
        _DEBIAN, _debian("3.12"),
    ),
    Distribution(
        r"debian[:-]?12|\bbookworm\b", "Debian 12", "ubuntu22", "2.36", "12.2.0",
        _DEBIAN, _debian("3.11"),
    ),
    Distribution(
        r"debian[:-]?13|\btrixie\b", "Debian 13", "ubuntu24", "2.41", "14.2.0",
        _DEBIAN, _debian("3.13"),
    ),
    Distribution(
        r"(rockylinux|almalinux|ubi)[:-]?8\b", "Red Hat 8", "rockylinux8", "2.28", "8.5.0",
        _REDHAT, _redhat("3.11", "3.12"),
    ),
    Distribution(
        r"(rockylinux|almalinux|ubi)[:-]?9\b", "Red Hat 9", "rockylinux9", "2.34", "11.5.0",
        _REDHAT, (*_redhat("3.11", "3.12"), PythonPackages("3.9", ("python3", "python3-devel"))),
    ),
)  # fmt: skip


def distribution_of(base: str) -> Distribution:
    """The distribution of a base image, by its name.

    Raises:
        IncompatibleError: the name does not tell.
    """
    for each in DISTRIBUTIONS:
        if re.search(each.pattern, base):
            return each
    raise IncompatibleError(
        "the name of this image does not say which distribution it is",
        where=f"container.base: {base}",
        remedy="name one with its release, such as debian:bookworm-slim or"
        " nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04; known are "
        + ", ".join(each.name for each in DISTRIBUTIONS),
    )


def image_facts(container: Container, machine: str, cores: int) -> Facts:
    """Facts of the image while it is built, from what its distribution is known to have.

    Args:
        container: the recipe's table.
        machine: architecture of the image.
        cores: how many the build may use.
    """
    base = base_of(container)
    distribution = distribution_of(base)
    return Facts(
        origin="declared",
        host=base,
        system="Linux",
        machine=machine,
        glibc=distribution.glibc,
        cpu="",
        cpu_flags=(),
        cores=cores,
        root=True,
        interpreters=tuple(
            Interpreter(f"/usr/bin/python{each.version}", each.version)
            for each in distribution.pythons
        ),
        cc=Tool("/usr/bin/gcc", distribution.gcc),
        cxx=Tool("/usr/bin/g++", distribution.gcc),
    )


def image_python(recipe: Recipe, facts: Facts, wanted: str | None) -> Interpreter:
    """The Python of the distribution that the recipe allows.

    Args:
        recipe: the resolved recipe.
        facts: from image_facts().
        wanted: version that the user named, such as 3.11; None for the best.

    Raises:
        IncompatibleError: the distribution has none that fits.
    """
    for each in candidates(recipe, facts):
        if wanted in (None, each.version):
            return each
    there = ", ".join(each.version for each in facts.interpreters)
    asked_for = f", --python asks for {wanted}" if wanted else ""
    raise IncompatibleError(
        f"the recipe needs Python {recipe.python.version}{asked_for}; the image has {there}",
        where=f"container.base: {facts.host}",
        remedy="start from an image of another distribution (--set container.base=...), or take"
        " a variant for this Python",
    )


def container_of(recipe: Recipe) -> Container:
    """The recipe's table [container].

    Raises:
        RecipeError: it has none.
    """
    if recipe.container is None:
        raise RecipeError(
            f"the recipe {recipe.name} has no table [container], which names the image to start from",
            remedy="add one, or name an image: --set container.base=debian:bookworm-slim",
        )
    return recipe.container


def base_of(container: Container) -> str:
    """The image to start from.

    Raises:
        RecipeError: none is named: somebody else makes this image.
    """
    if container.base is None:
        raise RecipeError(
            "the recipe does not say which image to start from",
            where="container.base",
            remedy="name one: --set container.base=debian:bookworm-slim; to run an image that is"
            " there, no definition is needed",
        )
    return container.base


def for_image(recipe: Recipe) -> Recipe:
    """The recipe without what belongs to the cluster: an image has no modules.

    Raises:
        IncompatibleError: it takes something from the modules, the site or conda.
    """
    unfit = [
        key
        for key, wrong in (
            ("python.provider", recipe.python.provider != "venv"),
            ("python.from_modules", recipe.python.from_modules),
            ("horovod.provider", recipe.horovod.provider == "present"),
            *(
                (f"frameworks.{name}.provider", package.provider == "present")
                for name, package in recipe.frameworks.items()
                if name in recipe.horovod.frameworks
            ),
        )
        if wrong
    ]
    if unfit:
        raise IncompatibleError(
            "an image has nothing of the cluster and no conda: the Python of its distribution,"
            " and what pip or a source brings",
            where=", ".join(unfit),
            remedy="take a recipe or a variant that installs these with pip, such as `hvdenv"
            " container local --set container.base=debian:bookworm-slim`",
        )
    return recipe._replace(modules=None)


def image_plan(
    recipe: Recipe, variants: tuple[str, ...], facts: Facts, python: Interpreter
) -> Plan:
    """The plan of what the image runs; arguments as for make_plan()."""
    return make_plan(for_image(recipe), variants, facts, python).at(FOLDER)


def define(recipe: Recipe, plan: Plan, form: Format) -> str:
    """The definition.

    Args:
        recipe: with a table [container].
        plan: from image_plan().
        form: ``singularity`` or ``docker``.

    Raises:
        IncompatibleError: its MPI cannot be put into an image.
    """
    import hpccm  # type: ignore[import-untyped]
    from hpccm.building_blocks import packages  # type: ignore[import-untyped]
    from hpccm.primitives import (  # type: ignore[import-untyped]
        baseimage,
        comment,
        label,
        raw,
        shell,
    )

    container = container_of(recipe)
    base = base_of(container)
    distribution = distribution_of(base)
    # hpccm keeps these for the whole process.
    hpccm.config.set_container_format(form)
    hpccm.config.set_working_directory("/var/tmp")
    stage = hpccm.Stage()
    name = "+".join((plan.recipe, *plan.variants))
    stage += comment(f"Horovod environment {name}, plan {plan.digest[:12]}", reformat=False)
    stage += baseimage(
        image=base, _distro=distribution.hpccm, _arch=_architecture(plan)
    )  # fmt: skip
    mpi = _mpi(recipe)
    wanted = {*distribution.packages, *_python_packages(distribution, plan), *container.packages}
    wanted |= {"wget"} if mpi else set()
    stage += packages(ospackages=[shlex.quote(each) for each in sorted(wanted)])
    if mpi is not None:
        stage += comment("Checked here: hpccm's own wget keeps a file that exists", reformat=False)
        stage += shell(commands=_checked_download(recipe, str(mpi)), chdir=False)
        stage += mpi
    stage += comment("The steps of the plan", reformat=False)
    stage += shell(
        commands=[
            written(render_bash(plan, FOLDER), SCRIPT),
            f"PIP_NO_CACHE_DIR=1 bash {SCRIPT}",
        ]
    )
    if form == "docker":
        stage += raw(docker=_docker_environment(recipe, plan))
    else:
        stage += raw(singularity=_singularity_environment(recipe))
    stage += label(
        metadata={
            "hvdenv.recipe": plan.recipe,
            "hvdenv.variants": ",".join(plan.variants) or "none",
            "hvdenv.plan": plan.digest,
            "hvdenv.base": base,
        }
    )
    if form == "singularity":
        stage += raw(singularity=_RUNSCRIPT)
    stage += shell(commands=list(checks(recipe)), chdir=False, _test=True)
    return f"{stage}\n"


_RUNSCRIPT = """\
%runscript
    [ $# -gt 0 ] || set -- python
    exec "$@\""""


def written(text: str, path: str) -> str:
    """A shell command that writes a text to a file, safe in both formats.

    Every line of the text is a quoted word on a line of its own: none begins with what
    means something to a definition (%, #), none ends with what continues a line, and
    Apptainer's {{ }} does not occur.
    """
    lines = [
        re.sub(r"\{(?=\{)", "{''", "'" + line.replace("'", "'\\''") + "'")
        for line in text.removesuffix("\n").split("\n")
    ]
    words = " \\\n".join(f"        {line}" for line in lines)
    target = shlex.quote(path)
    return f"mkdir -p {shlex.quote(str(Path(path).parent))} && printf '%s\\n' \\\n{words} \\\n        > {target}"


def checks(recipe: Recipe) -> tuple[str, ...]:
    """Shell commands that fail where Horovod is not in the image as asked for.

    ``horovodrun --check-build`` is there to be read: it never fails.
    """
    asked = [f"hvd.{controller}_built()" for controller in recipe.horovod.controllers]
    gpu = recipe.horovod.gpu
    if gpu and "nccl" in (gpu.operations, gpu.allreduce):
        asked.append("hvd.nccl_built()")
    return (
        "horovodrun --check-build",
        *(
            f"python -c 'import horovod.{framework} as hvd; assert {' and '.join(asked)}'"
            for framework in recipe.horovod.frameworks
        ),
    )


class Build(NamedTuple):
    """What an image is built from, and with what.

    Attributes:
        tool: program that builds.
        definition: the file.
        image: file of the image, or its tag where the tool keeps images itself.
        root: whether root builds.
        binds: files and folders of this machine that the build sees, HERE or HERE:THERE.
    """

    tool: str
    definition: Path
    image: str
    root: bool
    binds: tuple[str, ...] = ()


def mount_points(binds: tuple[str, ...]) -> str:
    """A section for a definition that is built with --bind: what is bound has to be there.

    Raises:
        UsageError: a path has what a definition gives a meaning.
    """
    if not binds:
        return ""
    lines = ["%setup", 'root="${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}"']
    for bind in binds:
        if not re.fullmatch(r"/[^\x00-\x1f{}%:]*(:/[^\x00-\x1f{}%:]*)?", bind):
            raise UsageError(
                f"--bind: {bind!r} is not an absolute path, or has control characters, braces or %",
                remedy="write /HERE or /HERE:/THERE",
            )
        here, _, there = bind.partition(":")
        target = Path(there or here)
        folder, name = (f'"$root"{shlex.quote(str(path))}' for path in (target.parent, target))
        lines.append(
            f"if [ -d {shlex.quote(here)} ]; then mkdir -p {name};"
            f" else mkdir -p {folder} && touch {name}; fi"
        )
    return "\n" + "\n    ".join(lines) + "\n"


def build_command(build: Build) -> Command:
    """How a tool builds an image.

    Raises:
        IncompatibleError: it cannot do what is asked for.
    """
    folder = str(build.definition.parent)
    if build.tool in TOOLS["singularity"]:
        words = [build.tool, "build", *([] if build.root else ["--fakeroot"])]
        words += [word for bind in build.binds for word in ("--bind", bind)]
        return Command((*words, build.image, str(build.definition)))
    verb = "bud" if build.tool == "buildah" else "build"
    words = [build.tool, verb, "--tag", build.image, "--file", str(build.definition)]
    if build.tool == "docker" and build.binds:
        raise IncompatibleError(
            "docker cannot show a folder of this machine to a build",
            remedy="build with podman or buildah, or without --bind",
        )
    words += [word for bind in build.binds for word in ("--volume", _volume(bind))]
    return Command((*words, folder))


# What tools print last where they may not build or cannot, and what helps.
_REFUSALS = (
    (
        r"could not use fakeroot|You must be the root user"
        r"|(not enough IDs|insufficient UIDs or GIDs) available in .{0,200}namespace"
        r"|creating \S{0,200}/dev/null: operation not permitted|set(groups|egid|euid) \d+ failed"
        r"|/\.singularity\.d/libs/fake(d|root)",
        "you may not be root in an image here (fakeroot): /etc/subuid and /etc/subgid give you"
        " no range of numbers",
        "ask for one (`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER`),"
        " or build where you are root and copy the image here",
    ),
    (
        r"Failed to create \S+ namespaces?|no user namespace available|cannot clone: Operation not permitted"
        r"|user namespaces? (is|are) (disabled|not)",
        "this machine does not let you make user namespaces",
        "build on another machine or as root, and copy the image here",
    ),
    (
        r"Cannot connect to the Docker daemon|permission denied .{0,80}docker\S{0,2} daemon",
        "the docker here has no daemon that answers you",
        "start it, join its group, or install podman or buildah, which need none",
    ),
    (
        r"No space left on device|disk quota exceeded",
        "there is no space left where the image is built",
        "name another place: APPTAINER_TMPDIR and APPTAINER_CACHEDIR for apptainer, TMPDIR for"
        " the others",
    ),
    (
        r"no such host|dial tcp|Temporary failure (in name resolution|resolving)|connection refused",
        "a registry or a package server cannot be reached from here",
        "build on a machine that reaches it, or set https_proxy; what the build has to see of"
        " this machine (pip.conf, a folder of packages) goes with --bind",
    ),
    (
        r"manifest unknown|unexpected status code 40[13]|access to the resource is denied",
        "the registry does not give out the base image",
        "look whether its name and tag exist: container.base",
    ),
)


def failed(build: Build, outcome: Outcome) -> StepError:
    """The error for a build that failed."""
    tail = outcome.tail()
    known = (
        (cause, remedy)
        for pattern, cause, remedy in _REFUSALS
        if re.search(pattern, tail, re.IGNORECASE)
    )
    unknown = (
        f"{build.tool} could not build the image (exit {outcome.returncode})",
        "read the last lines above; `hvdenv plan RECIPE --format bash` prints what runs in the image",
    )
    cause, remedy = next(known, unknown)
    return StepError(cause, where=build.image, remedy=remedy, detail=tail)


def _volume(bind: str) -> str:
    """podman and buildah want both names."""
    here, _, there = bind.partition(":")
    return f"{here}:{there or here}:ro"


def _architecture(plan: Plan) -> str:
    return plan.wheel.stem.rpartition("-linux_")[2]


def _python_packages(distribution: Distribution, plan: Plan) -> tuple[str, ...]:
    return next(
        each.packages for each in distribution.pythons if each.version == plan.python.version
    )


def _mpi(recipe: Recipe) -> Any:
    """hpccm's block that builds MPI from source; None where a package of the plan brings it.

    It lies in /usr/local, where every step looks.
    """
    from hpccm.building_blocks import mpich, openmpi

    mpi = recipe.mpi
    if mpi is None or mpi.package or "mpi" not in recipe.horovod.controllers:
        return None
    blocks: dict[str, Callable[..., Any]] = {"openmpi": openmpi, "mpich": mpich}
    if mpi.kind not in blocks or mpi.version is None:
        raise IncompatibleError(
            f"{mpi.kind} cannot be built in an image"
            if mpi.version
            else "the version of MPI is not known, and an image gets its own",
            where="mpi.kind" if mpi.version else "mpi.version",
            remedy="say which Open MPI the hosts have: --set mpi.kind=openmpi --set mpi.version=4.1.8",
        )
    more: dict[str, Any] = {}
    if mpi.kind == "openmpi":
        # Since version 4 InfiniBand goes through UCX, which configure finds by its headers.
        # Only the BTL openib needs verbs.
        transports = recipe.launch.mca.get("btl", "")
        verbs = not transports.startswith("^") and "openib" in transports.split(",")
        more = {"cuda": "/usr/local/cuda" if mpi.cuda_aware else False, "infiniband": verbs}
    return blocks[mpi.kind](
        version=mpi.version, prefix="/usr/local", ldconfig=True, environment=False, **more
    )


def _checked_download(recipe: Recipe, block: str) -> list[str]:
    """Shell commands that download the source of MPI and compare it with its hash.

    Args:
        recipe: names the MPI.
        block: hpccm's commands, which name the address.

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
            f"hvdenv does not know the hash of {mpi.kind} {mpi.version}, and compiles no source unchecked",
            where="mpi.sha256",
            remedy=f"set it to the SHA-256 of {url}: --set mpi.sha256=HASH",
        )
    file = f"/var/tmp/{url.rpartition('/')[2]}"
    return [
        f"wget -q -O {file} {shlex.quote(url)}",
        f"echo '{sha256}  {file}' | sha256sum -c -",
    ]


def _mpi_variables(recipe: Recipe) -> dict[str, str]:
    """What Open MPI has to know in an image.

    Each rank may be in a user namespace of its own, and reading another's memory is
    refused across them.
    """
    if recipe.mpi is None or recipe.mpi.kind != "openmpi":
        return {}
    if (recipe.mpi.version or "").startswith("5."):
        return {"OMPI_MCA_smsc": "^cma"}
    return {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def _singularity_environment(recipe: Recipe) -> str:
    """%environment: what the host's mpirun or modules hand on is not the image's.

    Apptainer gives programs the host's value of a variable that is unset here, so it is set
    to nothing, which Open MPI and Python take as unset.
    """
    lines = [
        "%environment",
        "unset OPAL_PREFIX",
        f". {FOLDER}/activate.sh",
        *(f'export {name}="${{{name}-}}"' for name in ("OPAL_PREFIX", "PYTHONHOME", "PYTHONPATH")),
        # Set by the host's mpirun; Open MPI 4 waits for ever where the two differ.
        'export PMIX_INSTALL_PREFIX="$OPAL_PREFIX"',
        *(f"export {name}={shlex.quote(value)}" for name, value in _mpi_variables(recipe).items()),
    ]
    return "\n    ".join(lines)


def _docker_environment(recipe: Recipe, plan: Plan) -> str:
    if names := left_open(plan.variables):
        raise IncompatibleError(
            "its value depends on the job, and the variables of a Dockerfile are the same for all",
            where=f"environment.run.{names[0]}",
            remedy="take --format singularity, or set a value without {user} and {jobid}",
        )
    variables = {**plan.variables, **_mpi_variables(recipe)}
    words = [
        f'VIRTUAL_ENV="{plan.environment}"',
        f'PATH="{plan.environment}/bin:$PATH"',
        'PYTHONNOUSERSITE="1"',
        *(f"{name}={_docker_quoted(value)}" for name, value in variables.items()),
    ]
    return "ENV " + " \\\n    ".join(words)


def _docker_quoted(value: str) -> str:
    """A value in a Dockerfile in which nothing is put in the place of a variable."""
    return '"' + re.sub(r'([\\"$])', r"\\\1", value) + '"'
