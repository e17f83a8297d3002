"""Search a log of any size for wordings.

A log is read in blocks, so memory does not grow with its size. One pass over a block finds the
anchors of all wordings; a wording is tried only on lines that contain its anchor.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import thread_time
from typing import BinaryIO, NamedTuple

from hvdenv.knowledge.failures import anchor, folded, pattern, straight

try:
    from ahocorasick_rs import BytesAhoCorasick
except ImportError:  # some machines have no wheel of it
    BytesAhoCorasick = None  # type: ignore[assignment, misc]

BLOCK = 1 << 15
# Characters before and after an anchor, and lines from its own on, that a wording sees.
BEFORE, AFTER, LINES = 600, 1400, 3
# Characters before an anchor that belong to a block.
NEAR = 2000
# CPU time in seconds for one query, and for all, in one log. Real logs need hundredths of
# a second; only a crafted one comes near.
ONE_SECONDS, ALL_SECONDS = 0.25, 2.5
# When a block contains more anchors that are no longer wanted than this, stop searching for them.
IDLE = 1000

_COLOURS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
# Control characters other than tab, line end and escape are removed.
_DROPPED = bytes({*range(32), 127} - set(b"\t\n\r\x1b"))
_END = re.compile(rb"[\r\n]")
_SPACES = re.compile(r"[ \t]+")
_LINE_END = re.compile(r"\r\n|\n|\r")

# Times, ranks (mpirun, horovodrun, srun, torchrun), hosts and pods, container builds, CI, workers of
# Ray and Determined, pip's and Spack's frames around the output of others, quotations and report titles.
# Horovod pads microseconds with spaces.
_PREFIX = re.compile(
    r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\. {1,5}\d{1,5}(?=:)|[.,\d]*)(?:Z|[+-]\d\d:?\d\d)?\]?:? ?"
    r"|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}:?(?=\[)"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,64} [\w./-]{1,64}(?:\[\d+\])?: "
    r"|[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]{1,200}:\d+\] "
    r"|\[(?:[\w.@-]+@)?\d+,(?P<mpirun>\d+)\](?:<std(?:err|out)>)?: ?"
    r"|\[(?:default)?(?P<gloo>\d+)\](?:<std(?:err|out)>)?: ?"
    r"|\[rank[=]?(?P<torch>\d+)\](?:: ?| \|\| )"
    r"| {0,4}(?P<srun>\d{1,5}): (?!\[[^\]]*\]$)"  # but not the tensors that a missing rank has yet to submit
    r"|(?:\d{1,6} )?#\d+ \d+\.\d+ "
    r"|\[\d{1,9}\.(?:\d{1,5}|batch|extern|interactive)\] "  # steps in the log of slurmd
    r"|##\[error\]"
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\) ?"
    r"|<\w*> +(?=\[\d{4}-)"
    r"|[0-9a-f]{8} \|\| ?"
    r"|\[pod/[\w./-]{1,200}\] "
    r"|\w[\w.-]{0,60}[-_]\d{1,4} +\| ?"
    r"| *[│┃] ?"
    r"| {2}(?:>>|  ) ?\d{1,7} {4}"
    r"|> ?"
    r"|# "
)


class Place(NamedTuple):
    """A line of a log without control sequences, its number, and the rank and host that it is about.

    A launcher may report several ranks in one line: then `rank` is a list such as 0-1,4.
    """

    number: int
    line: str
    rank: str = ""
    host: str = ""


class Query(NamedTuple):
    """Wordings of one meaning, and how many lines to keep; results are sorted by group and name."""

    group: str
    name: str
    wordings: tuple[str, ...]
    most: int = 1


class Hit(NamedTuple):
    """A line that matches a wording.

    Attributes:
        slots: what fills the slots of the wording.
        text: the line, without prefixes, and those that follow.
        end: where the match ends in `text`.
        before: the lines before it.
    """

    place: Place
    wording: str
    slots: dict[str, str]
    text: str
    end: int
    before: str

    @property
    def lines(self) -> range:
        """Numbers of the lines that the match covers."""
        first = self.place.number
        return range(first, first + self.text[: self.end].rstrip().count("\n") + 1)


class _Block(NamedTuple):
    """A cleaned part of a log, with what is near the part to search; the line number of its start."""

    text: bytes
    start: int
    end: int
    number: int


class Finder(NamedTuple):
    """Finds the anchors of wordings in a folded block.

    Attributes:
        wanted: the number of the query, and the wording, of each anchor.
        find: the index of each anchor in a block, where it starts and ends.
    """

    wanted: Sequence[tuple[int, str]]
    find: Callable[[bytes], Iterable[tuple[int, int, int]]]


def make_finder(queries: Sequence[Query], numbers: Iterable[int]) -> Finder:
    """Making one, of the queries with some numbers, takes longer than a short log."""
    wanted = [(number, each) for number in numbers for each in queries[number].wordings]
    anchors = [anchor(wording) for _, wording in wanted]
    if BytesAhoCorasick is None:
        return Finder(wanted, partial(_one_by_one, anchors))
    automaton = BytesAhoCorasick(anchors)
    return Finder(wanted, partial(automaton.find_matches_as_indexes, overlapping=True))


def _one_by_one(anchors: Sequence[bytes], block: bytes) -> list[tuple[int, int, int]]:
    found = [
        (index, *each.span())
        for index, anchor in enumerate(anchors)
        if anchor in block
        for each in re.finditer(re.escape(anchor), block)
    ]
    return sorted(found, key=lambda each: each[2])


class Search:
    """A search of a log for queries."""

    def __init__(self, queries: Sequence[Query], finder: Finder) -> None:
        self.queries = queries
        self.finder = finder
        self.lines = 0
        self._hits: list[dict[int, Hit]] = [{} for _ in queries]  # by line number
        self._seconds = [0.0] * len(queries)
        self._all_seconds = 0.0

    def read(self, log: BinaryIO) -> None:
        """Search a log from where it stands."""
        for block in _blocks(log):
            if self._read_block(block) > IDLE:
                wanted = filter(self._wants, range(len(self.queries)))
                self.finder = make_finder(self.queries, wanted)
            self.lines = block.number + block.text.count(b"\n", block.start, block.end) - 1

    def found(self, group: str) -> dict[str, list[Hit]]:
        """What queries of a group have found, by their names, in the order of lines."""
        return {
            query.name: [hits[number] for number in sorted(hits)]
            for query, hits in zip(self.queries, self._hits, strict=True)
            if query.group == group and hits
        }

    @property
    def gave_up(self) -> bool:
        """Whether some lines were not searched, because matching took too long."""
        return any(map(self._out_of_time, range(len(self.queries))))

    def _read_block(self, block: _Block) -> int:
        """Returns how many of the anchors found were no longer wanted."""
        idle = 0
        searched: dict[int, int] = {}
        for index, at, _ in self.finder.find(folded(block.text)):
            query, wording = self.finder.wanted[index]
            if at < block.start:
                continue
            if not self._wants(query):
                idle += 1
            elif searched.get(index, block.start) <= at < block.end:
                self._try(query, wording, block, at)
                line_end = _END.search(block.text, at, at + AFTER)
                searched[index] = line_end.start() if line_end else at + AFTER
        return idle

    def _try(self, query: int, wording: str, block: _Block, at: int) -> None:
        """Keep a line if it matches."""
        began = thread_time()
        if hit := _look(block, at, wording):
            self._hits[query].setdefault(hit.place.number, hit)
        seconds = thread_time() - began
        self._seconds[query] += seconds
        self._all_seconds += seconds

    def _wants(self, query: int) -> bool:
        found_all = len(self._hits[query]) >= self.queries[query].most
        return not (found_all or self._out_of_time(query))

    def _out_of_time(self, query: int) -> bool:
        return self._all_seconds >= ALL_SECONDS or self._seconds[query] >= ONE_SECONDS


def _blocks(log: BinaryIO) -> Iterator[_Block]:
    """The log in blocks; no line is searched twice."""
    before, rest, number = b"", b"", 1
    while True:
        read = log.read(BLOCK)
        new = rest + read
        new = (_COLOURS.sub(b"", new) if b"\x1b" in new else new).translate(None, _DROPPED)
        text, start = before + straight(new), len(before)
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


def without_prefix(line: str) -> tuple[str, str]:
    """A line without its prefixes, and the rank that they name."""
    rank, at = "", 0
    while found := _PREFIX.match(line, at):
        rank = rank or next((each for each in found.groups() if each), "")
        at = found.end()
    return line[at:], rank


def _look(block: _Block, at: int, wording: str) -> Hit | None:
    """The line at a position if it, with those that follow, matches a wording."""
    low = max(0, at - BEFORE)
    start = 1 + max(block.text.rfind(end, low, at) for end in (b"\n", b"\r")) or low
    window = block.text[start : at + AFTER].decode("utf-8", "replace").replace("\x1b", "")
    lines = _LINE_END.split(window, maxsplit=LINES)[:LINES]
    said = [without_prefix(line) for line in lines]
    text = _SPACES.sub(" ", "\n".join(line for line, _ in said))
    match = pattern(wording).search(text)
    if not match or "\n" in text[: match.start()]:  # one that begins below is found from there
        return None
    named = match.groupdict(default="").items()
    slots = {name: _trimmed(value) for name, value in named if name[0] != "_"}
    host = slots.get("host", "") if "rank" in slots else ""  # others name a host that was asked
    number = block.number + block.text.count(b"\n", block.start, start)
    return Hit(
        place=Place(number, lines[0], slots.get("rank", said[0][1]), host),
        wording=wording,
        slots=slots,
        text=text,
        end=match.end(),
        before=block.text[max(0, start - NEAR) : start].decode("utf-8", "replace"),
    )


def _trimmed(value: str) -> str:
    """What fills a slot, without the punctuation and the pair of quotation marks around it."""
    value = value.strip().lstrip(":,").rstrip(".:,").strip()
    quotation = value[:1] in "'\"`" and value[:1] == value[-1:] and value.count(value[:1]) == 2
    return value[1:-1] if quotation else value
