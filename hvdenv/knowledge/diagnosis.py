"""What a log says about why something failed: signatures are looked for in it.

A log is read in blocks, so that one of any size takes little memory. The texts of all signatures
are searched at once, as they stand, and patterns only see lines that hold one.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from time import thread_time
from typing import BinaryIO, NamedTuple

from hvdenv.knowledge.signatures import Kind, Phase, Signature, all_signatures
from hvdenv.reading import LOG, open_file

BLOCK = 1 << 15
# How much of a line is looked at on either side of a text that is searched, and how much of it
# and of the two lines after it a pattern sees: what bounds its time.
BEFORE, AFTER, LINES = 600, 1400, 3
# So many lines may hold a signature's text without fitting its pattern; fewer, where those of all
# signatures together are more than any real log has.
TRIES, ALL_TRIES, FEW_TRIES = 2000, 10_000, 50
# Processor time in seconds that one signature, and all of them, may take for a log. Real logs need
# hundredths of a second. Only a log made for it comes near these limits, since patterns are at most
# quadratic in the length of a line, which is cut.
PATTERN_SECONDS, ALL_SECONDS = 1.0, 10.0
# How often texts that are no longer wanted may be in a block before they are left out.
IDLE = 1000
ERRORS = 5

_COLOURS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
# Of a tab, a line's end and an escape, something may be still to come.
_DROPPED = bytes({*range(32), 127} - set(b"\t\n\r\x1b"))

_END = re.compile(rb"[\r\n]")

# What stands before the text of a line: times, ranks by mpirun, horovodrun, srun and torchrun,
# a container's build, continuous integration, Ray's workers, quotations and the titles of reports.
_PREFIX = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*(?:Z|[+-]\d\d:?\d\d)?\]?:? ?"
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}:?(?=\[)"
    r"|\[(?:[\w.@-]+@)?\d+,(?P<mpirun>\d+)\](?:<std(?:err|out)>)?: ?"
    r"|\[(?P<gloo>\d+)\](?:<std(?:err|out)>)?: ?"
    r"|\[rank(?P<torch>\d+)\]: ?"
    r"| {0,4}(?P<srun>\d{1,5}): (?!\[[^\]]*\]$)"  # but not what a missing rank has to do
    r"|(?:\d{1,6} )?#\d+ \d+\.\d+ "
    r"|##\[error\]"
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ?"
    r"|> ?"
    r"|# "
)

# Versions and places that a log names: what, a text before them, and a pattern.
_MENTIONS = (
    ("Horovod", "horovod-", r"horovod-(\d[\w.+]*?)(?:\.tar|-cp|-py|/|\s|$)"),
    ("Horovod", "Horovod v", r"Horovod v(\d[\w.+]*)"),
    ("Horovod", "horovod==", r"horovod==(\d[\w.+]*)"),
    ("Python", "/python3.", r"/python(3\.\d+)"),
    ("Python", "Python 3.", r"Python (3\.\d+[\w.]*)"),
    ("environment", "/lib/python3.", r"(/[^\s'\":=]{1,200}?)/lib/python3"),
    ("torch", "Found Pytorch", r'Found Pytorch: .*version "?([\w.+]+)'),
    ("torch", "torch-", r"\btorch-(\d[\w.+]*?)(?:-cp|-py|\s|$)"),
    ("TensorFlow", "Found Tensorflow", r'Found Tensorflow: .*version "?([\w.+]+)'),
    ("TensorFlow", "tensorflow", r"\btensorflow(?:[_-](?:cpu|gpu))?-(\d[\w.+]*?)(?:-cp|-py|\s|$)"),
    ("C++ compiler", "CXX compiler identification", r"identification is (.{1,40})"),
    ("C++ compiler", "gcc version", r"gcc version ([\d.]+)"),
    ("C++ compiler's path", "working CXX compiler: ", r"CXX compiler: (\S+)"),
    ("CMake", "cmake version", r"cmake version ([\d.]+)"),
    ("CMake", "cmake-", r"/cmake-(\d+\.\d+(?:\.\d+)?)/"),
    ("MPI", "(Open MPI)", r"\(Open MPI\) ([\w.]+)"),
    ("MPI", "Open MPI v", r"Open MPI v([\w.]+)"),
    ("MPI", "Found MPI_CXX: ", r"Found MPI_CXX: (\S+)"),
    ("NCCL", "NCCL version", r"NCCL version ([\d.]+(?:\+cuda[\d.]+)?)"),
    ("CUDA", "Found CUDAToolkit: ", r'Found CUDAToolkit: .*version "?([\d.]+)'),
    ("CUDA", "CUDA compiler identification", r"identification is (.{1,40})"),
    ("CUDA", "CUDA Version: ", r"CUDA Version: ([\d.]+)"),
)

_ERROR = (
    (
        "rror: ", "ERROR: ", "xception: ", "Interrupt", "fatal: ", "FATAL", "CMake Error at ",
        "Segmentation fault", "Bus error", "core dumped",
    ),
    r"(?:^|[\s:\]>.])(?:[\w.]*(?:Error|Exception|Interrupt): \S|(?:ERROR|[Ee]rror|fatal|FATAL): \S"
    r"|CMake Error at|Segmentation fault|Bus error|core dumped|FATAL\b)",
)  # fmt: skip

# A process that crashed by itself; others that end after it, or are killed, follow from that.
_CRASH = (
    (
        "Segmentation fault", "segfault at ", "Bus error", "Illegal instruction", "SIGSEGV",
        "SIGBUS", "SIGILL", "exited on signal 11", "status code 139", "status code -11",
    ),
    "",
)  # fmt: skip
# In a backtrace by UCX or Open MPI, the frames of whoever handles the signal stand before that of
# what crashed: UCX's, whatever it is that crashed, and the C library's, which may be called too.
_FRAME_START = r"(?:\[\S{1,64}:\d{1,8}\] )?[ \[]{0,4}\d{1,2}\]? {1,3}"
_FRAME = (
    ("libc.so.6(", "libpthread.so.0(", "libc-2.", "libpthread-2.", "libucs.so.0("),
    rf"^{_FRAME_START}\S{{0,200}}/lib(?:c|pthread|ucs)[-.][\w.]{{2,10}}\(\+0x[^\n]*"
    rf"(?:\n{_FRAME_START}\S{{0,200}}/libc[-.][\w.]{{2,10}}\([^\n]*)?"
    rf"\n{_FRAME_START}\S{{0,200}}/(?!libc[-.]|libucs\.)([^/\s(]{{1,80}}\.so[\w.]{{0,20}})\((\w{{0,60}})",
)


class Place(NamedTuple):
    """A line of a log.

    Attributes:
        number: from 1.
        line: its text, without control sequences.
        rank: which rank printed it, or it is about; empty if it does not say.
    """

    number: int
    line: str
    rank: str = ""


class Found(NamedTuple):
    """A signature that was found, its texts filled in.

    Attributes:
        id, cause, remedy, kind, rules, source, certainty, kill: as in Signature; a kill after a
            crash is a consequence.
        number, line, rank: as in Place.
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


class Diagnosis(NamedTuple):
    """What a log says.

    Attributes:
        found: signatures: causes first, and then in the order of the log.
        errors: the first lines that look like an error.
        mentions: versions and places that it names.
        lines: how many it has.
        given_up: matching took too long, so not all of its lines were searched.
    """

    found: tuple[Found, ...]
    errors: tuple[Place, ...]
    mentions: dict[str, str]
    lines: int
    given_up: bool = False

    def of_kind(self, kind: Kind) -> tuple[Found, ...]:
        """What was found of one kind."""
        return tuple(each for each in self.found if each.kind == kind)

    @property
    def root(self) -> Found | None:
        """The cause that was there first; None if none is known."""
        return next(iter(self.of_kind("cause")), None)

    @property
    def best(self) -> Found | None:
        """The cause, or else where it stopped; None if nothing is known of it."""
        return self.root or next(iter(self.of_kind("symptom")), None)

    @property
    def rank(self) -> str:
        """The rank that failed first; empty if the log does not say."""
        # Its own first error tells: a launcher names the rank whose end it saw first, which is
        # often one that another's failure has ended.
        told = self.of_kind("consequence")
        others = {each.number for each in told}  # what a rank says whom another has ended
        first = [self.best] if self.best else [e for e in self.errors[:1] if e.number not in others]
        return next((each.rank for each in (*first, *told) if each.rank), "")


class _Match(NamedTuple):
    """What was found, and the line that ends it."""

    found: Found
    last: int


class _Block(NamedTuple):
    """A part of a log, cleaned.

    Attributes:
        text: with some lines more than are to be searched, for patterns that go on in them.
        end: where the search ends in it.
        number: of its first line.
    """

    text: bytes
    end: int
    number: int


class _Time:
    """Processor time in seconds that is left."""

    def __init__(self, left: float = math.inf) -> None:
        self.left = left


class _Watch:
    """Texts that are looked for, and where one of them was found."""

    def __init__(
        self, texts: Sequence[str], pattern: str = "", most: int = 1, time: _Time | None = None
    ) -> None:
        self.texts = tuple(text.encode() for text in texts)
        self.pattern = pattern
        self.places: dict[int, tuple[Place, re.Match[str]]] = {}
        self.most = most
        self.tries = 0
        self.time = time or _Time()
        self.own_time = _Time(PATTERN_SECONDS)

    def active(self, tries: int) -> bool:
        return len(self.places) < self.most and self.tries < tries and not self.given_up

    @property
    def given_up(self) -> bool:
        return min(self.time.left, self.own_time.left) <= 0

    def look(self, block: _Block, at: int) -> None:
        """Keep a place if its line fits."""
        self.tries += 1
        began = thread_time()
        if seen := _look(block, at, _compiled(self.pattern)):
            self.places.setdefault(seen[0].number, seen)
        taken = thread_time() - began
        self.time.left -= taken
        self.own_time.left -= taken


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # There are more of them than `re` keeps, and few are needed for one log.
    return re.compile(pattern)


class _Texts:
    """The texts of several watches, to be searched at once."""

    def __init__(self, watches: Iterable[_Watch]) -> None:
        self.pairs = [(text, watch) for watch in watches for text in watch.texts]
        self.search = _automaton(tuple(text for text, _ in self.pairs))

    def find(self, block: _Block, tries: int) -> int:
        """Let watches look at their texts; returns how many were no longer wanted."""
        idle = 0
        looked: dict[int, int] = {}
        for pair, at, _ in self.search(block.text):
            watch = self.pairs[pair][1]
            if not watch.active(tries):
                idle += 1
            elif looked.get(pair, 0) <= at < block.end:
                watch.look(block, at)
                ended = _END.search(block.text, at, at + AFTER)
                looked[pair] = ended.start() if ended else at + AFTER
        return idle


# Those of builds, of runs and of both: to make one takes longer than to read a short log.
@lru_cache(maxsize=3)
def _automaton(texts: tuple[bytes, ...]) -> Callable[[bytes], Iterable[tuple[int, int, int]]]:
    """What finds texts in a block: the index of each, where it starts and where it ends."""
    try:
        from ahocorasick_rs import BytesAhoCorasick
    except ImportError:  # there are no wheels of it for some machines
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


def diagnose(log: BinaryIO, phase: Phase | None = None) -> Diagnosis:
    """Look for what is known in a log.

    Args:
        log: of any size; it is read once.
        phase: what it is the log of; None if that is not known.
    """
    signatures = [each for each in all_signatures() if phase is None or phase in each.phases]
    time = _Time(ALL_SECONDS)
    watches = [_Watch(each.texts, each.pattern, time=time) for each in signatures]
    contexts = {text: _Watch((text,)) for each in signatures for text in each.needs + each.unless}
    mentions = [(name, _Watch((text,), pattern, time=time)) for name, text, pattern in _MENTIONS]
    errors = _Watch(*_ERROR, most=ERRORS, time=time)
    crash, frame = _Watch(*_CRASH, time=time), _Watch(*_FRAME, time=time)
    others = [*contexts.values(), *(each for _, each in mentions), errors, crash, frame]
    lines = _search(log, [*watches, *others])
    seen = {text for text, watch in contexts.items() if watch.places}
    crashed, where = min(crash.places, default=lines + 1), _where(frame)
    found = [
        _Match(_filled(signature, *first, where, crashed), _last_line(*first))
        for signature, watch in zip(signatures, watches, strict=True)
        for first in watch.places.values()
        if _counts(signature, seen)
    ]
    places = tuple(place for place, _ in errors.places.values())
    given_up = any(watch.given_up for watch in watches)
    return Diagnosis(_ranked(found), places, _named(mentions), lines, given_up)


def _search(log: BinaryIO, watches: Sequence[_Watch]) -> int:
    """Let watches find their texts in a log; returns how many lines it has."""
    texts = _Texts(watches)
    lines = 0
    for block in _blocks(log):
        tries = TRIES if sum(watch.tries for watch in watches) < ALL_TRIES else FEW_TRIES
        if texts.find(block, tries) > IDLE:
            texts = _Texts(watch for watch in watches if watch.active(tries))
        lines = block.number + block.text.count(b"\n", 0, block.end) - 1
    return lines


def _named(mentions: Sequence[tuple[str, _Watch]]) -> dict[str, str]:
    """What a log names; of several words for it, by the first."""
    named: dict[str, str] = {}
    for name, watch in mentions:
        for _, match in watch.places.values():
            named.setdefault(name, match[1])
    return named


def diagnose_step(path: Path) -> Diagnosis:
    """Look into the log of a build's step: at its last command, for each attempt is added to it."""
    with open_file(path, LOG) as log:
        start = offset = 0
        for line in log:
            start = offset if line.startswith(b"$ ") else start
            offset += len(line)
        log.seek(start)
        return diagnose(log, "build")


def explain(text: str, phase: Phase, *, kills: bool = True) -> Found | None:
    """The cause that a text shows, or else where it stopped; None if nothing is known of it.

    Args:
        text: what a build or a run printed.
        phase: which of them.
        kills: whether it counts that a process was killed, as launchers say it of ranks.
    """
    diagnosis = diagnose(io.BytesIO(text.encode("utf-8", "replace")), phase)
    if not kills:
        diagnosis = diagnosis._replace(found=tuple(f for f in diagnosis.found if not f.kill))
    return diagnosis.best


def _blocks(log: BinaryIO) -> Iterator[_Block]:
    """A log in parts that overlap by nothing that is searched twice."""
    rest, number = b"", 1
    while True:
        read = log.read(BLOCK)
        text = _cleaned(rest + read)
        end = _searchable(text) if read else len(text)
        yield _Block(text, end, number)
        if not read:
            return
        number += text.count(b"\n", 0, end)
        # Patterns look back to the start of their line.
        rest = text[end:]


def _cleaned(text: bytes) -> bytes:
    if b"\x1b" in text:
        text = _COLOURS.sub(b"", text)
    return text.translate(None, _DROPPED)


def _searchable(text: bytes) -> int:
    """The end of the last line that is followed by as many as a pattern may see."""
    end = len(text)
    for _ in range(LINES):
        end = text.rfind(b"\n", max(0, len(text) - BLOCK // 2), end)
        if end < 0:  # a line without an end
            return max(0, len(text) - AFTER)
    return end + 1


def _look(block: _Block, at: int, pattern: re.Pattern[str]) -> tuple[Place, re.Match[str]] | None:
    """The line of a position, if it, with those after it, fits a pattern."""
    low = max(0, at - BEFORE)
    start = 1 + max(block.text.rfind(end, low, at) for end in (b"\n", b"\r")) or low
    window = block.text[start : at + AFTER].decode("utf-8", "replace").replace("\x1b", "")
    first, *more = re.split(r"\r\n|\n|\r", window, maxsplit=LINES)[:LINES]
    line, rank = _without_prefix(first)
    match = pattern.search("\n".join([line, *(_without_prefix(each)[0] for each in more)]))
    if not match or match.start() > len(line):  # it is another line's
        return None
    named = match.groupdict().get("rank")
    number = block.number + block.text.count(b"\n", 0, start)
    return Place(number, first, rank if named is None else named), match


def _without_prefix(line: str) -> tuple[str, str]:
    """A line without what was put before it, and the rank that this names."""
    rank, at = "", 0
    while found := _PREFIX.match(line, at):
        rank = rank or next((each for each in found.groups() if each), "")
        at = found.end()
    return line[at:], rank


def _counts(signature: Signature, seen: set[str]) -> bool:
    return (not signature.needs or not seen.isdisjoint(signature.needs)) and seen.isdisjoint(
        signature.unless
    )


def _last_line(place: Place, match: re.Match[str]) -> int:
    """Where a match ends: in a traceback, what happened stands after where it did."""
    return place.number + match.string[: match.end()].rstrip().count("\n")


def _where(frame: _Watch) -> str:
    """In which library a process crashed, for the text of a cause; empty if no backtrace says."""
    for _, match in frame.places.values():
        return f" in {match[1]}" + (f" ({match[2]})" if match[2] else "")
    return ""


def _filled(
    signature: Signature, place: Place, match: re.Match[str], where: str, crashed: int
) -> Found:
    """A signature with its texts filled in.

    Args:
        signature: that was found.
        place: where.
        match: of its pattern.
        where: the library in which a process crashed.
        crashed: number of the line that tells of it; what is killed after that is no cause.
    """
    groups = [group or "" for group in match.groups()]
    follows = signature.kill and place.number > crashed
    kind: Kind = "consequence" if follows else signature.kind
    if follows or (kind == "consequence" and "rank" not in match.groupdict()):
        place = place._replace(rank="")  # who says it, or was ended after it, is not who failed
    cause = signature.cause.format(*groups, where=where)
    return Found(
        signature.id, cause, signature.remedy.format(*groups), kind, signature.rules,
        signature.source, signature.certainty, *place, signature.kill,
    )  # fmt: skip


_ORDER: tuple[Kind, ...] = ("cause", "symptom", "consequence", "warning")


def _ranked(found: Sequence[_Match]) -> tuple[Found, ...]:
    """By kind and the line that ends it; of several about the same lines, the first."""
    starts: dict[int, Found] = {}
    for each, _ in sorted(found, key=lambda match: _by_kind(match.found, match.found.number)):
        starts.setdefault(each.number, each)
    ends: dict[int, Found] = {}
    for each, last in sorted(found, key=lambda match: _by_kind(*match)):
        if starts[each.number] is each and ends.keys().isdisjoint(range(each.number, last + 1)):
            ends[last] = each
    return tuple(ends.values())


def _by_kind(found: Found, line: int) -> tuple[int, int]:
    return _ORDER.index(found.kind), line
