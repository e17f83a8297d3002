"""Ask package indexes and channels whether what a recipe requires exists and agrees.

Only metadata is read. No code of a source archive is run: packages without a wheel are not
looked at.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from packaging.utils import canonicalize_name

from hvdenv import STEP_PROGRAMS
from hvdenv.building.availability import Availability
from hvdenv.building.resolve import attempt
from hvdenv.command import OWN_PYTHON, Command, Outcome
from hvdenv.contents.packages import parse_requirement
from hvdenv.errors import StepError
from hvdenv.locks import condalock
from hvdenv.masking import learn
from hvdenv.model.recipe import Recipe
from hvdenv.places import write_text
from hvdenv.plans.resolution import Resolution
from hvdenv.plans.step import Progress
from hvdenv.plans.steps import PIP
from hvdenv.reading import GIB, RESULT, read_json
from hvdenv.runner import Runner
from hvdenv.schema import decode

# uv needs 0.3 GB for the largest sets; an index may answer with more than any machine has.
MEMORY = 4 * GIB
# Minor versions of glibc for which uv knows the platform.
_GLIBCS = (17, 28, *range(31, 41))
_ROUNDS = 12
_LONGEST = 400
_EXTRA = "--extra-index-url"
_OUT_OF_MEMORY = (
    f"uv needs more than {MEMORY // GIB} GiB of memory for what the indexes answer; see whether one of"
    " them is broken: `curl -sI URL`"
)


class Questions(NamedTuple):
    """How to ask.

    Attributes:
        maker: of the recipe's steps, in a scratch folder.
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

    def run(self, *argv: str, env: tuple[tuple[str, str], ...] = ()) -> Outcome:
        return self.runner.run(Command(argv, env, timeout=self.left, memory=MEMORY))

    @property
    def left(self) -> float:
        return max(1.0, self.end - time.monotonic())


def look_up(questions: Questions) -> Availability:
    """Ask everything that the recipe's packages come from.

    Raises:
        StepError: a program of hvdenv cannot be started.
    """
    recipe = questions.maker.recipe
    pages = _pages(questions)
    conda, provided = Availability(), frozenset[str]()
    if recipe.python.provider == "conda":
        conda, provided = _conda(questions)
    return pages | conda | _packages(questions, provided)


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


def _pages(questions: Questions) -> Availability:
    """Indexes of the recipe that are pages with links to files."""
    keys = {
        url: f"frameworks.{name}.{key}"
        for name, framework in questions.maker.recipe.frameworks.items()
        for key, url in (("cpu_index", framework.cpu_index), ("extra_index", framework.extra_index))
        if url
    }
    if not keys:
        return Availability()
    program = str(STEP_PROGRAMS / "index_page.py")
    listed = questions.run(OWN_PYTHON, program, "--files", *keys).output.splitlines()
    found = frozenset(f"{questions.where(keys[url])} = {url}" for url in listed if url in keys)
    return Availability({"pages_as_index": found} if found else {})


def _conda(questions: Questions) -> tuple[Availability, frozenset[str]]:
    """Solve for the conda packages; with the names by which pip knows them."""
    (step,) = questions.maker.solution({})
    timed = tuple(each._replace(timeout=questions.left) for each in step.commands)
    try:
        outcome = attempt(step._replace(commands=timed), questions.runner, questions.progress)
    except StepError as error:
        return _silent("conda packages", error.message), frozenset()
    if outcome:
        records = [str(each["name"]) for each in read_json(questions.maker.solved, RESULT)]
        done = f"conda packages: the channels have {len(records)} that agree"
        return Availability(looked_up=(done,)), frozenset(map(condalock.pip_name, records))
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
    sources = configured(questions, maker)
    if sources.no_index and not sources.links:
        return _silent("Python packages", "pip is configured to use no index")
    return _resolved(questions, sources, tag, {*provided})


def _resolved(questions: Questions, sources: Sources, tag: str, apart: set[str]) -> Availability:
    """Resolve again without what cannot be asked, until there is an answer."""
    archives, silent = list[str](), list[str]()
    for _ in range(_ROUNDS):
        outcome = _compile(questions, sources, tag, apart)
        text = " ".join(outcome.output.split())
        if outcome:
            count = len(re.findall(r"^\S+==", outcome.output, re.MULTILINE))
            done = f"Python packages: {count} agree for {_target(questions.maker, tag)}"
            return Availability(looked_up=(done,)) | _left_out(archives, silent)
        if outcome.timed_out:
            return _silent("Python packages", "no answer in time")
        if outcome.returncode < 0 or "memory allocation of" in text:
            return _silent("Python packages", _OUT_OF_MEMORY)
        if "No solution found" not in text:
            host = _silent_host(text)
            fewer = sources.without(host) if host else sources
            if fewer == sources:
                return _silent("Python packages", _shortened(text.removeprefix("error: ")))
            silent.append(host)
            sources = fewer
            continue
        names = re.findall(r"Wheels are required for `([A-Za-z0-9][\w.-]{0,200})`", text)
        unasked = [each for each in names if _has_archive(questions, sources, each)]
        if not unasked:
            return _refused(questions, outcome.output, tag, silent)
        archives += unasked
        apart.update(unasked)
    return _silent("Python packages", f"more than {_ROUNDS} need a source archive")


def _left_out(archives: Iterable[str], silent: Iterable[str]) -> Availability:
    return Availability(
        not_looked_up=(
            *(f"{name}: only its source archive fits, whose code is not run" for name in archives),
            *(f"{host}: no answer" for host in silent),
        )
    )


def _refused(questions: Questions, output: str, tag: str, silent: Collection[str]) -> Availability:
    """Why nothing fits; not known for certain if an index did not answer."""
    maker = questions.maker
    cause = " ".join(output.partition("cause: ")[2].partition("\nhint:")[0].split())
    last = cause.rpartition("you require ")[2].partition(", we can conclude")[0]
    if len(cause) > _LONGEST:
        cause = f"no file for {_target(maker, tag)} satisfies {last}"
    key = key_of(maker.recipe, re.split(r"[^\w.-]", last, maxsplit=1)[0])
    text = f"{questions.where(key)}: {cause}" if key else cause
    # The build does without an index of CPU builds that does not answer.
    optional = {urlsplit(url).hostname for url in maker.cpu_indexes}
    if not optional.issuperset(silent):
        missed = questions.where(key) if key else last or "some of them"
        return _silent(
            "Python packages", f"no answer from {', '.join(silent)}, where {missed} may be"
        )
    return Availability({"packages_refused": frozenset({text})})


def _target(maker: Resolution, tag: str) -> str:
    return f"Python {maker.python.version} on {tag.replace('-', ' ')}"


def _silent(subject: str, reason: str) -> Availability:
    return Availability(not_looked_up=(f"{subject}: {reason}",))


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[:_LONGEST] + "…"


def _silent_host(text: str) -> str:
    """The host of an index that did not answer uv."""
    found = re.search(r"https?://[^\s)`]+", text)
    return (urlsplit(found[0]).hostname or "") if found else ""


class Sources(NamedTuple):
    """Where pip looks for files.

    Attributes:
        extra: further indexes, of that and of the recipe.
        insecure: hosts that are trusted without a certificate.
        certificates: file with those of a site.
    """

    main: str
    extra: tuple[str, ...]
    links: tuple[str, ...]
    no_index: bool
    insecure: tuple[str, ...]
    certificates: str

    def without(self, host: str) -> Sources:
        """All but the recipe's and further sources at a host."""

        def kept(urls: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(each for each in urls if urlsplit(each).hostname != host)

        return self._replace(extra=kept(self.extra), links=kept(self.links))

    def as_toml(self) -> str:
        """A configuration of uv; JSON's strings and lists are TOML, too."""
        values = {
            **({} if self.no_index else {"index-url": self.main, "extra-index-url": self.extra}),
            "find-links": self.links,
            "no-index": self.no_index,
            "allow-insecure-host": self.insecure,
            "index-strategy": "unsafe-best-match",  # as pip: the best of all indexes
            "no-build": True,
        }
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def configured(questions: Questions, maker: Resolution) -> Sources:
    """Where pip would look: by its configuration, and by the recipe."""
    file = questions.work / "pip.json"
    questions.run(OWN_PYTHON, str(STEP_PROGRAMS / "pip_sources.py"), str(file))
    pip = decode(dict[str, str], read_json(file, RESULT)) if file.exists() else {}
    learn(pip.items())  # URLs in pip's configuration may have credentials
    words = iter(maker.sources)
    extra, links = [*maker.cpu_indexes], list[str]()
    no_index = pip.get("no-index", "0").lower() in ("1", "true", "yes", "on")
    for word in words:
        if word == "--no-index":
            no_index = True
        else:
            (extra if word == _EXTRA else links).append(next(words))
    return Sources(
        main=pip.get("index-url", "https://pypi.org/simple"),
        extra=(*pip.get("extra-index-url", "").split(), *extra),
        links=(*pip.get("find-links", "").split(), *links),
        no_index=no_index,
        insecure=tuple(pip.get("trusted-host", "").split()),
        certificates=pip.get("cert", ""),
    )


def platform(machine: str, glibc: str) -> str:
    """The platform by uv's name; empty if uv has none."""
    if machine not in ("x86_64", "aarch64") or not glibc.startswith("2."):
        return ""
    fitting = [each for each in _GLIBCS if each <= int(glibc.split(".")[1])]
    return f"{machine}-manylinux_2_{fitting[-1]}" if fitting else ""


def _compile(questions: Questions, sources: Sources, tag: str, apart: Iterable[str]) -> Outcome:
    work, maker = questions.work, questions.maker
    texts = {
        "uv.toml": sources.as_toml(),
        "required.in": "\n".join(maker.requirements) + "\n",
        # Never true, so nothing of that name is asked for.
        "apart.in": "".join(f"{name} ; python_version < '0'\n" for name in sorted(apart)),
    }
    for name, text in texts.items():
        write_text(work / name, text, 0o600)
    certificates = sources.certificates
    return questions.run(
        OWN_PYTHON, "-m", "uv", "pip", "compile", "--config-file", str(work / "uv.toml"),
        "--quiet", "--no-header", "--no-annotate", "--color", "never", "--no-python-downloads",
        "--cache-dir", str(questions.cache), "--python", OWN_PYTHON,
        "--python-version", maker.python.version, "--python-platform", tag,
        "--override", str(work / "apart.in"), str(work / "required.in"),
        env=(
            ("UV_HTTP_TIMEOUT", "15"), ("UV_HTTP_RETRIES", "1"),
            *((("SSL_CERT_FILE", certificates),) if certificates else ()),
        ),
    )  # fmt: skip


def _has_archive(questions: Questions, sources: Sources, name: str) -> bool:
    """Whether a source archive for this Python could satisfy a requirement that no wheel does."""
    maker = questions.maker
    # The recipe's sources, which have no credentials; pip knows those of its configuration.
    indexes = (w for url in maker.cpu_indexes if url in sources.extra for w in (_EXTRA, url))
    outcome = questions.run(
        OWN_PYTHON, *PIP, "index", "versions", name, "--no-binary", ":all:",
        "--python-version", maker.python.version, *indexes, *maker.sources,
    )  # fmt: skip
    found = re.search(r"^Available versions: (.+)$", outcome.output, re.MULTILINE)
    required = (parse_requirement(each) for each in maker.requirements)
    asked = [
        each.specifier
        for each in required
        if canonicalize_name(each.name) == canonicalize_name(name)
    ]
    versions = found[1].split(", ") if found else []
    return any(all(each.contains(one) for each in asked) for one in versions)
