"""Name the cause of a failed build or run from its log, and the remedy.

doctor reads the log that you name, or what is piped into it.
Without a log, it explains the last build or verify that failed on this machine."""

from __future__ import annotations

import argparse
import os
import select
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from hvdenv.base.errors import UsageError
from hvdenv.base.masking import clean
from hvdenv.base.places import find_places, reporting
from hvdenv.base.reading import LOG, open_file
from hvdenv.base.schema import Table
from hvdenv.cli.options import add, add_options
from hvdenv.knowledge.diagnosis import Diagnosis, Found, diagnose
from hvdenv.knowledge.failures import Kind
from hvdenv.session.output import print_json, report
from hvdenv.session.request import usable

if TYPE_CHECKING:
    import io

EXAMPLES = """\
examples:
  hvdenv doctor                              the last build or verify that failed
  hvdenv doctor slurm-1234.out
  hvdenv doctor build.log --json
  pip install horovod 2>&1 | hvdenv doctor
  zcat build.log.gz | hvdenv doctor

exit codes: 0 doctor names a cause; 1 it does not
"""

NO_CAUSE = 1
# How many bytes tell a binary file from a text, and which share of them is control characters in
# the first, but not in the second. Tabs, line ends and escapes are not counted.
_START, _MOST_CONTROLS = 4096, 0.05
_CONTROLS = bytes({*range(1, 32), 127} - set(b"\t\n\r\b\f\x1b"))
SCHEMA = "hvdenv.diagnosis/1"
_WIDTH = 160
# How long a program that is piped into doctor may print nothing before doctor says that it waits.
_WAIT_SECONDS = 3.0
# Of what is found first, and of what else is of its kind.
_TITLES: dict[Kind, tuple[str, str]] = {
    "cause": ("cause", "other causes:"),
    "symptom": ("no cause found; it stopped here", "other symptoms:"),
    "consequence": ("no cause found; follow-on error", "follow-on errors:"),
    "warning": (
        "no cause found; only a warning, harmless in most logs",
        "warnings, harmless in most logs:",
    ),
}
_UNKNOWN = (
    "start with the first of these lines and those before it, of the rank that failed first;"
    " NCCL_DEBUG=INFO and HOROVOD_LOG_LEVEL=debug make runs print more"
)
_NO_ERROR = "if the program failed, its error is not in this log: include standard error (COMMAND > LOG 2>&1)"


def configure(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "log LOG",
        "output of a build or run; - for standard input (default: what is piped in, or the last failure)",
        nargs="?",
    )
    add_options(parser, "json")


def run(arguments: argparse.Namespace) -> int:
    log = arguments.log or ("-" if _is_piped() else "")
    subject, diagnosis = _of_log(log) if log else _of_last()
    if arguments.json:
        print_json(_document(subject, diagnosis))
    else:
        for line in (*subject, *_lines(diagnosis)):
            print(line)
    return 0 if diagnosis.root else NO_CAUSE


def _of_log(name: str) -> tuple[tuple[str, ...], Diagnosis]:
    if name == "-":
        return ("standard input",), _diagnosis(sys.stdin.buffer, "standard input")
    with usable(name, "name a log, or - for standard input"), open_file(name, LOG) as log:
        return (name,), _diagnosis(log, name)


def _is_piped() -> bool:
    """Whether a pipe or file with content is standard input: that of batch jobs has none.

    A file that was read in part is a script that a shell executes from its standard input.
    """
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        whole = stat.S_ISREG(mode) and os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    except (AttributeError, OSError):  # it is closed
        return False
    # That of ssh and srun is a pipe, which ends only when the user's input does.
    if stat.S_ISFIFO(mode) and not select.select([descriptor], [], [], _WAIT_SECONDS)[0]:
        report(
            "waiting for a log on standard input; for the last failure: hvdenv doctor < /dev/null"
        )
    return (stat.S_ISFIFO(mode) or whole) and bool(_start(sys.stdin.buffer))


def _start(log: BinaryIO) -> bytes:
    """The first bytes of a log, which stay in it."""
    return cast("io.BufferedReader", log).peek(_START)[:_START]


def _diagnosis(log: BinaryIO, name: str) -> Diagnosis:
    # UTF-16 has NUL bytes, but like any text it has few other control characters.
    letters = _start(log).replace(b"\0", b"")
    controls = len(letters) - len(letters.translate(None, _CONTROLS))
    if controls > len(letters) * _MOST_CONTROLS:
        raise UsageError(
            "it is a binary file, not a log",
            where=name,
            remedy="name a text file; unpack others first: zcat LOG.gz | hvdenv doctor",
        )
    return diagnose(log)


def _of_last() -> tuple[tuple[str, ...], Diagnosis]:
    from hvdenv.building.engine import last_failure

    places = find_places()
    failure = last_failure(places)
    if failure is None:
        raise UsageError(
            "no failed build or verify is recorded here",
            where=str(places.home),
            remedy="name a log, or - for standard input",
        )
    with reporting(Path(failure.file), "read"):
        diagnosis = failure.diagnosis()
    return (failure.what, *failure.messages, failure.file), diagnosis


def _document(subject: tuple[str, ...], diagnosis: Diagnosis) -> Table:
    found = {f"{kind}s": [each.document() for each in diagnosis.of_kind(kind)] for kind in _TITLES}
    return {
        "schema": SCHEMA,
        "subject": subject,
        "recognised": diagnosis.root is not None,
        **found,
        "errors": [each._asdict() for each in diagnosis.errors],
        "rank": diagnosis.rank,
        "ranks": diagnosis.failed.rank if diagnosis.failed else "",
        "host": diagnosis.failed.host if diagnosis.failed else "",
        "versions": diagnosis.mentions,
        "lines": diagnosis.lines,
        "given_up": diagnosis.given_up,
    }


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    first = next(iter(diagnosis.found), None)
    yield f"{_TITLES[first.kind][0]}: {_told(first)}" if first else "not recognised"
    yield from _details(first, diagnosis.own) if first else ()
    yield from _others(diagnosis, first)
    if failed := diagnosis.failed:
        where = f"{failed.rank} on {failed.host}" if failed.host else failed.rank
        yield (
            f"the rank that failed first: {where}"
            if diagnosis.rank
            else f"ranks {where} failed; which of them failed first is not in the log"
        )
    elif diagnosis.best and diagnosis.best.of_others:
        yield "the log shows no rank that failed by itself"
    yield from _left_open(diagnosis) if not diagnosis.root else ()
    if diagnosis.given_up:
        yield "some lines were not searched: matching them took too long"
    if diagnosis.mentions:
        named = ", ".join(f"{name} {value}" for name, value in diagnosis.mentions.items())
        yield f"the log names: {named}"


def _told(found: Found) -> str:
    return f"{clean(found.cause)} [{found.id}]"


def _details(found: Found, own: bool) -> Iterator[str]:
    """What to do about what was found; what recipes have to do with it, for those who have any."""
    yield _line(found.number, found.line)
    yield from _steps(found, "  ")
    if own and found.rules:
        rules = ", ".join(found.rules)
        yield f"  `hvdenv check RECIPE` finds it before a build, and how to change the recipe: {rules}"
    if found.source:
        yield f"  source ({found.source.replace(': ', '): ', 1)}"


def _steps(found: Found, indent: str) -> Iterator[str]:
    if len(found.remedies) == 1:
        yield f"{indent}what to do: {clean(found.remedy)}"
    elif found.remedies:
        yield f"{indent}what to do, the most likely first:"
        for number, each in enumerate(found.remedies, 1):
            yield f"{indent}  {number}. {clean(each)}"


def _others(diagnosis: Diagnosis, first: Found | None) -> Iterator[str]:
    """What else was found: causes with their remedies, all else in one line each."""
    for kind, (_, title) in _TITLES.items():
        of_kind = [each for each in diagnosis.of_kind(kind) if each != first]
        if of_kind:
            yield title
        for each in of_kind:
            yield f"  line {each.number}: {_told(each)}"
            yield from _steps(each, "    ") if kind == "cause" else ()


def _left_open(diagnosis: Diagnosis) -> Iterator[str]:
    """What a log without a known cause leaves open."""
    told = {each.number for each in diagnosis.found}
    others = [each for each in diagnosis.errors if each.number not in told]
    if others:
        yield "lines that may say why:"
        yield from (_line(each.number, each.line) for each in others)
    if not diagnosis.best:
        yield f"what to do: {_UNKNOWN if diagnosis.errors else _NO_ERROR}"


def _line(number: int, line: str) -> str:
    text = clean(line).strip()
    return f"  line {number}: {text if len(text) <= _WIDTH else text[: _WIDTH - 3] + '...'}"
