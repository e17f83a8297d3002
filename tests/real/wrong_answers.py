"""Run by an environment's Python: answers that look right have to differ from the right ones.

usage: python wrong_answers.py FOLDER_OF_PROBES

For every case of allreduce.py and of the exercise ``collectives``, with several numbers of ranks, this takes
what a bad Horovod could give instead. It prints how many kinds of wrong answers it tried.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy  # the environment has it

sys.path.insert(0, sys.argv[1])
allreduce = importlib.import_module("allreduce")
cases = importlib.import_module("collective_cases")

SIZES = (2, 3, 7)
LARGE = 50_000  # elements
ENOUGH = 12  # elements: in fewer, a wrong number can be the right one by chance


def others(case: Any, rank: int, size: int, want: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Wrong answers: what they are, and the first array of them."""
    members, rest = case.members(size), want[1:]
    first = want[0]
    yield "a tensor less", rest
    if cases.bounds(case, size) == (0.0, 0.0):
        yield "one more", [~first if case.dtype == "bool" else first + 1, *rest]
    if case.reduce in ("Sum", "Average"):
        inputs = [cases.inputs_of(numpy, case, each, size)[0].astype("float64") for each in members]
        sums = {
            "without a rank": sum(inputs[1:], 0 * inputs[0]),
            "a rank twice": sum(inputs, inputs[0]),
        }
        sums["only itself"] = inputs[members.index(rank)]
        sums["the largest"] = numpy.maximum.reduce(inputs)
        scale = 1 / (len(members) if case.reduce == "Average" else 1)
        for name, total in sums.items():
            part = cases.part(total, rank, members) if case.kind == "reducescatter" else total
            with numpy.errstate(invalid="ignore"):  # some are too large for the type
                wrong = (part * scale).astype(first.dtype)
            yield name, [wrong, *rest]
    elif case.kind == "broadcast":
        other = members[(members.index(members[case.root]) + 1) % len(members)]
        yield "from another root", cases.inputs_of(numpy, case, other, size)
    elif not case.reduce:
        yield "in another order", [first[::-1], *rest]
        yield "shifted", [numpy.roll(first, 1), *rest]


def is_the_same(one: list[Any], two: list[Any]) -> bool:
    """Whether these are the same arrays after all."""
    return len(one) == len(two) and all(
        a.dtype == b.dtype and numpy.array_equal(a, b) for a, b in zip(one, two, strict=True)
    )


def shows_a_rank(case: Any, size: int) -> bool:
    """Whether one rank counts for more than rounding may: sums show it where averages cannot."""
    terms = len(case.members(size))
    return case.reduce != "Average" or bool(
        cases.limit(case, terms) / terms > 8 * cases.bounds(case, size)[1]
    )


def try_case(case: Any, size: int) -> Iterator[str]:
    """The names of all wrong answers to a case, each of which was found to be wrong."""
    rank = case.members(size)[len(case.members(size)) // 2]
    want = cases.expected(numpy, case, rank, size)
    types = [kind or "any" for kind in cases.types(case, want)]
    typed = list(zip(types, want, strict=True))
    assert cases.problem(numpy, case, rank, size, typed) == "", case
    if want[0].size < ENOUGH or not shows_a_rank(case, size):
        return
    for name, arrays in others(case, rank, size, want):
        if is_the_same(arrays, want):
            continue
        got = list(zip(types[: len(arrays)], arrays, strict=True))
        assert cases.problem(numpy, case, rank, size, got), (size, name, case)
        yield f"{case.kind} {case.reduce} {name}"
    if types[0] != "any":
        got = [("int16", want[0]), *typed[1:]]
        assert (
            cases.problem(numpy, case, rank, size, got) == f"its type is int16, expected {types[0]}"
        )
        yield f"{case.kind} of another type"


def main() -> None:
    tried: set[str] = set()
    for size in SIZES:
        for case in allreduce.CASES:
            tried.update(try_case(case, size))
        for operation, batches in cases.operations(size):
            if operation == "forked processes":
                continue
            for case in (case for batch in batches for case in batch):
                # Large messages are judged as others are: one number of ranks is enough.
                if size == 2 or max(map(cases.elements, case.shapes)) < LARGE:
                    tried.update(try_case(case, size))
    print(len(tried))


main()
