"""Name the cause of a failure from a log: events are found, explained and ranked."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hvdenv.base.reading import LOG, open_file
from hvdenv.knowledge.events import ERRORS, Event, Explainer, Reading, read_log
from hvdenv.knowledge.failures import Failures, Kind, Meaning, all_failures
from hvdenv.knowledge.logs import BLOCK, Place

_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d{1,7})')
_ORDER: tuple[Kind, ...] = ("cause", "symptom", "consequence", "warning")


class Found(NamedTuple):
    """A failure that a log shows, and its Place.

    Attributes:
        id: of the cause, or the type of the event.
        kill: it reports that a process was killed.
        of_others: no rank has failed by itself, so far as this shows.

    For ranking only:
        lines: numbers of those that it is about.
        general: as in Meaning.
        steps_back: it is only a symptom if there is another cause.
    """

    id: str
    cause: str
    remedies: tuple[str, ...]
    kind: Kind = "cause"
    rules: tuple[str, ...] = ()
    source: str = ""
    number: int = 0
    line: str = ""
    rank: str = ""
    host: str = ""
    kill: bool = False
    of_others: bool = False
    lines: Sequence[int] = ()
    general: int = 0
    steps_back: bool = False

    @property
    def remedy(self) -> str:
        return "; ".join(self.remedies)

    def document(self) -> dict[str, object]:
        """What JSON says of it: all but what is for ranking."""
        return dict(list(self._asdict().items())[: self._fields.index("lines")])


class Diagnosis(NamedTuple):
    """What a log says.

    Attributes:
        found: causes first, each kind in the order of the log.
        errors: the first lines that look like an error.
        mentions: versions and paths that the log names.
        given_up: matching took too long, so some lines were not searched.
        own: the log is of something that hvdenv ran.
    """

    found: tuple[Found, ...]
    errors: tuple[Place, ...]
    mentions: dict[str, str]
    lines: int
    given_up: bool = False
    own: bool = False

    def of_kind(self, kind: Kind) -> tuple[Found, ...]:
        return tuple(each for each in self.found if each.kind == kind)

    @property
    def root(self) -> Found | None:
        """The first cause in the log, if any."""
        return next(iter(self.of_kind("cause")), None)

    @property
    def best(self) -> Found | None:
        """The first cause, or else the first symptom."""
        return self.root or next(iter(self.of_kind("symptom")), None)

    @property
    def failed(self) -> Found | Place | None:
        """What names the ranks that failed first; None if nothing does, or none failed by itself."""
        if self.best and self.best.of_others:
            return None
        # A rank's own first error counts more than a launcher's report: a launcher names the rank
        # that it saw end first, which is often a victim.
        consequences = self.of_kind("consequence")
        lines = {each.number for each in consequences}
        first = [self.best] if self.best else [e for e in self.errors[:1] if e.number not in lines]
        ranked: list[Found | Place] = [each for each in (*first, *consequences) if each.rank]
        if self.best and not self.best.rank and len({each.rank for each in ranked}) > 1:
            # Launchers report the ranks in any order after what ended one of them.
            return ranked[0]._replace(rank=", ".join(each.rank for each in ranked), host="")
        return next(iter(ranked), None)

    @property
    def rank(self) -> str:
        """The rank that failed first; empty if the log does not say which of several it is."""
        return self.failed.rank if self.failed and self.failed.rank.isdigit() else ""


def diagnose(log: BinaryIO, *, own: bool = False) -> Diagnosis:
    """Search a log of any size for all known failures.

    Args:
        own: whether hvdenv ran what it is the log of.
    """
    return interpret(read_log(log, own=own), all_failures())


def interpret(log: Reading, failures: Failures) -> Diagnosis:
    """What the events of a log mean."""
    explainer = Explainer(failures, log)
    explained = [(event, explainer.explain(event)) for event in log.events]
    found = _ranked([_found(meaning, event, log) for event, meaning in explained if meaning])
    errors = log.errors
    if {hit.place.number for hit in errors} <= {each.number for each in found}:
        lines = {hit.place.number: hit for hit in (*errors, *log.hints)}
        errors = [lines[number] for number in sorted(lines)][:ERRORS]
    return Diagnosis(
        found=found,
        errors=tuple(hit.place for hit in errors),
        mentions=log.mentions,
        lines=log.lines,
        given_up=log.gave_up,
        own="own" in log.shows,
    )


def diagnose_step(path: Path) -> Diagnosis:
    """Diagnose the log of a build step from its last command on: each attempt appends to it."""
    with open_file(path, LOG) as log:
        log.seek(_last_command(log))
        return diagnose(log, own=True)


def _last_command(log: BinaryIO) -> int:
    """Where the last line that begins with ``$ `` begins; lines may have any length."""
    start, offset, before = 0, -1, b"\n"
    while block := log.read(BLOCK):
        text = before + block
        found = text.rfind(b"\n$ ")
        start = offset + found + 1 if found >= 0 else start
        before = text[-2:]
        offset += len(text) - len(before)
    return start


def explain(text: str, *, kills: bool = True) -> Found | None:
    """The cause that output of a build or a run shows, or else the symptom.

    Args:
        kills: whether to count reports that a process was killed, as launchers print them.
    """
    diagnosis = diagnose(io.BytesIO(text.encode("utf-8", "replace")), own=True)
    if not kills:
        diagnosis = diagnosis._replace(found=tuple(f for f in diagnosis.found if not f.kill))
    return diagnosis.best


def _found(meaning: Meaning, event: Event, log: Reading) -> Found:
    """What an event means, with its place."""
    hit, kill = event.hit, event.meaning.kill
    place = hit.place
    # A process that is killed after another one crashed is not the cause.
    follows = kill and place.number > log.crashed
    kind: Kind = "consequence" if follows else meaning.kind
    if meaning.of_others or follows or (kind == "consequence" and "rank" not in hit.slots):
        # The rank that prints this, or that was ended by it, is not the one that failed.
        place = place._replace(rank="", host="")
    frames = _FRAME.findall(hit.before) if event.meaning.id == "exception" else []
    return Found(
        id=meaning.id,
        cause=meaning.says + (" (at {}, line {})".format(*frames[-1]) if frames else ""),
        remedies=meaning.remedies,
        kind=kind,
        rules=meaning.rules,
        source=meaning.source,
        kill=kill,
        of_others=meaning.of_others,
        lines=hit.lines,
        general=meaning.general,
        steps_back=kind == "cause" and (meaning.steps_back or bool(meaning.member)),
        **place._asdict(),
    )


def _ranked(found: Sequence[Found]) -> tuple[Found, ...]:
    """By kind, then by line; of several about the same lines, or of the same id, only the first.

    General ones count only where nothing else says more.
    """
    lowest: dict[int, int] = {}
    for each in found:
        lowest |= {line: min(each.general, lowest.get(line, each.general)) for line in each.lines}
    kept = [each for each in found if all(lowest[line] == each.general for line in each.lines)]
    levels = [each.general for each in kept if each.kind in ("cause", "symptom")]
    kept = [each for each in kept if not levels or each.general <= min(levels)]
    if any(each.kind == "cause" and not each.steps_back for each in kept):
        kept = [e._replace(kind="symptom") if e.steps_back else e for e in kept]
    told: dict[str, Found] = {}
    taken: set[int] = set()
    for each in sorted(kept, key=_order):
        if each.id not in told and taken.isdisjoint(each.lines):
            told[each.id] = each
            taken.update(each.lines)
    return tuple(told.values())


def _order(found: Found) -> tuple[int, int, bool]:
    return _ORDER.index(found.kind), found.number, not found.source
