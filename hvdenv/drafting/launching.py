"""The lines of a page that start ranks: launchers, containers, and requests for an allocation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from hvdenv.drafting import jobs
from hvdenv.drafting.jobs import LAUNCHER_FIELDS, Field
from hvdenv.drafting.options import split, tables
from hvdenv.drafting.page import Page
from hvdenv.drafting.shell import UNKNOWN, Statement
from hvdenv.drafting.values import INFERRED, Left, Read, Value, at, leave
from hvdenv.drafting.variables import variable
from hvdenv.model.recipe_checks import horovodrun_problems

_OPEN_MPI = frozenset({"mpirun", "mpiexec", "orterun"})
# Launchers of sites.
_SITE_LAUNCHERS = {"ibrun": "ibrun -n {ranks} {program}"}
_SHELLS = frozenset({"bash", "sh", "zsh", "tcsh", "csh", "$SHELL", "/bin/bash", "/bin/sh"})
_OTHER_RUNTIMES = frozenset({"shifter", "sarus", "enroot", "podman", "podman-hpc", "docker"})
_NO_RANKS = frozenset({"hostname", "nvidia-smi", "rocm-smi", "env", "printenv", "echo", "ls", "cp"})
_HAVE_HOROVOD = re.compile(
    r"nvcr\.io/nvidia/(?:pytorch|tensorflow)|(?:docker\.io/)?(?:horovod|uber)/"
)
_NO_PROGRAM = leave("it starts no program with Horovod", understood=True)


def launch(statement: Statement, _: Page) -> Iterator[Field | Read]:
    name, *words = statement.words
    name = name.rpartition("/")[2].removesuffix(".hydra").replace("orterun", "mpirun")
    table = {**tables()["launch"], **tables().get("openmpi" if name in _OPEN_MPI else name, {})}
    options = split(words, table, program=True)
    if options.has("-cb", "--check-build"):
        yield leave("`hvdenv verify` shows more", understood=True)
        return
    if not options.rest or options.rest[0] in _NO_RANKS or options.has("--version", "-info"):
        yield _NO_PROGRAM
        return
    if name == "horovodrun":
        # Without either, horovodrun uses MPI if Horovod was built with it: see combine.py.
        controllers = [each for each in ("mpi", "gloo") if options.has(f"--{each}")]
        name = f"horovodrun-{(controllers or [''])[0]}"
    yield Value(at("launch.launcher"), name)
    if template := _SITE_LAUNCHERS.get(name):
        yield Value(at("launch.launchers", name, "command"), template, weight=INFERRED)
    for option, value in options.given:
        field = table[option].meaning if option in table else "other"
        if field in LAUNCHER_FIELDS:
            yield Field(statement, field, value)
        elif field == "other":
            yield _other(option, value, name)
        else:
            yield from _option(field, value)
    yield from _container(options.rest)


def _option(field: str, value: str) -> Iterator[Read]:
    name, equals, text = value.partition("=")
    if field == "variable" and equals:
        yield from variable(name, text, exported=True)
    elif field == "variable":
        yield Value(at("launch.exports"), name, item=True)
    elif field == "mca":
        yield Value(at("launch.mca", name), text)
    elif field == "interfaces":
        yield from (Value(at("network.use"), each, item=True) for each in value.split(","))
    elif field == "hostfile":
        yield from [jobs.mark_site("hostfile")] if value == "$SGE_JOB_HOSTLIST" else []
    elif field != "own":
        table = "job" if field in ("ranks_per_node", "cpus_per_rank") else "launch"
        yield Value(at(table, field), int(value) if value.isdigit() else value)


def _other(option: str, value: str, launcher: str) -> Read:
    if launcher.startswith("horovodrun-") and option.startswith("--"):
        argument = f"{option}={value}" if value else option
        wrong = [message for _, message in horovodrun_problems([argument])]
        return leave(wrong[0]) if wrong else Value(at("launch.horovodrun"), argument, item=True)
    return leave(f"recipes have no key for {option} of {launcher}")


def srun(statement: Statement, _: Page) -> Iterator[Field | Read]:
    yield Value(at("scheduler"), "slurm", weight=INFERRED)
    words = statement.words[1:]
    options = split(words, tables()["slurm"], program=True)
    read = list(jobs.option_fields(statement, words[: len(words) - len(options.rest)], "slurm"))
    if options.has("--pty") or not options.rest or options.rest[0] in _SHELLS:
        yield from _interactive(read)
    elif options.rest[0] in _NO_RANKS:
        yield _NO_PROGRAM
    elif options.rest[0] in _OTHER_RUNTIMES:
        yield leave(f"hvdenv does not know how {options.rest[0]} runs images")
    else:
        yield Value(at("launch.launcher"), "srun")
        # Which part of an allocation a step uses says nothing about the job.
        of_step = ("srun_mpi", "cpu_bind")
        yield from (each for each in read if isinstance(each, Left) or each.field in of_step)
        yield Field(statement, "ranks", options.last("-n", "--ntasks"))
        yield from _container(options.rest)


def container(statement: Statement, _: Page) -> Iterator[Read]:
    yield from _container(statement.words)


def _container(words: Sequence[str]) -> Iterator[Read]:
    """singularity and apptainer, possibly behind a launcher."""
    runtime, action, *arguments = *words, "", ""
    runtime = runtime.rpartition("/")[2]
    if runtime not in ("singularity", "apptainer"):
        return
    if action not in ("exec", "run"):
        yield leave("`hvdenv container` makes images", understood=action not in ("pull", "build"))
        return
    options = split(arguments, ("-B", "--bind", "--env", "--home", "-H", "--pwd"), program=True)
    yield Value(at("container.runtime"), runtime)
    for option, kind in (("--nv", "nvidia"), ("--rocm", "rocm")):
        if options.has(option):
            yield Value(at("container.gpu"), kind)
    for bind in (part for each in options.all("-B", "--bind") for part in each.split(",")):
        source, _, target = bind.partition(":")
        if target in ("", source):
            yield Value(at("container.binds"), source, item=True)
        else:
            yield leave(f"hvdenv binds directories at their own path, not {bind}")
    yield Value(at("container.image"), (options.rest or (UNKNOWN,))[0])


def base_image(statement: Statement, page: Page) -> Iterator[Read]:
    """FROM of a Dockerfile."""
    name = next((each for each in statement.words[1:] if not each.startswith("--")), "")
    page.of_image = True
    if _HAVE_HOROVOD.match(name):
        yield leave(
            "this image contains Horovod: to run it as it is, make a file of it, and set container.image"
        )
    elif ":" in name or "/" in name:
        yield Value(at("container.base"), name)
    else:
        yield leave("an earlier stage of the image, or an image without a version")


def system_packages(statement: Statement, page: Page) -> Iterator[Read]:
    """apt-get and its like."""
    options = split(statement.words[1:], ("-t", "-o", "-c", "--repo"))
    action, *names = options.rest or ("",)
    if action not in ("install", "add"):
        yield leave("it changes nothing that a recipe describes", understood=True)
        return
    for kind in ("openmpi", "mpich"):
        if any(kind in each for each in names):
            yield Value(at("mpi.kind"), kind, weight=INFERRED)
    if page.of_image:
        yield from (Value(at("container.packages"), each, item=True) for each in names)
    else:
        yield leave("packages of the machine: which modules of the cluster provide them?")


def request(statement: Statement, page: Page) -> Iterator[Field | Read]:
    """Options of an allocation on a command line."""
    scheduler = jobs.find_scheduler(statement, page)
    if not scheduler:
        yield leave("hvdenv submits jobs itself", understood=True)
        return
    page.scheduler = page.scheduler or scheduler
    yield Value(at("scheduler"), scheduler, weight=INFERRED)
    name, *words = statement.words
    read = list(jobs.option_fields(statement, words, scheduler))
    if name in ("salloc", "sinteractive") or {"-I", "-Is"} & {*words}:
        yield from _interactive(read)
    else:
        yield from read
        yield leave("hvdenv submits jobs itself", understood=True)


def _interactive(read: Iterable[Field | Left]) -> Iterator[Field | Read]:
    """The options of an interactive job are those of other jobs, unless a script states them."""
    for each in read:
        if isinstance(each, Field):
            yield each._replace(statement=each.statement._replace(batch=False))
        elif not each.understood:
            yield each
    yield leave("for an interactive job: hvdenv shell", understood=True)
