"""The programs of pages, and those that start ranks, request an allocation, or are about images."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from hvdenv.drafting import modules, packages
from hvdenv.drafting.jobs import LAUNCHED, read_options
from hvdenv.drafting.options import meaning_of, split, tables, variable
from hvdenv.drafting.shell import Page, Statement
from hvdenv.drafting.values import OPTION, UNKNOWN, Fact, Left, Value, Weight, at, leave
from hvdenv.model.cluster import LauncherName
from hvdenv.model.recipe_checks import horovodrun_problems

# Launchers of sites. Each resource set of jsrun is one rank with its GPU.
_SITE_LAUNCHERS = {
    "ibrun": "ibrun -n {ranks} {program}",
    "jsrun": "jsrun -n {ranks} -r {ranks_per_node} -a 1[[ -c {cpus_per_rank}]]%s {program}",
}
_HAVE_HOROVOD = re.compile(
    r"nvcr\.io/nvidia/(?:pytorch|tensorflow)|(?:docker\.io/)?(?:horovod|uber)/"
)
_NO_PROGRAM = leave("it starts no program with Horovod", understood=True)
_SUBMITS = leave("hvdenv submits jobs itself", understood=True)
_INTERACTIVE = leave("for an interactive job: hvdenv shell", understood=True)


def launch(statement: Statement, _: Page) -> Iterator[Fact]:
    name, *words = statement.words
    name = name.rpartition("/")[2].removesuffix(".hydra").replace("orterun", "mpirun")
    kind = "openmpi" if name in ("mpirun", "mpiexec") else name
    table = {**tables()["launch"], **tables().get(kind, {})}
    options = split(words, table, program=True)
    if options.all("check"):
        yield leave("`hvdenv verify` shows more", understood=True)
        return
    if not options.rest or _started(options.rest) == "no_ranks" or options.all("version"):
        yield _NO_PROGRAM
        return
    if name == "horovodrun":
        # Without either, horovodrun uses MPI if Horovod was built with it.
        name = f"horovodrun-{next((each for each in ('mpi', 'gloo') if options.all(each)), '')}"
    yield Value(at("launch.launcher"), name)
    if template := _SITE_LAUNCHERS.get(name):
        command = template.replace("%s", " -g 1" if options.all("gpus_per_set") else "")
        yield Value(at("launch.launchers", name, "command"), command, weight=Weight.INFERRED)
    if options.last("ranks_per_set") not in ("", "1"):
        yield leave("its resource sets have several ranks: set job.nodes and job.ranks_per_node")
        return
    for option, meaning, value in options.given:
        if meaning == "other" or option not in table:
            yield _other(option, value, name)
        else:
            yield from _option(meaning, value)
    yield from _container(options.rest)


def _started(words: Sequence[str]) -> str:
    """What a launcher starts: nothing, a program, or a kind of what is no program with Horovod."""
    return (meaning_of(words[0], "launched") or "program") if words else ""


def _option(meaning: str, value: str) -> Iterator[Fact]:
    name, equals, text = value.partition("=")
    if meaning in LAUNCHED:
        yield Value((OPTION, "", meaning), value)
    elif meaning == "hosts":
        hosts = value.split(",")
        slots = {host.partition(":")[2] for host in hosts}
        if len(slots) == 1 and not re.search(rf"[${UNKNOWN}]", value):
            yield Value((OPTION, "", "launched_nodes"), str(len(hosts)))
            yield Value((OPTION, "", "launched_slots"), slots.pop())
    elif meaning == "variable" and equals:
        yield from variable(name, text, exported=True)
    elif meaning == "variable":
        yield Value(at("launch.exports"), name, item=True)
    elif meaning == "mca":
        yield Value(at("launch.mca", name), text)
    elif meaning == "interfaces":
        yield from (Value(at("network.use"), each, item=True) for each in value.split(","))
    elif "." in meaning:
        yield Value(at(meaning), int(value) if value.isdigit() else value)


def _other(option: str, value: str, launcher: str) -> Fact:
    if launcher.startswith("horovodrun-") and option.startswith("--"):
        argument = f"{option}={value}" if value else option
        wrong = [message for _, message in horovodrun_problems([argument])]
        return leave(wrong[0]) if wrong else Value(at("launch.horovodrun"), argument, item=True)
    return leave(f"recipes have no key for {option} of {launcher}")


def srun(statement: Statement, _: Page) -> Iterator[Fact]:
    yield Value(at("scheduler"), "slurm", weight=Weight.INFERRED)
    words = statement.words[1:]
    rest = split(words, tables()["slurm"], program=True).rest
    options = list(read_options(words[: len(words) - len(rest)], "slurm"))
    if _INTERACTIVE in options or _started(rest) in ("", "shell"):
        yield from _interactive(options)
    elif _started(rest) == "no_ranks":
        yield _NO_PROGRAM
    elif _started(rest) == "runtime":
        yield leave(f"hvdenv does not know how {rest[0]} runs images")
    else:
        yield Value(at("launch.launcher"), "srun")
        for each in options:
            # Which part of an allocation a step uses says nothing about the job.
            if isinstance(each, Left) or each.key[-1].startswith("launch."):
                yield each
            elif each.key[-1] == "tasks":
                yield each._replace(key=(OPTION, "slurm", "ranks"))
        yield from _container(rest)


def request(statement: Statement, page: Page) -> Iterator[Fact]:
    """Options of an allocation on a command line."""
    name, *words = statement.words
    scheduler = meaning_of(name, "request") or _system_of_qsub(words) or page.scheduler
    if scheduler:
        page.scheduler = page.scheduler or scheduler
        yield Value(at("scheduler"), scheduler, weight=Weight.INFERRED)
        options = list(read_options(words, scheduler))
        if name in ("salloc", "sinteractive") or {"-I", "-Is"} & {*words}:
            yield from _interactive(options)
            return
        yield from options
    yield _SUBMITS


def _system_of_qsub(words: Sequence[str]) -> str:
    """Options tell which batch system it belongs to, or else the rest of the page does."""
    if any(word.startswith(("select=", "nodes=", "walltime=", "ncpus=")) for word in words):
        return "pbs"
    return "gridengine" if "-pe" in words else "cobalt" if "-n" in words else ""


def _interactive(options: Iterable[Fact]) -> Iterator[Fact]:
    """The options of an interactive job are those of other jobs, unless these state them."""
    for each in options:
        if isinstance(each, Value):
            yield each._replace(weight=Weight.INTERACTIVE)
        elif not each.understood:
            yield each
    yield _INTERACTIVE


def container(statement: Statement, _: Page) -> Iterator[Fact]:
    yield from _container(statement.words)


def _container(words: Sequence[str]) -> Iterator[Fact]:
    """singularity and apptainer, possibly behind a launcher."""
    runtime, action, *arguments = *words, "", ""
    runtime = runtime.rpartition("/")[2]
    if runtime not in ("singularity", "apptainer"):
        return
    if action not in ("exec", "run"):
        yield leave("`hvdenv container` makes images", understood=action not in ("pull", "build"))
        return
    options = split(arguments, tables()["container"], program=True)
    yield Value(at("container.runtime"), runtime)
    for _, meaning, value in options.given:
        if meaning in ("nvidia", "rocm"):
            yield Value(at("container.gpu"), meaning)
        for bind in value.split(",") if meaning == "binds" else ():
            source, _, target = bind.partition(":")
            told = leave(f"hvdenv binds directories at their own path, not {bind}")
            same = target in ("", source)
            yield Value(at("container.binds"), source, item=True) if same else told
    yield Value(at("container.image"), (options.rest or (UNKNOWN,))[0])


def base_image(statement: Statement, page: Page) -> Iterator[Fact]:
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


def system_packages(statement: Statement, page: Page) -> Iterator[Fact]:
    """apt-get and its like."""
    action, *names = split(statement.words[1:], tables()["apt"]).rest or ("",)
    if action not in ("install", "add"):
        yield leave("it changes nothing that a recipe describes", understood=True)
        return
    for kind in ("openmpi", "mpich"):
        if any(kind in each for each in names):
            yield Value(at("mpi.kind"), kind, weight=Weight.INFERRED)
    if page.of_image:
        yield from (Value(at("container.packages"), each, item=True) for each in names)
    else:
        yield leave("packages of the machine: which modules of the cluster provide them?")


class Program(NamedTuple):
    """A program of pages.

    Attributes:
        table: of the recipe that it is about.
        read: what a command of it means.
    """

    table: str
    read: Callable[[Statement, Page], Iterator[Fact]]


def _export(statement: Statement, _: Page) -> Iterator[Fact]:
    if not statement.variables:
        yield leave("the page sets its value elsewhere", understood=True)


def _needless(statement: Statement, _: Page) -> Iterator[Fact]:
    yield leave(meaning_of(statement.program, "programs"), understood=True)


_PROGRAMS = {
    "launch": Program("launch", launch),
    "srun": Program("launch", srun),
    "request": Program("job", request),
    "module": Program("modules", modules.module),
    "source": Program("modules", modules.source),
    "conda": Program("conda", packages.conda),
    "pip": Program("packages", packages.pip),
    "python": Program("packages", packages.python),
    "base_image": Program("container", base_image),
    "system_packages": Program("container", system_packages),
    "git": Program("", packages.git),
    "container": Program("container", container),
    "export": Program("environment.run", _export),
}
_VERSIONED = re.compile(r"(?:.*/)?(python|pip)[\d.]*")


def find_program(name: str) -> Program | None:
    found = _VERSIONED.fullmatch(name)
    meaning = meaning_of(found[1] if found else name, "programs")
    if not meaning and name in get_args(LauncherName):
        meaning = "launch"
    return _PROGRAMS.get(meaning, Program("", _needless)) if meaning else None


def is_known(name: str) -> bool:
    return name != "." and find_program(name) is not None


def table_of(statement: Statement) -> str:
    """The table of the recipe that a command is about."""
    if statement.directive:
        return "job"
    program = find_program(statement.program)
    return program.table if program else "" if statement.words else "environment.run"
