"""Draft a recipe from a site's page, from a job script that works, or from this machine.

Each value in the draft names its source: the line of the page, or the command. Where the sources
state different values, the draft has neither and names both. Every other line of the page is a
comment, or listed at the end with the reason. Nothing on a page is executed, and no existing file
is changed."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from hvdenv.base.errors import UsageError
from hvdenv.base.reading import PAGE, read_file
from hvdenv.base.runner import Runner
from hvdenv.base.schema import encode
from hvdenv.cli.options import add, add_options
from hvdenv.drafting import here, proposals
from hvdenv.drafting.draft import Draft, combine
from hvdenv.drafting.here import Seen
from hvdenv.drafting.reader import EVERY_LINE, OTHER_WAY, Ranges, read_page
from hvdenv.drafting.values import LOAD, Found, Origin, joined, shown
from hvdenv.drafting.writer import choice_text, left_lines, write
from hvdenv.knowledge.combinations import all_rows
from hvdenv.model.cluster import ModuleName
from hvdenv.model.facts import Facts
from hvdenv.session.node import ask_node
from hvdenv.session.output import print_json, report
from hvdenv.session.request import Gate, usable
from hvdenv.sites.batch import counted

EXAMPLES = """\
examples:
  hvdenv init fenn --from page.md                      writes fenn.toml
  hvdenv init fenn --from job.sh --here                and what this machine shows
  hvdenv init fenn --here                              proposes versions that were verified
  curl -s https://hpc.example/horovod | hvdenv init fenn --from - -o -
  hvdenv init fenn --here --where compute --set job.partition=gpu
  hvdenv init fenn --from page.html --lines 120-180    one section of the page
"""
_STANDARD = "-"
# In a key or a value of a page that uses GPUs.
_GPUS = re.compile(r"(?i)\bgpu|[-_]gpu|cuda|nccl|rocm|\+cu\d")
# A proposal can lack others: a framework has a version, and the controller mpi needs an MPI.
_ROUNDS = 2


def configure(parser: argparse.ArgumentParser) -> None:
    several: dict[str, Any] = {"action": "append", "default": []}
    add(parser, "name NAME", "name of the recipe", nargs="?")
    add(
        parser,
        "--from FILE",
        "page to read: Markdown, HTML, reStructuredText or plain text, a job script, environment.yml,"
        " requirements.txt or a Dockerfile; - is standard input; may be repeated",
        dest="pages",
        **several,
    )
    add(parser, "--lines A-B", "read only these lines of the page; several: A-B,C-D", type=_lines)
    add(parser, "--here", "look at this machine and its modules")
    add(
        parser,
        "--where",
        "with --here. compute: also ask a compute node, in a job of at most 10 minutes with"
        " one GPU if the job has any (default: here)",
        choices=("here", "compute"),
        default="here",
    )
    told = "with --where compute: print the script of the job, and submit nothing"
    add(parser, "--dry-run", told)
    told = "a value of the recipe, such as horovod.version=0.28.1; may be repeated"
    add(parser, "--set KEY=VALUE", told, dest="overrides", **several)
    add(parser, "-o --to FILE", "file to write, - for standard output (default: NAME.toml)")
    add_options(parser, "json")


def _lines(text: str) -> Ranges:
    found = [re.fullmatch(r"([1-9]\d{0,6})-([1-9]\d{0,6})", each) for each in text.split(",")]
    ranges = [(int(each[1]), int(each[2])) for each in found if each]
    if len(ranges) < len(found) or any(first > last for first, last in ranges):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of lines such as 120-180, or several: 1-20,120-180"
        )
    return ranges


def run(arguments: argparse.Namespace) -> int:
    sources = [*arguments.pages, *(["this machine"] if arguments.here else [])]
    _refuse(arguments, sources)
    name = _name(arguments)
    target = arguments.to or f"./{name}.toml"
    if target != _STANDARD and not arguments.json and Path(target).exists():
        raise UsageError(
            "this file exists, and init overwrites no file",
            where=target,
            remedy="name another one with -o FILE",
        )
    seen = here.look(_machine()) if arguments.here else None
    found = _collect(arguments, seen)
    if arguments.where == "compute":
        of_node = ask_node(combine(name, found), dry_run=arguments.dry_run)
        if of_node is None:
            return 0
        found = joined([found, of_node])
    if seen and not arguments.pages:
        found = _with_proposals(name, found, seen.facts)
    draft = combine(name, found)
    text = write(draft, [shown(Path(each).name) for each in sources])
    if arguments.json:
        print_json({**encode(draft), "toml": text})
        return 0
    _write(target, text)
    for line in _report_lines(draft, target):
        print(line, file=sys.stderr if target == _STANDARD else sys.stdout)
    return 0


def _refuse(arguments: argparse.Namespace, sources: Sequence[str]) -> None:
    if not sources:
        raise UsageError(
            "nothing to draft a recipe from",
            remedy="name a page or a job script with --from FILE, or look at this machine with --here",
        )
    if arguments.where == "compute":
        if not arguments.here:
            raise UsageError("--where compute needs --here", remedy="add --here")
        Gate().refuse_home()  # it keeps the job's script
    if arguments.dry_run and arguments.where != "compute":
        raise UsageError(
            "--dry-run needs --where compute: init submits nothing here",
            remedy="leave out --dry-run, or add --here --where compute",
        )


def _name(arguments: argparse.Namespace) -> str:
    """The recipe's name: as given, or after the page."""
    named = [Path(each).stem for each in arguments.pages if each != _STANDARD]
    of_page = re.sub(r"[^a-z0-9_-]+", "-", (named or ["mycluster"])[0].lower())
    name = arguments.name or of_page.strip("-_")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name):
        raise UsageError(
            f"{name!r} is not a name of a recipe",
            remedy="name it, with a-z, 0-9, _ and -: hvdenv init NAME --from FILE",
        )
    return str(name)


def _machine() -> here.Machine:
    return here.Machine(Runner(), lambda text: report(f"looking at {text}"))


def _collect(arguments: argparse.Namespace, seen: Seen | None) -> Found:
    """What all sources yield, in their order."""
    given = [
        each
        for text in arguments.overrides
        for each in proposals.parse(text, Origin(f"--set {text}"))
    ]
    pages = joined(_read_source(each, arguments.lines) for each in arguments.pages)
    if not seen:
        return proposals.give(pages, given)
    loads = [str(each.value) for each in pages.values if each.key == LOAD]
    # The name of a file would be run.
    names = [each for each in loads if re.fullmatch(get_args(ModuleName)[1].regex, each)]
    machine = here.drafted(seen, _machine(), names)
    # The partition with GPUs is for a page that uses them and names no other.
    own = [f"{'.'.join(each.key)} {each.value}" for each in (*pages.values, *given)]
    named = any(each.startswith("job.partition ") for each in own)
    if named or (arguments.pages and not any(map(_GPUS.search, own))):
        kept = tuple(each for each in machine.facts if each.key != ("job", "partition"))
        machine = machine._replace(facts=kept)
    return proposals.give(joined([pages, machine]), given)


def _read_source(name: str, lines: Ranges | None) -> Found:
    source = "standard input" if name == _STANDARD else shown(Path(name).name)
    with usable(name, "name a page or a job script, or - for standard input"):
        data = b"" if name == _STANDARD else read_file(name, PAGE).data
    if name == _STANDARD:
        data = sys.stdin.buffer.read(PAGE.limit + 1)
    if len(data) > PAGE.limit:
        raise UsageError(
            f"standard input is larger than {PAGE.limit:,} bytes, the limit for a page",
            remedy="save the part that matters, and name the file",
        )
    return read_page(data.decode("utf-8", errors="replace"), source, lines or (EVERY_LINE,))


def _with_proposals(name: str, found: Found, facts: Facts) -> Found:
    """What this machine shows, and what was verified in the place of what is missing."""
    for _ in range(_ROUNDS):
        draft = combine(name, found)
        proposed = proposals.propose(draft.missing, draft.values, facts, all_rows())
        found = found._replace(facts=(*found.facts, *proposed))
    return found


def _write(target: str, text: str) -> None:
    if target == _STANDARD:
        sys.stdout.write(text)
        return
    remedy = "name another file with -o FILE"
    with usable(target, remedy, "cannot write it"), open(target, "x", encoding="utf-8") as file:
        file.write(text)


def _report_lines(draft: Draft, target: str) -> Iterator[str]:
    unknown = [each for each in draft.left if not each.understood and each.table != OTHER_WAY]
    wrote = "draft" if target == _STANDARD else f"wrote {target}"
    of_page = f" from {counted(draft.commands, 'command')}" if draft.commands else ""
    yield f"{wrote}: {counted(len(draft.values), 'value')}{of_page}"
    for title, lines in (
        ("missing", [f"{'.'.join(each.key)}: {each.needs}" for each in draft.missing]),
        ("to choose, because the sources differ", [choice_text(each) for each in draft.choices]),
        ("not understood", list(left_lines(unknown))),
        ("other ways of the page", list(_other_ways(draft))),
    ):
        if lines:
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)
    if target != _STANDARD:
        path = target if "/" in target else f"./{target}"
        complete = f" complete {path}, then" if draft.missing or draft.choices else ""
        yield f"next:{complete}\n  hvdenv show {path}\n  hvdenv check {path}"


def _other_ways(draft: Draft) -> Iterator[str]:
    """One line for each."""
    ways: dict[tuple[str, str], list[int]] = {}
    for each in draft.left:
        if each.table == OTHER_WAY:
            ways.setdefault((each.origin.source, each.reason), []).append(each.origin.line)
    for (source, reason), lines in ways.items():
        yield f"{Origin(source, min(lines), last=max(lines))}: {reason}"
