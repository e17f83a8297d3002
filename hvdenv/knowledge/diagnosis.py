"""Search a log for known failures (signatures).

A log is read in blocks, so memory does not grow with its size. One pass finds the literal texts of
all signatures; patterns are tried only on lines that contain one.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from operator import eq, ge, lt, ne
from pathlib import Path
from time import thread_time
from typing import BinaryIO, NamedTuple

from hvdenv.knowledge.loglines import normalised, other_names, without_prefix
from hvdenv.knowledge.signatures import Kind, Phase, Signature, all_signatures, alternatives
from hvdenv.reading import LOG, OWN, open_file, read_text
from hvdenv.schema import decode, parse_toml

try:
    from ahocorasick_rs import BytesAhoCorasick
except ImportError:  # some machines have no wheel of it
    BytesAhoCorasick = None  # type: ignore[assignment, misc]

BLOCK = 1 << 15
# Characters before and after a text, and lines from its own on, that a pattern sees. This bounds
# the time of a pattern.
BEFORE, AFTER, LINES = 600, 1400, 3
# Characters before and after a text that count as near it.
NEAR = 2000
# Lines before a text that `before` of a signature reads.
SAID = 8
# How many lines may contain a signature's text without matching its pattern. After ALL_TRIES for
# all signatures together, more than any real log needs, only FEW_TRIES each.
TRIES, ALL_TRIES, FEW_TRIES = 2000, 10_000, 50
# Processor time in seconds for one signature, and for all, in one log. Real logs need hundredths of
# a second. Only a crafted log comes near: patterns are at most quadratic in the length of a line,
# and lines are cut.
PATTERN_SECONDS, ALL_SECONDS = 1.0, 10.0
# When a block contains more texts that are no longer wanted than this, stop searching for them.
IDLE = 1000
ERRORS = 5

_COLOURS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
# Control characters other than tab, line end and escape are removed.
_DROPPED = bytes({*range(32), 127} - set(b"\t\n\r\x1b"))

_END = re.compile(rb"[\r\n]")
_WORD = re.compile(r"\w")
_COMPARE: dict[str, Callable[[list[int], list[int]], bool]] = {
    "<": lt, ">=": ge, "==": eq, "!=": ne,
}  # fmt: skip

# In a backtrace by UCX or Open MPI, the frames of the signal handler (UCX, the C library) come
# before the frame that crashed.
_FRAME_START = r"(?:\[\S{1,64}:\d{1,8}\] )?[ \[]{0,4}\d{1,2}\]? {1,3}"
_FRAME = (
    ("libc.so.6(", "libpthread.so.0(", "libc-2.", "libpthread-2.", "libucs.so.0("),
    rf"^{_FRAME_START}(?:\S{{0,200}}/)?lib(?:c|pthread|ucs)[-.][\w.]{{2,10}}\(\+0x[^\n]*"
    rf"(?:\n{_FRAME_START}(?:\S{{0,200}}/)?libc[-.][\w.]{{2,10}}\([^\n]*)?"
    rf"\n{_FRAME_START}(?:\S{{0,200}}/)?(?!lib(?:c|pthread)[-.]|libucs\.)"
    r"([^/\s(]{1,80}\.so[\w.]{0,20})\((\w{0,60})",
)
_ABOUT_HOROVOD = re.compile(r" \([^()]{0,80}(?:orovod|HOROVOD|hvd\.)[^()]{0,200}\)")
_TEXTS = Path(__file__).with_name("log_texts.toml")


class Place(NamedTuple):
    """A line of a log without control sequences, its number, and the rank that it is about."""

    number: int
    line: str
    rank: str = ""


class Found(NamedTuple):
    """A signature that was found, with its texts filled in, and its Place.

    A kill after a crash is a consequence.
    """

    id: str
    cause: str
    remedy: str
    kind: Kind = "cause"
    rules: tuple[str, ...] = ()
    source: str = ""
    certainty: str = ""
    number: int = 0
    line: str = ""
    rank: str = ""
    kill: bool = False

    @property
    def remedies(self) -> list[str]:
        return alternatives(self.remedy)


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
    def rank(self) -> str:
        """The rank that failed first; empty if the log does not say."""
        # A rank's own first error counts more than a launcher's report: a launcher names the rank
        # that it saw end first, which is often a victim.
        consequences = self.of_kind("consequence")
        lines = {each.number for each in consequences}
        first = [self.best] if self.best else [e for e in self.errors[:1] if e.number not in lines]
        return next((each.rank for each in (*first, *consequences) if each.rank), "")


class _Query(NamedTuple):
    """What to search for in a log; the last four as in Signature.

    Attributes:
        texts: one of them must be in the line.
        pattern: must match the line, or from the line into those that follow.
        most: how many lines to keep.
    """

    texts: tuple[str, ...]
    pattern: str = ""
    most: int = 1
    near: tuple[str, ...] = ()
    not_near: tuple[str, ...] = ()
    when: tuple[str, ...] = ()
    before: str = ""

    @property
    def is_plain(self) -> bool:
        """One look at one line is enough."""
        return not (self.pattern or self.near or self.not_near)


class _Mention(NamedTuple):
    name: str
    text: str
    pattern: str


class _System(NamedTuple):
    name: str
    texts: tuple[str, ...]


class _Texts(NamedTuple):
    mentions: tuple[_Mention, ...]
    systems: tuple[_System, ...]
    error: _Query
    hint: _Query
    crash: _Query
    container: _Query
    own: _Query
    horovod: _Query


@cache
def _texts() -> _Texts:
    return decode(_Texts, parse_toml(read_text(_TEXTS, OWN)))


class _Hit(NamedTuple):
    """A line that matches a query, what is near it, and what the lines before it say."""

    place: Place
    match: re.Match[str]
    around: bytes
    before: str = ""

    @property
    def last_line(self) -> int:
        """Where the match ends: in a traceback, what happened follows where it happened."""
        return self.place.number + self.match.string[: self.match.end()].rstrip().count("\n")


class _Ranked(NamedTuple):
    """A signature that was found, the line where its match ends, and what it is by itself."""

    found: Found
    last_line: int
    signature: Signature
    foreign: bool  # it is about Horovod, which the log does not name

    @property
    def lines(self) -> range:
        return range(self.found.number, self.last_line + 1)

    @property
    def is_derived(self) -> bool:
        """It is a cause only by a family, or by the lines before."""
        return self.found.kind == "cause" and self.signature.kind == "symptom"


class _Block(NamedTuple):
    """A cleaned part of a log, with what is near the part to search; the line number of its start."""

    text: bytes
    start: int
    end: int
    number: int


class _Progress:
    def __init__(self) -> None:
        self.hits: dict[int, _Hit] = {}  # by line number
        self.tries = 0
        self.seconds = 0.0


class _Matcher:
    def __init__(self, queries: Sequence[_Query], wanted: Iterable[int]) -> None:
        pairs = [(text, index) for index in wanted for text in queries[index].texts]
        self.query_of = [index for _, index in pairs]
        self.find = _automaton([text.encode() for text, _ in pairs])


class _Catalog(NamedTuple):
    """All queries for the logs of one phase: those of the signatures come first."""

    signatures: tuple[Signature, ...]
    queries: tuple[_Query, ...]
    contexts: dict[str, int]
    mentions: range
    matcher: _Matcher


class _Search:
    def __init__(self, catalog: _Catalog) -> None:
        self.queries = catalog.queries
        self.matcher = catalog.matcher
        self.progress: defaultdict[int, _Progress] = defaultdict(_Progress)
        self.tries = 0
        self.seconds = 0.0
        self.lines = 0

    def read(self, log: BinaryIO) -> None:
        for block in _blocks(log):
            if self._read_block(block) > IDLE:
                self.matcher = _Matcher(self.queries, filter(self._wants, range(len(self.queries))))
            self.lines = block.number + block.text.count(b"\n", block.start, block.end) - 1

    def _read_block(self, block: _Block) -> int:
        """Returns how many of the texts found were no longer wanted."""
        idle = 0
        searched: dict[int, int] = {}
        for text, at, _ in self.matcher.find(block.text):
            query = self.matcher.query_of[text]
            if at < block.start:
                continue
            if not self._wants(query):
                idle += 1
            elif searched.get(text, block.start) <= at < block.end:
                self._try(query, block, at)
                line_end = _END.search(block.text, at, at + AFTER)
                searched[text] = line_end.start() if line_end else at + AFTER
        return idle

    def _wants(self, query: int) -> bool:
        progress, limit = self.progress[query], TRIES if self.tries < ALL_TRIES else FEW_TRIES
        found_all = len(progress.hits) >= self.queries[query].most
        return not found_all and progress.tries < limit and not self._out_of_time(query)

    def _out_of_time(self, query: int) -> bool:
        if self.queries[query].is_plain:
            return False
        return self.seconds >= ALL_SECONDS or self.progress[query].seconds >= PATTERN_SECONDS

    def _try(self, query: int, block: _Block, at: int) -> None:
        """Keep a line if it matches."""
        progress = self.progress[query]
        began = thread_time()
        if hit := _look(block, at, self.queries[query]):
            progress.hits.setdefault(hit.place.number, hit)
        seconds = thread_time() - began
        progress.tries += 1
        progress.seconds += seconds
        self.tries += 1
        self.seconds += seconds

    def hits(self, query: int) -> list[_Hit]:
        return list(self.progress[query].hits.values())

    def gave_up(self, queries: Iterable[int]) -> bool:
        return any(self._out_of_time(query) for query in queries)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # `re` caches fewer than there are, and one log needs few.
    return re.compile(pattern)


def _automaton(texts: Sequence[bytes]) -> Callable[[bytes], Iterable[tuple[int, int, int]]]:
    """A function that finds texts in a block: the index of each, where it starts and ends."""
    if BytesAhoCorasick is None:
        return lambda block: _one_by_one(texts, block)
    automaton = BytesAhoCorasick(texts)
    return lambda block: automaton.find_matches_as_indexes(block, overlapping=True)


def _one_by_one(texts: Sequence[bytes], block: bytes) -> list[tuple[int, int, int]]:
    found = []
    for index, text in enumerate(texts):
        at = block.find(text)
        while at >= 0:
            found.append((index, at, at + len(text)))
            at = block.find(text, at + 1)
    return sorted(found, key=lambda each: each[2])


@cache
def _catalog(phase: Phase | None) -> _Catalog:
    signatures = tuple(each for each in all_signatures() if phase is None or phase in each.phases)
    texts = dict.fromkeys(text for each in signatures for text in each.needs + each.unless)
    contexts = {text: number for number, text in enumerate(texts, len(signatures))}
    fixed = _texts()
    mentions = [_Query((each.text,), each.pattern) for each in fixed.mentions]
    queries = (
        *map(_query_of, signatures),
        *(_Query((text,)) for text in contexts),
        *mentions,
        _Query(*_FRAME),
        *fixed[2:],
        *(_Query(each.texts) for each in fixed.systems),
    )
    first = len(signatures) + len(contexts)
    return _Catalog(
        signatures=signatures,
        queries=queries,
        contexts=contexts,
        mentions=range(first, first + len(mentions)),
        matcher=_Matcher(queries, range(len(queries))),
    )


def _query_of(signature: Signature) -> _Query:
    names = [name for text in signature.texts for name in other_names(text)]
    return _Query(
        (*signature.texts, *names),
        signature.pattern,
        near=signature.near,
        not_near=signature.not_near,
        when=signature.when,
        before=signature.before,
    )


def diagnose(log: BinaryIO, phase: Phase | None = None, *, own: bool = False) -> Diagnosis:
    """Search a log of any size for all signatures, or for those of one phase.

    Args:
        own: whether hvdenv ran what it is the log of.
    """
    catalog = _catalog(phase)
    search = _Search(catalog)
    search.read(log)
    last = range(catalog.mentions.stop, len(catalog.queries))
    frames, errors, hints, crashes, container, hvdenv, horovod, *systems = map(search.hits, last)
    reader = _Reader(
        own=own or bool(hvdenv),
        modules=not container,
        horovod=own or bool(horovod),
        systems=tuple(
            f"{each.name}: " for each, hits in zip(_texts().systems, systems, strict=True) if hits
        ),
    )
    crashed = min((hit.place.number for hit in crashes), default=search.lines + 1)
    seen = {text for text, query in catalog.contexts.items() if search.hits(query)}
    crash = frames[0].match.groups() if frames else ()  # the library and the function
    where = " in {} ({})".format(*crash) if crash else ""
    found = [
        _ranked_by(each, hit, _filled(each, hit, where, crashed, reader), reader)
        for number, each in enumerate(catalog.signatures)
        for hit in search.hits(number)
        if seen.isdisjoint(each.unless) and not (each.needs and seen.isdisjoint(each.needs))
    ]
    if {hit.place.number for hit in errors} <= {each.found.number for each in found}:
        errors = sorted({*errors, *hints}, key=lambda hit: hit.place.number)[:ERRORS]
    mentions: dict[str, str] = {}  # of several texts that name one thing, the first wins
    for each, query in zip(_texts().mentions, catalog.mentions, strict=True):
        for hit in search.hits(query):
            mentions.setdefault(each.name, hit.match[1])
    return Diagnosis(
        found=_ranked(found),
        errors=tuple(hit.place for hit in errors),
        mentions=mentions,
        lines=search.lines,
        given_up=search.gave_up(range(len(catalog.signatures))),
        own=reader.own,
    )


def diagnose_step(path: Path) -> Diagnosis:
    """Diagnose the log of a build step from its last command on: each attempt appends to it."""
    with open_file(path, LOG) as log:
        log.seek(_last_command(log))
        return diagnose(log, "build", own=True)


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


def explain(text: str, phase: Phase, *, kills: bool = True) -> Found | None:
    """The cause that output of a build or a run shows, or else the symptom.

    Args:
        kills: whether to count reports that a process was killed, as launchers print them.
    """
    diagnosis = diagnose(io.BytesIO(text.encode("utf-8", "replace")), phase, own=True)
    if not kills:
        diagnosis = diagnosis._replace(found=tuple(f for f in diagnosis.found if not f.kill))
    return diagnosis.best


def _blocks(log: BinaryIO) -> Iterator[_Block]:
    """The log in blocks; no line is searched twice."""
    before, rest, number = b"", b"", 1
    while True:
        read = log.read(BLOCK)
        new = rest + read
        new = (_COLOURS.sub(b"", new) if b"\x1b" in new else new).translate(None, _DROPPED)
        text, start = before + new, len(before)
        end = _searchable(text, start) if read else len(text)
        yield _Block(text=text, start=start, end=end, number=number)
        if not read:
            return
        number += text.count(b"\n", start, end)
        before, rest = text[max(0, end - NEAR) : end], text[end:]


def _searchable(text: bytes, start: int) -> int:
    """The end of the last line that is followed by all that is near it."""
    last = max(start, len(text) - NEAR)
    end = text.rfind(b"\n", max(start, last - BLOCK // 2), last)
    return last if end < 0 else end + 1  # a line without an end is cut


def _look(block: _Block, at: int, query: _Query) -> _Hit | None:
    """The line at a position if it, with those that follow, matches a query."""
    around = block.text[max(0, at - NEAR) : at + NEAR]
    near = not query.near or any(text.encode() in around for text in query.near)
    if not near or any(text.encode() in around for text in query.not_near):
        return None
    low = max(0, at - BEFORE)
    start = 1 + max(block.text.rfind(end, low, at) for end in (b"\n", b"\r")) or low
    window = block.text[start : at + AFTER].decode("utf-8", "replace").replace("\x1b", "")
    first, *more = re.split(r"\r\n|\n|\r", window, maxsplit=LINES)[:LINES]
    line, rank = without_prefix(first)
    match = _match(query, line, [without_prefix(each)[0] for each in more])
    if not match:
        return None
    named = match.groupdict().get("rank")
    number = block.number + block.text.count(b"\n", block.start, start)
    before = _before(block.text[max(0, start - NEAR) : start], query.before) if query.before else ""
    return _Hit(Place(number, first, rank if named is None else named), match, around, before)


def _before(text: bytes, pattern: str) -> str:
    """What the lines at the end of a text say that match a pattern, joined."""
    said: list[str] = []
    for line in reversed(text.decode("utf-8", "replace").splitlines()[-SAID:]):
        match = _compiled(pattern).search(without_prefix(line)[0])
        if not match:
            break
        said.insert(0, match[1].strip())
    return " ".join(said)


def _match(query: _Query, line: str, more: Sequence[str]) -> re.Match[str] | None:
    """The first match in a line and those that follow, with today's names of programs or Open MPI 4's."""
    pattern = _compiled(query.pattern)
    text = "\n".join([line, *more])
    for each in dict.fromkeys((text, normalised(text))):
        match = pattern.search(each)
        # A match in a line that follows is found from that line.
        if match and "\n" not in each[: match.start()] and _holds(query.when, match):
            return match
    return None


def _holds(conditions: Sequence[str], match: re.Match[str]) -> bool:
    """Whether all comparisons of a pattern's groups are true; a group without a number has none."""
    for condition in conditions:
        left, operation, right = condition.format(*match.groups("")).split(" ")
        sides = [[int(number) for number in re.findall(r"\d+", side)] for side in (left, right)]
        if not all(sides) or not _COMPARE[operation](*sides):
            return False
    return True


class _Reader(NamedTuple):
    """Who reads a diagnosis: whether hvdenv's user, where modules may be, of a log that names Horovod.

    `systems` begin the commands of the package managers that the log shows.
    """

    own: bool
    modules: bool
    horovod: bool
    systems: tuple[str, ...]


def _remedy(signature: Signature, groups: Sequence[str], reader: _Reader) -> str:
    """What this reader can do, the most likely first."""
    parts = alternatives(signature.remedy.format(*groups))
    if not reader.horovod:
        parts = _without_horovod(parts)
    parts = _fitting(parts, reader.systems)
    if signature.horovod and reader.horovod:
        parts.append(f"for Horovod: {signature.horovod}")
    if signature.modules and reader.modules:
        parts.append(f"with environment modules: {signature.modules.format(*groups)}")
    if signature.recipe and reader.own:
        parts.append(f"in the recipe: {signature.recipe.format(*groups)}")
    return "; ".join(filter(None, parts))


def _without_horovod(remedies: Sequence[str]) -> list[str]:
    """Remedies without those that only concern Horovod, if others remain."""
    shortened = [_ABOUT_HOROVOD.sub("", each) for each in remedies]
    horovod = _texts().horovod.texts
    others = [each for each in shortened if not any(word in each for word in horovod)]
    return others or list(remedies)


def _fitting(remedies: Sequence[str], systems: tuple[str, ...]) -> list[str]:
    """Remedies by package managers: those of the log's system in front of the others."""
    managers = tuple(f"{each.name}: " for each in _texts().systems)
    marked = [each for each in remedies if each.startswith(managers)]
    ordered = iter(sorted(marked, key=lambda each: not each.startswith(systems)))
    return [next(ordered) if each in marked else each for each in remedies]


def _filled(signature: Signature, hit: _Hit, where: str, crashed: int, reader: _Reader) -> Found:
    """A signature with its texts filled in for a reader.

    Args:
        where: the library in which a process crashed.
        crashed: line number of the first crash; a process killed after it is not the cause.
    """
    place, match, around, before = hit
    place = _below_rulers(place, match)
    groups = [group or "" for group in match.groups()]
    name = match.groupdict().get("name") or ""
    signature = signature.refined_by(match.string, around.decode("utf-8", "replace"), name)
    follows = signature.kill and place.number > crashed
    kind: Kind = "consequence" if follows else signature.kind
    if before and kind == "symptom":
        kind = "cause"  # the lines before say why
    if follows or (kind == "consequence" and "rank" not in match.groupdict()):
        # The rank that prints this, or that was ended by it, is not the one that failed.
        place = place._replace(rank="")
    same = ("id", "rules", "source", "certainty", "kill")
    return Found(
        cause=signature.cause.format(*groups, where=where, before=before)
        .replace(" ()", "")
        .strip(),
        remedy=_remedy(signature, groups, reader),
        kind=kind,
        **{name: getattr(signature, name) for name in same},
        **place._asdict(),
    )


def _below_rulers(place: Place, match: re.Match[str]) -> Place:
    """The first line of the match that says something: not the ruler of a box, nor an empty line."""
    matched = match.string[: match.end()].rstrip().split("\n")
    skipped = next((at for at, line in enumerate(matched) if _WORD.search(line)), 0)
    if not skipped:
        return place
    line = match.string.split("\n")[skipped]
    return place._replace(number=place.number + skipped, line=line)


def _ranked_by(signature: Signature, hit: _Hit, found: Found, reader: _Reader) -> _Ranked:
    foreign = not reader.horovod and "orovod" in found.cause
    return _Ranked(found, hit.last_line, signature, foreign)


_ORDER: tuple[Kind, ...] = ("cause", "symptom", "consequence", "warning")


def _ranked(found: Sequence[_Ranked]) -> tuple[Found, ...]:
    """By kind, then by last line; general ones only where nothing else says more."""
    kept: list[_Ranked] = []
    for level in sorted({each.signature.general for each in found}):
        taken = {line for each in kept for line in each.lines}
        more = [each for each in found if each.signature.general == level]
        kept += [each for each in more if taken.isdisjoint(each.lines)] if level else more
        if any(each.found.kind in ("cause", "symptom") for each in kept):
            break
    if any(each.found.kind == "cause" and not each.is_derived for each in kept):
        kept = [_as_symptom(each) if each.is_derived else each for each in kept]
    return _distinct(kept)


def _as_symptom(ranked: _Ranked) -> _Ranked:
    return ranked._replace(found=ranked.found._replace(kind="symptom"))


def _distinct(found: Sequence[_Ranked]) -> tuple[Found, ...]:
    """By kind, then by last line; of several about the same lines, only the first."""
    starts: dict[int, Found] = {}
    for each in sorted(found, key=lambda one: _order(one, one.found.number)):
        starts.setdefault(each.found.number, each.found)
    ends: dict[int, Found] = {}
    for each in sorted(found, key=lambda one: _order(one, one.last_line)):
        if starts[each.found.number] is each.found and ends.keys().isdisjoint(each.lines):
            ends[each.last_line] = each.found
    return tuple(ends.values())


def _order(ranked: _Ranked, line: int) -> tuple[int, bool, int]:
    return _ORDER.index(ranked.found.kind), ranked.foreign, line
