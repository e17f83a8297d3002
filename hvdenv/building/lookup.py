"""Ask package indexes and channels whether what a recipe requires exists and agrees.

Only metadata is read. No code of a source archive is run: packages without a wheel are not
looked at.
"""

import re
import socket
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hvdenv.base.errors import StepError
from hvdenv.base.reading import GIB, RESULT, read_json
from hvdenv.base.runner import Runner, environment
from hvdenv.building.resolver import MEMORY, Resolver, elsewhere, platform, unanswered
from hvdenv.building.run_step import attempt
from hvdenv.locks import compare, condalock
from hvdenv.locks.packages import canonicalize_name
from hvdenv.model.recipe import Recipe
from hvdenv.plans.resolution import Availability, Resolution
from hvdenv.plans.step import Progress

_ROUNDS = 12
PROXY_SECONDS = 5.0
# Where a proxy's URL names none; also of socks4, socks5h and the like.
_PROXY_PORTS = {"http": 80, "https": 443, "socks": 1080}
_LONGEST = 400
_OUT_OF_MEMORY = (
    f"uv needs more than {MEMORY // GIB} GiB of memory for what the indexes answer; see whether one of"
    " them is broken: `curl -sI URL`"
)


class Questions(NamedTuple):
    """How to ask.

    Attributes:
        maker: of the recipe's steps, in a scratch directory.
        end: the time on the monotonic clock by which all answers must be there.
        where: gives file, line and key for a dotted key of the recipe.
    """

    maker: Resolution
    work: Path
    cache: Path
    runner: Runner
    progress: Progress
    end: float
    where: Callable[[str], str]

    @property
    def left(self) -> float:
        return max(1.0, self.end - time.monotonic())


def look_up(questions: Questions) -> Availability:
    """Ask everything that the recipe's packages come from.

    Raises:
        StepError: a program of hvdenv cannot be started.
    """
    recipe = questions.maker.recipe
    proxies = _proxies()
    conda, provided = Availability(), frozenset[str]()
    if recipe.python.provider == "conda":
        conda, provided = _conda(questions)
    return proxies | conda | _packages(questions, provided)


def _proxies() -> Availability:
    """Proxies of this shell that do not answer; variables with the same proxy are one."""
    named: dict[str, list[str]] = {}
    for name, value in sorted(environment().items()):
        if re.fullmatch(r"(?i)(https?|all)_proxy", name) and value:
            named.setdefault(value, []).append(name)
    dead = set()
    for value, names in named.items():
        host: str | None = "not a URL"
        try:
            address = urlsplit(value if "//" in value else f"http://{value}")
            host = address.hostname
            port = address.port or _PROXY_PORTS.get(address.scheme[:5], 80)
            socket.create_connection((host or "", port), PROXY_SECONDS).close()
        except (OSError, ValueError) as error:
            dead.add(f"{', '.join(names)} ({host}: {error})")
    return Availability({"proxies_dead": frozenset(dead)} if dead else {})


def key_of(recipe: Recipe, package: str) -> str:
    """The key of a recipe that requires a Python package; or empty."""
    name = canonicalize_name(package)
    for framework, found in recipe.frameworks.items():
        if canonicalize_name(found.package or framework) == name:
            return f"frameworks.{framework}.version"
    for table, names in (("packages", recipe.packages), ("build_tools", recipe.build_tools)):
        for each in names:
            if canonicalize_name(each) == name:
                return f"{table}.{each}"
    return "mpi.version" if recipe.mpi and recipe.mpi.package == name else ""


def _conda(questions: Questions) -> tuple[Availability, frozenset[str]]:
    """Solve for the conda packages; with the Python packages that pip finds installed."""
    (step,) = questions.maker.solution({})
    timed = tuple(each._replace(timeout=questions.left) for each in step.commands)
    try:
        outcome = attempt(step._replace(commands=timed), questions.runner, questions.progress)
    except StepError as error:
        return _silent("conda packages", error.message), frozenset()
    if outcome:
        packages = condalock.solved(read_json(questions.maker.solved, RESULT))
        provided = compare.fitting(condalock.for_pip(packages), questions.maker.requirements)
        done = f"conda packages: the channels have {len(packages)} that agree"
        return Availability(looked_up=(done,)), frozenset(provided)
    said = _shortened(_first_cause(outcome.tail(12).rpartition("conda_env: ")[2]))
    if outcome.timed_out:
        said = "no answer in time"
    if outcome.timed_out or re.match("a channel cannot be read|cannot install", said):
        return _silent("conda packages", said), frozenset()
    where = questions.where("conda.packages")
    return Availability({"conda_refused": frozenset({f"{where}: {said}"})}), frozenset()


def _first_cause(text: str) -> str:
    """A chain of causes, as rattler prints it, without those between the request and the first."""
    head, *causes = text.split("Caused by: ")
    return f"{head}{causes[0].strip()}: {causes[-1]}" if len(causes) > 1 else text


def _packages(questions: Questions, provided: Collection[str]) -> Availability:
    """Resolve the packages that pip installs, except for those that conda provides."""
    maker = questions.maker
    if maker.recipe.horovod.provider != "source" or not maker.requirements:
        return Availability()
    tag = platform(maker.facts.machine, maker.glibc)
    if not maker.portable:
        return _silent("Python packages", "the site's Python has some already")
    if not tag:
        machine = f"{maker.facts.machine} with glibc {maker.glibc}"
        return _silent("Python packages", f"no resolver of metadata knows {machine}")
    resolver = Resolver(
        sources=maker.sources,
        work=questions.work,
        cache=questions.cache,
        runner=questions.runner,
        python=elsewhere(maker),
        end=questions.end,
    )
    return _resolved(questions, resolver, tag, {*provided})


def _resolved(questions: Questions, resolver: Resolver, tag: str, apart: set[str]) -> Availability:
    """Resolve again without what cannot be asked, until there is an answer."""
    archives = list[str]()
    for _ in range(_ROUNDS):
        outcome = resolver.compile(questions.maker.requirements, apart, "--no-annotate")
        text = " ".join(outcome.output.split())
        if outcome:
            count = len(re.findall(r"^\S+==", outcome.output, re.MULTILINE))
            done = f"Python packages: {count} agree for {_target(questions.maker, tag)}"
            return Availability(looked_up=(done,)) | _left_out(archives, unanswered(outcome.output))
        if outcome.timed_out:
            return _silent("Python packages", "no answer in time")
        if outcome.returncode < 0 or "memory allocation of" in text:
            return _silent("Python packages", _OUT_OF_MEMORY)
        if "No solution found" not in text:
            return _silent("Python packages", _shortened(re.sub("^(.*?error|hvdenv): ", "", text)))
        unasked = re.findall(r"Wheels are required for `([A-Za-z0-9][\w.-]{0,200})`", text)
        if not unasked:
            return _refused(questions, outcome.output, tag)
        archives += unasked
        apart.update(unasked)
    return _silent("Python packages", f"more than {_ROUNDS} need a source archive")


def _left_out(archives: Iterable[str], silent: Iterable[str]) -> Availability:
    return Availability(
        not_looked_up=(
            *(
                f"{name}: no wheel fits, and the code of its source archive is not run"
                for name in archives
            ),
            *silent,
        )
    )


def _refused(questions: Questions, output: str, tag: str) -> Availability:
    """Why nothing fits."""
    maker = questions.maker
    cause = " ".join(output.partition("cause: ")[2].partition("\nhint:")[0].split())
    last = cause.rpartition("you require ")[2].partition(", we can conclude")[0]
    if len(cause) > _LONGEST:
        cause = f"no file for {_target(maker, tag)} satisfies {last}"
    key = key_of(maker.recipe, re.split(r"[^\w.-]", last, maxsplit=1)[0])
    text = f"{questions.where(key)}: {cause}" if key else cause
    return Availability({"packages_refused": frozenset({text})})


def _target(maker: Resolution, tag: str) -> str:
    return f"Python {maker.python.version} on {tag.replace('-', ' ')}"


def _silent(subject: str, reason: str) -> Availability:
    return Availability(not_looked_up=(f"{subject}: {reason}",))


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[:_LONGEST] + "…"
