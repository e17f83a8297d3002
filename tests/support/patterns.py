"""How long a regular expression can take in Python's engine, which backtracks.

A pattern becomes an automaton whose states are the pattern's characters. If two loops can read the
same text one after the other, the engine tries every place to divide it: ``.*.*x`` takes quadratic
time, and each further loop multiplies that by the length. If one loop can read the same text in two
ways, as in ``(a+)+``, the time doubles with each character. A search tries each start, which counts
as one more loop before the pattern. Conditions (look-arounds, boundaries, backreferences) are
assumed to hold, so the result is an upper bound.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

_INSIDE_RE = sys.version_info >= (3, 11)
parser: Any = importlib.import_module("re._parser" if _INSIDE_RE else "sre_parse")
sre: Any = importlib.import_module("re._constants" if _INSIDE_RE else "sre_constants")

ANCHORED = ("match", "fullmatch")
UNBOUNDED = 1 << 30
# Longer repetitions are loops, and shorter ones of groups are written out.
COPIES = 3
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
_REPEATS = (sre.MAX_REPEAT, sre.MIN_REPEAT)


class _Word(NamedTuple):
    """A text that leads to a loop, and one that goes around it."""

    before: str
    around: str


class Verdict(NamedTuple):
    """What a pattern costs at most.

    Attributes:
        exponential: a text can be read in two ways by one loop, so each repetition doubles the time.
        choices: in how many ways a text of the given length can be divided among loops.
        words: what its loops, and pairs of them, read again and again.
        path: those of them that make up the choices.
    """

    exponential: bool
    choices: int
    words: tuple[_Word, ...]
    path: tuple[_Word, ...]


class _Part(NamedTuple):
    """A part of a pattern.

    Attributes:
        first, last: its states that can be entered from before, and left.
        empty: in how many ways it can match nothing.
        sure: those of `last` behind which nothing can fail.
        free: it can be left out without a condition.
    """

    first: Counter[int]
    last: Counter[int]
    empty: int
    sure: frozenset[int]
    free: bool


_NOTHING = _Part(Counter(), Counter(), 1, frozenset(), True)


class _Automaton:
    """States, what each reads, how often it can be repeated, and which follow it."""

    def __init__(self, pattern: str, flags: int, method: str) -> None:
        tree = parser.parse(pattern, flags)
        self.flags = tree.state.flags
        self.alphabet = _alphabet(tree)
        self.bits = {c: 1 << index for index, c in enumerate(self.alphabet)}
        self.examples: dict[int, str] = {}
        self.all = (1 << len(self.alphabet)) - 1
        begin, end = (1 << len(self.alphabet)), (1 << len(self.alphabet) + 1)
        self.begin, self.end = begin, end
        self.reads: list[int] = []
        self.bounds: list[int] = []
        self.follow: list[Counter[int]] = []
        if method not in ANCHORED:  # whatever stands before
            self._state(self.all)
            self.follow[0][0] += 1
        whole = self._sequence(list(tree), True)
        self.sure = frozenset() if method == "fullmatch" else whole.sure
        self.first = whole.first + (Counter() if method in ANCHORED else Counter([0]))
        if method not in ANCHORED:
            self.follow[0] += whole.first

    def _state(self, reads: int) -> int:
        self.reads.append(reads)
        self.bounds.append(UNBOUNDED)
        self.follow.append(Counter())
        return len(self.reads) - 1

    def _one(self, reads: int) -> _Part:
        state = self._state(reads)
        only = Counter([state])
        return _Part(only, only, 0, frozenset([state]), False)

    def _join(self, left: _Part, right: _Part) -> _Part:
        for last, ways in left.last.items():
            for first, more in right.first.items():
                self.follow[last][first] += ways * more
        return _Part(
            left.first + _times(right.first, left.empty),
            right.last + _times(left.last, right.empty),
            min(2, left.empty * right.empty),
            right.sure | (left.sure if right.free else frozenset()),
            left.free and right.free,
        )

    def _sequence(self, nodes: Sequence[Any], at_start: bool) -> _Part:
        whole = _NOTHING
        for index, (kind, value) in enumerate(nodes):
            first = at_start and not whole.last
            if first and kind is sre.AT and value is sre.AT_BOUNDARY:
                rest = self._sequence(nodes[index + 1 :], False)
                return self._join(self._join(whole, self._boundary(rest)), rest)
            part = self._before(kind, value) if first else None
            whole = self._join(whole, part or self._node(kind, value, first))
        return whole

    def _before(self, kind: Any, value: Any) -> _Part | None:
        """What a pattern asks of the character before it starts, as if it read that."""
        if kind is sre.AT and value in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            lines = value is sre.AT_BEGINNING and self.flags & re.MULTILINE
            return self._one(self.begin | (self._set(lambda c: c == "\n") if lines else 0))
        if kind is sre.ASSERT_NOT and value[0] < 0 and len(value[1]) == 1:
            reads = self._reads(*value[1][0])
            return None if reads is None else self._one(self.begin | self.all & ~reads)
        return None

    def _boundary(self, rest: _Part) -> _Part:
        r"""A ``\b`` before the first word: no character of a word stands before it."""
        word = self._class(r"\w")
        if rest.empty or any(self.reads[state] & ~word for state in rest.first):
            return _Part(Counter(), Counter(), 1, frozenset(), False)
        return self._one(self.begin | self.all & ~word)

    def _node(self, kind: Any, value: Any, at_start: bool) -> _Part:
        reads = self._reads(kind, value)
        if reads is not None:
            return self._one(reads)
        if kind is sre.SUBPATTERN:
            _, added, removed, body = value
            outside, self.flags = self.flags, (self.flags | added) & ~removed
            part = self._sequence(list(body), at_start)
            self.flags = outside
            return part
        if kind is sre.BRANCH:
            return self._either([self._sequence(list(each), at_start) for each in value[1]])
        if kind in _REPEATS:
            return self._repeated(*value)
        if kind in (sre.ASSERT, sre.ASSERT_NOT):
            ahead = self._sequence(list(value[1]), False) if value[0] > 0 else _NOTHING
            return _Part(ahead.first, Counter(), 1, frozenset(), False)
        if kind is sre.AT and value in (sre.AT_END, sre.AT_END_STRING):
            return self._one(self.end | self._set(lambda c: c == "\n"))
        if kind in (sre.AT, sre.GROUPREF):  # a group's text is one text
            return _Part(Counter(), Counter(), 1, frozenset(), False)
        raise NotImplementedError(str(kind))

    def _either(self, parts: Sequence[_Part]) -> _Part:
        return _Part(
            sum((each.first for each in parts), Counter()),
            sum((each.last for each in parts), Counter()),
            min(2, sum(each.empty for each in parts)),
            frozenset().union(*(each.sure for each in parts)),
            any(each.free for each in parts),
        )

    def _repeated(self, least: int, most: Any, body: Any) -> _Part:
        nodes = list(body)
        single = len(nodes) == 1 and self._reads(*nodes[0]) is not None
        whole = _NOTHING
        copies = least if single or least <= COPIES else 1
        for _ in range(min(copies, 16)):
            whole = self._join(whole, self._sequence(nodes, False))
        if most is sre.MAXREPEAT or most > least + (1 if single else COPIES):
            more = self._loop(nodes, UNBOUNDED if most is sre.MAXREPEAT else most - least)
            return self._join(whole, more)
        optional = _NOTHING
        for _ in range(most - least):
            each = self._join(self._sequence(nodes, False), optional)
            optional = each._replace(empty=min(2, each.empty + 1), free=True)
        return self._join(whole, optional)

    def _loop(self, nodes: Sequence[Any], bound: int) -> _Part:
        start = len(self.reads)
        part = self._sequence(nodes, False)
        for state in range(start, len(self.reads)):
            # Of loops within loops, the product: both divide the text.
            inner = self.bounds[state]
            self.bounds[state] = bound if inner == UNBOUNDED else min(UNBOUNDED, inner * bound)
        for last, ways in part.last.items():
            for first, more in part.first.items():
                self.follow[last][first] += ways * more
        return part._replace(empty=1, free=True)

    def _reads(self, kind: Any, value: Any) -> int | None:
        """The characters that a node reads, if it reads one."""
        if kind is sre.LITERAL:
            return self._literal(value)
        if kind is sre.NOT_LITERAL:
            return self.all & ~self._literal(value)
        if kind is sre.ANY:
            dot_all = self.flags & re.DOTALL
            return self.all if dot_all else self._set(lambda c: c != "\n")
        if kind is sre.IN:
            return self._in(value)
        return self._class(_CATEGORIES[value]) if kind is sre.CATEGORY else None

    def _in(self, items: Sequence[Any]) -> int:
        negated = items[0][0] is sre.NEGATE
        reads = 0
        for kind, value in items[negated:]:
            if kind is sre.RANGE:
                for code in range(value[0], min(value[1], 0x2FF) + 1):
                    reads |= self._literal(code)
            elif kind is sre.CATEGORY:
                reads |= self._class(_CATEGORIES[value])
            else:
                reads |= self._literal(value)
        return self.all & ~reads if negated else reads

    def _literal(self, code: int) -> int:
        c = chr(code)
        same = {c, c.lower(), c.upper()} if self.flags & re.IGNORECASE else {c}
        return sum(self.bits.get(c, 0) for c in same)

    def _class(self, text: str) -> int:
        compiled = re.compile(text, self.flags & re.ASCII)
        return self._set(lambda c: bool(compiled.match(c)))

    def _set(self, holds: Callable[[str], bool]) -> int:
        return sum(bit for c, bit in self.bits.items() if holds(c))

    def example(self, reads: int) -> str:
        """A character of a set, of those that people write first; none for an end of the text."""
        if reads not in self.examples:
            of_set = [c for c, bit in self.bits.items() if reads & bit]
            key = lambda c: (not c.isalnum(), not c.isprintable(), c)  # noqa: E731
            self.examples[reads] = min(of_set, key=key, default="")
        return self.examples[reads]

    def path_to(self, loop: frozenset[int]) -> str:
        """A shortest text that leads to a loop."""
        return self._shortest([(state, "") for state in self.first], loop)

    def around(self, loop: frozenset[int]) -> str:
        """A text that goes around a loop."""
        state = min(loop)
        starts = [(each, "") for each in self.follow[state] if each in loop]
        return self._shortest(starts, frozenset([state]), loop)

    def _shortest(
        self,
        starts: list[tuple[int, str]],
        ends: frozenset[int],
        within: frozenset[int] | None = None,
    ) -> str:
        seen = {state for state, _ in starts}
        for state, text in starts:  # it grows
            text += self.example(self.reads[state])
            if state in ends:
                return text
            for each in self.follow[state]:
                if each not in seen and (within is None or each in within):
                    seen.add(each)
                    starts.append((each, text))
        return ""


def _alphabet(tree: Any) -> str:
    """ASCII, one of each other kind, and what the pattern names besides."""
    named = {chr(code) for code in _literals(tree)}
    return "".join(sorted({*map(chr, range(128)), "é", "\u00a0", "٣", "你", *named}))


def _literals(nodes: Any) -> Iterator[int]:
    for each in nodes:
        if isinstance(each, tuple) and len(each) == 2 and each[0] in (sre.LITERAL, sre.NOT_LITERAL):
            yield each[1]
        elif isinstance(each, (list, tuple, parser.SubPattern)):
            yield from _literals(each)


def _times(states: Counter[int], ways: int) -> Counter[int]:
    return Counter({state: count * ways for state, count in states.items()} if ways else {})


def judge(pattern: str, flags: int = 0, method: str = "search", length: int = UNBOUNDED) -> Verdict:
    """What a pattern costs on a text of a length, at most.

    Args:
        pattern: a regular expression.
        flags: as for `re.compile`.
        method: the function of `re` that it is for.
        length: of the text, in characters.
    """
    automaton = _Automaton(pattern, flags, method)
    loops, reach = _loops(automaton)
    words = [_Word(automaton.path_to(each), automaton.around(each)) for each in loops]
    best: list[tuple[int, tuple[_Word, ...]]] = []
    for loop in loops:
        entry: tuple[int, tuple[_Word, ...]] = (1, ())
        for before, (count, path) in enumerate(best):
            if not loop <= reach[min(loops[before])]:
                continue
            if word := _common_word(automaton, loops[before], loop):
                words.append(_Word(automaton.path_to(loops[before]), word))
                ways = min(_bound(automaton, loops[before]), _bound(automaton, loop), length)
                count, path = count * ways, (*path, words[-1])
            entry = max(entry, (count, path))
        best.append(entry)
    choices, path = max(best, default=(1, ()))
    exponential = any(_two_ways_around(automaton, each) for each in loops)
    return Verdict(exponential, choices, tuple(dict.fromkeys(words)), path)


def pumped(verdict: Verdict, length: int) -> Iterator[str]:
    """The texts of a length on which a pattern tries most."""
    for before, word in verdict.words:
        yield (before + word * (length // len(word)))[:length]
    if len(verdict.path) > 1:
        each = length // len(verdict.path)
        yield "".join(before + word * (each // len(word)) for before, word in verdict.path)


def _bound(automaton: _Automaton, loop: frozenset[int]) -> int:
    return max(automaton.bounds[state] for state in loop)


def _reached(follow: Mapping[T, Iterable[T]], starts: Iterable[T]) -> set[T]:
    """What can be reached from some nodes of a graph, with at least one step."""
    seen: set[T] = set()
    todo = [each for start in starts for each in follow[start]]
    while todo:
        if (node := todo.pop()) not in seen:
            seen.add(node)
            todo += follow[node]
    return seen


def _loops(automaton: _Automaton) -> tuple[list[frozenset[int]], dict[int, set[int]]]:
    """Components that go around, in the order in which a text meets them, and what states reach."""
    follow = dict(enumerate(automaton.follow))
    reach = {state: _reached(follow, [state]) for state in follow}
    around = {
        frozenset(each for each in reach[state] if state in reach[each])
        for state in follow
        if state in reach[state]
    }
    # Where a match is sure at some place of each round, nothing is tried again.
    open_ = {loop: _within(automaton, loop - automaton.sure) for loop in around}
    loops = [loop for loop in around if any(s in _reached(open_[loop], [s]) for s in open_[loop])]
    # A loop reaches all that a later one does, and itself.
    return sorted(loops, key=lambda loop: (-len(reach[min(loop)]), min(loop))), reach


def _within(automaton: _Automaton, states: frozenset[int]) -> dict[int, list[int]]:
    return {one: [each for each in automaton.follow[one] if each in states] for one in states}


def _two_ways_around(automaton: _Automaton, loop: frozenset[int]) -> bool:
    """A text leads from a state back to it in two ways."""
    follow, reads = _within(automaton, loop), automaton.reads
    if any(automaton.follow[one][other] > 1 for one in loop for other in follow[one]):
        return True
    # Pairs of states that one text leads to.
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {
        (a, b): [(c, d) for c in follow[a] for d in follow[b] if reads[c] & reads[d]]
        for a in loop
        for b in loop
    }
    back: dict[tuple[int, int], list[tuple[int, int]]] = {pair: [] for pair in pairs}
    for pair, after in pairs.items():
        for each in after:
            back[each].append(pair)
    same = [(state, state) for state in loop]
    ahead, behind = _reached(pairs, same), _reached(back, same)
    return any(a != b for a, b in ahead & behind)


def _common_word(automaton: _Automaton, one: frozenset[int], other: frozenset[int]) -> str:
    """A text that goes around the one loop and the other, and leads from the one to the other."""
    words = (_divided(automaton, one, other, p, q) for p in one for q in other)
    return next(filter(None, words), "")


def _divided(
    automaton: _Automaton, one: frozenset[int], other: frozenset[int], p: int, q: int
) -> str:
    follow, reads = automaton.follow, automaton.reads
    seen = {(p, p, q)}
    todo = [(p, p, q, "")]
    for a, b, c, text in todo:  # it grows
        for a2 in follow[a]:
            for c2 in follow[c] if a2 in one else ():
                both = reads[a2] & reads[c2] if c2 in other else 0
                for b2 in follow[b] if both else ():
                    if both & reads[b2] and (a2, b2, c2) not in seen:
                        longer = text + automaton.example(both & reads[b2])
                        if (a2, b2, c2) == (p, q, q):
                            return longer
                        seen.add((a2, b2, c2))
                        todo.append((a2, b2, c2, longer))
    return ""
