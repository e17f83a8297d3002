"""Search a log of any size for wordings.

A log is read in blocks, so memory does not grow with its size. One pass over a block finds the
anchors of all wordings; a wording is tried only on lines that contain its anchor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import thread_time
from typing import BinaryIO, NamedTuple

from hvdenv.knowledge.loglines import normalised, other_names, without_prefix
from hvdenv.knowledge.wordings import Wording, folded, straight

try:
    from ahocorasick_rs import BytesAhoCorasick
except ImportError:  # some machines have no wheel of it
    BytesAhoCorasick = None  # type: ignore[assignment, misc]

BLOCK = 1 << 15
# Characters before and after an anchor, and lines from its own on, that a wording sees.
BEFORE, AFTER, LINES = 600, 1400, 3
# Characters before an anchor that belong to a block.
NEAR = 2000
# How many lines may contain an anchor of a wording that does not match. After ALL_TRIES for all
# wordings together, more than any real log needs, only FEW_TRIES each.
TRIES, ALL_TRIES, FEW_TRIES = 2000, 5000, 20
# CPU time in seconds for one wording, and for all, in one log. Real logs need hundredths of
# a second; only a crafted one comes near.
ONE_SECONDS, ALL_SECONDS = 1.0, 10.0
# When a block contains more anchors that are no longer wanted than this, stop searching for them.
IDLE = 1000

_COLOURS = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
# Control characters other than tab, line end and escape are removed.
_DROPPED = bytes({*range(32), 127} - set(b"\t\n\r\x1b"))
_END = re.compile(rb"[\r\n]")
_SPACES = re.compile(r"[ \t]+")
_LINE_END = re.compile(r"\r\n|\n|\r")


class Place(NamedTuple):
    """A line of a log without control sequences, its number, and the rank that it is about."""

    number: int
    line: str
    rank: str = ""


class Query(NamedTuple):
    """Wordings of one meaning, and how many lines to keep."""

    wordings: tuple[Wording, ...]
    most: int = 1


class Hit(NamedTuple):
    """A line that matches a wording.

    Attributes:
        wording: as written.
        slots: what fills its slots.
        text: the line, without prefixes, and those that follow.
        end: where the match ends in `text`.
        before, after: the lines before it, and those from it on.
    """

    place: Place
    wording: str
    slots: dict[str, str]
    text: str
    end: int
    before: str
    after: str

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


class _Progress:
    def __init__(self) -> None:
        self.hits: dict[int, Hit] = {}  # by line number
        self.tries = 0
        self.seconds = 0.0


class Matcher(NamedTuple):
    """Finds the anchors of wordings in a folded block.

    Attributes:
        wanted: the query and the wording of each anchor.
        find: the index of each anchor in a block, where it starts and ends.
    """

    wanted: Sequence[tuple[int, Wording]]
    find: Callable[[bytes], Iterable[tuple[int, int, int]]]


def matcher(queries: Sequence[Query], some: Iterable[int]) -> Matcher:
    """A matcher of some queries; making one takes longer than a short log."""
    pairs = [(at, each) for at in some for each in queries[at].wordings]
    named = [(at, each, name) for at, each in pairs for name in _anchors(each)]
    find = _automaton([name for _, _, name in named])
    return Matcher([(at, each) for at, each, _ in named], find)


class Search:
    """A search for queries; `hits` has what was found, by query."""

    def __init__(self, queries: Sequence[Query], all_of_them: Matcher) -> None:
        self.queries = queries
        self.matcher = all_of_them
        self.progress: defaultdict[int, _Progress] = defaultdict(_Progress)
        self.tries = 0
        self.seconds = 0.0
        self.lines = 0

    def read(self, log: BinaryIO) -> None:
        """Search a log from where it stands."""
        for block in _blocks(log):
            if self._read_block(block) > IDLE:
                self.matcher = matcher(self.queries, filter(self._wants, range(len(self.queries))))
            self.lines = block.number + block.text.count(b"\n", block.start, block.end) - 1

    def hits(self, query: int) -> list[Hit]:
        """What was found, in the order of lines."""
        return sorted(self.progress[query].hits.values(), key=lambda hit: hit.place.number)

    @property
    def gave_up(self) -> bool:
        """Whether some lines were not searched, because matching took too long."""
        return any(self._out_of_time(query) for query in range(len(self.queries)))

    def _read_block(self, block: _Block) -> int:
        """Returns how many of the anchors found were no longer wanted."""
        idle = 0
        searched: dict[int, int] = {}
        for index, at, _ in self.matcher.find(folded(block.text)):
            query, wording = self.matcher.wanted[index]
            if at < block.start:
                continue
            if not self._wants(query):
                idle += 1
            elif searched.get(index, block.start) <= at < block.end:
                self._try(query, wording, block, at)
                line_end = _END.search(block.text, at, at + AFTER)
                searched[index] = line_end.start() if line_end else at + AFTER
        return idle

    def _wants(self, query: int) -> bool:
        progress, limit = self.progress[query], TRIES if self.tries < ALL_TRIES else FEW_TRIES
        found_all = len(progress.hits) >= self.queries[query].most
        return not found_all and progress.tries < limit and not self._out_of_time(query)

    def _out_of_time(self, query: int) -> bool:
        return self.seconds >= ALL_SECONDS or self.progress[query].seconds >= ONE_SECONDS

    def _try(self, query: int, wording: Wording, block: _Block, at: int) -> None:
        """Keep a line if it matches."""
        progress = self.progress[query]
        began = thread_time()
        if hit := _look(block, at, wording):
            progress.hits.setdefault(hit.place.number, hit)
        seconds = thread_time() - began
        progress.tries += 1
        progress.seconds += seconds
        self.tries += 1
        self.seconds += seconds


def _anchors(wording: Wording) -> list[bytes]:
    """Its anchor, with the names that other releases give their programs."""
    return [wording.anchor, *map(str.encode, other_names(wording.anchor.decode()))]


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


def _look(block: _Block, at: int, wording: Wording) -> Hit | None:
    """The line at a position if it, with those that follow, matches a wording."""
    low = max(0, at - BEFORE)
    start = 1 + max(block.text.rfind(end, low, at) for end in (b"\n", b"\r")) or low
    window = block.text[start : at + AFTER].decode("utf-8", "replace").replace("\x1b", "")
    first, *more = _LINE_END.split(window, maxsplit=LINES)[:LINES]
    line, rank = without_prefix(first)
    text = _SPACES.sub(" ", "\n".join([line, *(without_prefix(each)[0] for each in more)]))
    match = _match(wording, text)
    if not match:
        return None
    slots = {
        name: _trimmed(value or "") for name, value in match.groupdict().items() if name[0] != "_"
    }
    rank = slots.get("rank", rank)
    number = block.number + block.text.count(b"\n", block.start, start)
    before = block.text[max(0, start - NEAR) : start].decode("utf-8", "replace")
    return Hit(
        place=Place(number, first, rank),
        wording=wording.text,
        slots=slots,
        text=text,
        end=match.end(),
        before=before,
        after=window,
    )


def _trimmed(value: str) -> str:
    """What fills a slot, without the punctuation and the pair of quotation marks around it."""
    value = value.strip().lstrip(":,").rstrip(".:,").strip()
    return value[1:-1] if value[:1] in "'\"`" and value[:1] == value[-1:] else value


def _match(wording: Wording, text: str) -> re.Match[str] | None:
    """The first match in a line and those that follow, with today's names of programs or Open MPI 4's."""
    for each in dict.fromkeys((text, normalised(text))):
        match = wording.pattern.search(each)
        # A match in a line that follows is found from that line.
        if match and "\n" not in each[: match.start()]:
            return match
    return None
