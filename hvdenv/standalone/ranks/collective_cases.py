"""The cases that collectives.py tries: inputs of each rank and expected results.

Everything is computed from a case, the number of a rank and the number of ranks, without
Horovod. ``numpy`` is a parameter. Runs on Python 3.6 and newer.
"""

import zlib
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

from context import Array, Shape

# All whole numbers up to this one are exact in a type.
EXACT = {
    "uint8": 2**8 - 1,
    "int8": 2**7 - 1,
    "int32": 2**31 - 1,
    "int64": 2**63 - 1,
    "float16": 2**11,
    "bfloat16": 2**8,
    "float32": 2**24,
    "float64": 2**53,
    "bool": 1,
}
DTYPES = tuple(EXACT)
NUMBERS = DTYPES[:-1]  # bool has no sums
# Bytes of a number.
WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
FLOATS = ("float16", "bfloat16", "float32", "float64")

ODD = (17,)
SHAPES = ((), (0,), (1,), (3, 5), (1003,), (25013,))
# Open MPI, UCX and Gloo split or switch protocols at up to 1 MiB, NCCL at its buffer of 4 MiB.
# Transports do not know types: those besides float32 need a length that is sent in pieces.
BULK_BYTES, MOST_BULK_BYTES = 2**18, 17 * 2**18
# No transport sends this much eagerly; the least size of one rank's block.
LEAST_BLOCK_BYTES = 72 * 2**10
GROUP = ((17, 2), (5, 3), (1003,))
# Rows that a rank sends, as a function of its number or, in an alltoall, of both ranks' numbers.
ROWS: Dict[str, Callable[[int], int]] = {
    "uneven rows": lambda number: number * 3 % 4,
    "rows of one": lambda number: int(number == 0),
    "no rows": lambda number: 0,
    "large rows": lambda number: 4 + number * 2 % 3,
}
# Process sets: they overlap, and each has at least two ranks but not all.
SETS: Dict[str, Callable[[int], List[int]]] = {
    "all but the last": lambda size: list(range(size - 1)),
    "all but the first": lambda size: list(range(1, size)),
    "every other": lambda size: list(range(0, size, 2)),
}
LEAST_FOR_SETS = 3  # ranks; proper subsets of two ranks are single ranks
REDUCED = ("Sum", "Average", "Min", "Max", "Product")
# The most ranks that broadcasts come from.
ROOTS = 16
# Numbers of larger tensors repeat after this prime, of which no block's size is a multiple.
PATTERN = 16411
PROCESS_SETS = "process sets"


class TooLarge(Exception):
    """A sum over so many ranks cannot be exact in the type."""


class Case(NamedTuple):
    """One call of one operation.

    Attributes:
        kind: ``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter`` or
            ``fork``.
        dtype: of the tensors.
        shapes: of the tensors, several for a grouped operation; without the first dimension
            if ``rows`` is set.
        reduce: the reduction: ``Sum`` and so on.
        rows: a name in ROWS.
        root: of a broadcast, as an index of the members.
        among: the process set, a name in SETS; empty for all ranks.
        label: distinguishes cases that are equal otherwise.
        name: of the tensors, if it is not the title (benchmarks/rounds.py).
    """

    kind: str
    dtype: str
    shapes: Tuple[Shape, ...]
    reduce: str = ""
    rows: str = ""
    root: int = 0
    among: str = ""
    label: str = ""
    name: str = ""

    @property
    def title(self) -> str:
        """The name of the case, unique among those of its kind."""
        shapes = "+".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        root = "from %d" % self.root if self.kind == "broadcast" else ""
        among = "among " + self.among if self.among else ""
        words = (self.reduce, self.dtype, shapes, self.rows, root, among, self.label)
        return " ".join(word for word in words if word)

    def members(self, size: int) -> List[int]:
        """The ranks that take part."""
        return SETS[self.among](size) if self.among else list(range(size))


def case(kind: str, dtype: str = "float32", *shapes: Shape, **more: Any) -> Case:
    """A case of one tensor, unless shapes say otherwise; reductions are sums."""
    if kind in ("allreduce", "reducescatter"):
        more.setdefault("reduce", "Sum")
    return Case(kind, dtype, shapes or (ODD,), **more)


def function_of(case: Case) -> str:
    """The name of Horovod's function."""
    return "grouped_" * (len(case.shapes) > 1) + case.kind


# Inputs.


def random_bits(numpy: Any, seed: int, count: int) -> Array:
    """Pseudo-random numbers of 64 bits, the same ones for a seed."""
    mixed = numpy.arange(min(count, PATTERN), dtype="uint64") + numpy.uint64(seed)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(factor)
    return mixed ^ (mixed >> numpy.uint64(31))


def limit(case: Case, terms: int) -> int:
    """The largest number of a rank that keeps all sums exact; raises TooLarge if there is none."""
    if case.reduce not in ("Sum", "Average"):
        return EXACT[case.dtype]
    found = EXACT[case.dtype] // terms
    if not found:
        raise TooLarge("a sum over %d ranks does not fit" % terms)
    return found


def numbers(numpy: Any, case: Case, which: int, rank: int, count: int, members: List[int]) -> Array:
    """A rank's numbers for one tensor of a case: whole numbers other than 0.

    They use the whole range in which the type is exact, which reveals computations in smaller
    types. Sums of them are exact in any order.
    """
    random = random_bits(
        numpy, (zlib.crc32(case.title.encode()) << 31) + (which << 24) + rank, count
    )
    if case.dtype == "bool":
        return (random & numpy.uint64(1)).astype("int64")
    if case.reduce == "Product":
        # A 3 and a 2 from two of the ranks, and 1 from the others: every type holds the product.
        turn = (numpy.arange(len(random)) - members.index(rank)) % len(members)
        found = numpy.where(turn == 0, 3, numpy.where(turn == 1, 2, 1))
    else:
        found = (random % numpy.uint64(limit(case, len(members)))).astype("int64") + 1
    if case.dtype == "uint8":
        return found
    return numpy.where(random >> numpy.uint64(63), -found, found)


def spread(numpy: Any, found: Array, shape: Shape, dtype: str) -> Array:
    """An array that repeats the numbers; bfloat16 is float32 until it becomes a tensor."""
    kind = "float32" if dtype == "bfloat16" else dtype
    return numpy.resize(found.astype(kind), shape)


def elements(shape: Shape) -> int:
    """The number of elements of a shape."""
    count = 1
    for length in shape:
        count *= length
    return count


def splits(case: Case, sender: int, members: Iterable[int]) -> List[int]:
    """The number of rows that a rank sends to each other one in an alltoall."""
    return [ROWS[case.rows](sender + 2 * receiver) for receiver in members]


def shape_of(case: Case, which: int, rank: int, members: List[int]) -> Shape:
    """The shape of a rank's tensor."""
    shape = case.shapes[which]
    if not case.rows:
        return shape
    if case.kind == "alltoall":
        return (sum(splits(case, rank, members)),) + shape
    return (ROWS[case.rows](rank),) + shape


def inputs_of(numpy: Any, case: Case, rank: int, size: int) -> List[Array]:
    """The arrays that a rank sends."""
    members = case.members(size)
    arrays = []
    for which in range(len(case.shapes)):
        shape = shape_of(case, which, rank, members)
        found = numbers(numpy, case, which, rank, elements(shape), members)
        arrays.append(spread(numpy, found, shape, case.dtype))
    return arrays


# Expected results.


def expected(numpy: Any, case: Case, rank: int, size: int) -> List[Array]:
    """The arrays that a rank must receive."""
    if case.kind == "fork":
        return [numpy.array(0)]
    members = case.members(size)
    if case.reduce:
        arrays = [reduced(numpy, case, which, members) for which in range(len(case.shapes))]
        return [part(each, rank, members) for each in arrays] if "scatter" in case.kind else arrays
    if case.kind == "broadcast":
        return inputs_of(numpy, case, members[case.root], size)
    # One at a time: all inputs of an alltoall would grow with the square of the ranks.
    inputs = (inputs_of(numpy, case, member, size) for member in members)
    if case.kind == "allgather":
        return [numpy.concatenate(arrays) for arrays in zip(*inputs)]
    return exchanged(numpy, case, rank, (arrays[0] for arrays in inputs), members)


def reduced(numpy: Any, case: Case, which: int, members: List[int]) -> Array:
    """The reduced array, computed in whole numbers where possible."""
    shape = case.shapes[which]
    found = [numbers(numpy, case, which, each, elements(shape), members) for each in members]
    if case.reduce == "Average":
        return numpy.resize(sum(found) / float(len(members)), shape)
    combine = {"Min": numpy.minimum, "Max": numpy.maximum, "Product": numpy.multiply}
    result = combine.get(case.reduce, numpy.add).reduce(found)
    return spread(numpy, result, shape, case.dtype)


def part(array: Array, rank: int, members: List[int]) -> Array:
    """A rank's part of a reduced array; the first ranks get one more row if it does not divide."""
    length, place = array.shape[0], members.index(rank)
    least, over = divmod(length, len(members))
    begin = place * least + min(place, over)
    return array[begin : begin + least + int(place < over)]


def exchanged(
    numpy: Any, case: Case, rank: int, inputs: Iterable[Array], members: List[int]
) -> List[Array]:
    """The array that a rank receives in an alltoall, and the number of rows from each rank."""
    place, parts, counts = members.index(rank), [], []
    for sender, array in zip(members, inputs):
        equal = [len(array) // len(members)] * len(members)
        lengths = splits(case, sender, members) if case.rows else equal
        begin = sum(lengths[:place])
        parts.append(array[begin : begin + lengths[place]].copy())
        counts.append(lengths[place])
    return [numpy.concatenate(parts), numpy.array(counts, "int32")]


def bounds(case: Case, size: int) -> Tuple[float, float]:
    """The relative and absolute error that correct values may have.

    Both are 0 where nothing is rounded. In an average of n ranks each value, each sum and the
    result may be rounded by eps / 2 of at most 2 / eps, the limit of the type. The bound is
    twice n + 2 such errors, divided by n. Averages of whole numbers are rounded by some versions
    of Horovod and truncated by others.
    """
    terms = len(case.members(size))
    if case.reduce != "Average":
        return 0.0, 0.0
    return (0.0, 2.0 * (terms + 2) / terms) if case.dtype in FLOATS else (2.0**-50, 1.0)


def types(case: Case, arrays: List[Array]) -> List[str]:
    """The expected types; empty where they are not compared."""
    if case.kind == "fork" or (case.reduce == "Average" and case.dtype not in FLOATS):
        return [""] * len(arrays)  # up to Horovod 0.19, TensorFlow's averages are floats
    if case.kind == "alltoall":
        return [case.dtype, "int32"]
    return [case.dtype] * len(arrays)


def compare(numpy: Any, got: Array, want: Array, relative: float, absolute: float) -> str:
    """What is wrong with an array; empty if nothing is."""
    if got.shape != want.shape:
        return "its shape is %s, expected %s" % (got.shape, want.shape)
    if relative == absolute == 0.0:
        wrong = got != want
    else:
        wrong = ~(abs(got.astype("float64") - want) <= absolute + relative * abs(want))
    if not wrong.any():
        return ""
    at = int(numpy.flatnonzero(wrong)[0])
    first, right = (repr(each.reshape(-1)[at].item()) for each in (got, want))
    counted = "%d of %d elements wrong" % (wrong.sum(), wrong.size)
    return "element %d is %s, expected %s (%s)" % (at, first, right, counted)


def problem(numpy: Any, case: Case, rank: int, size: int, got: List[Tuple[str, Array]]) -> str:
    """What is wrong with the results of a rank, pairs of type and array; empty if nothing is."""
    want = expected(numpy, case, rank, size)
    if case.kind == "alltoall":
        want = want[: len(got)]  # some versions do not return the numbers of rows
    if len(got) != len(want):
        return "%d tensors, expected %d" % (len(got), len(want))
    for which, (dtype, array) in enumerate(got):
        kind = types(case, want)[which]
        if kind and dtype != kind:
            return "its type is %s, expected %s" % (dtype, kind)
        wrong = compare(numpy, array, want[which], *bounds(case, size))
        if wrong:
            return wrong
    return ""


# Cases of each operation.


def typed(kind: str, dtypes: Sequence[str], **more: Any) -> List[Case]:
    """A case with one odd number of elements for each type, and all shapes for float32."""
    return [
        case(kind, dtype, shape, **more)
        for dtype in dtypes
        for shape in ((ODD, *SHAPES) if dtype == "float32" else (ODD,))
    ]


def bulky(kind: str, size: int, dtypes: Sequence[str] = NUMBERS, **more: Any) -> List[Case]:
    """A message beyond the limits of all transports for each type; that of float32 is the largest."""
    cases = []
    for number, dtype in enumerate(dtypes):
        width = WIDTHS.get(dtype, 1)
        count = (MOST_BULK_BYTES if dtype == "float32" else BULK_BYTES) // width
        if kind in ("allgather", "alltoall"):
            block = max(count // size, LEAST_BLOCK_BYTES // width)
            cases.append(case(kind, dtype, (block // 4 + 1,), rows="large rows", **more))
        elif kind == "reducescatter":
            cases.append(case(kind, dtype, (2 * size + 1, count // (2 * size) + 1), **more))
        else:
            root = {"root": number % size} if kind == "broadcast" else {}
            cases.append(case(kind, dtype, (count + 1,), **dict(root, **more)))
    return cases


def uneven(kind: str) -> List[Case]:
    """Allgathers or alltoalls with every type, and with every kind of small rows."""
    cases = [case(kind, dtype, (3,), rows="uneven rows") for dtype in DTYPES]
    return cases + [case(kind, "float32", (3,), rows=name) for name in ("rows of one", "no rows")]


def broadcasts(size: int) -> List[Case]:
    """Broadcasts of every type, and from every rank or, if there are many, from some."""
    roots = sorted({size - 1, *range(0, size, max(size // ROOTS, 1))})
    cases = [case("broadcast", "float32", (5, 3), root=root) for root in roots]
    for number, dtype in enumerate(DTYPES):
        cases += typed("broadcast", [dtype], root=roots[number % len(roots)])
    return cases


def reducescatters(size: int) -> List[Case]:
    """Reducescatters of every type; rows that do not divide, one per rank, fewer than ranks."""
    odd = (2 * size + 1, 3)
    cases = [case("reducescatter", dtype, odd) for dtype in NUMBERS]
    cases += [case("reducescatter", dtype, odd, reduce="Average") for dtype in FLOATS]
    return cases + [
        case("reducescatter", "float32", shape) for shape in ((size,), (1,), (4 * size, 5))
    ]


def groups(kind: str, size: int) -> List[Case]:
    """Grouped operations, one of them with a large tensor."""
    rows = "uneven rows" if kind == "allgather" else ""
    types = ("float32", "int64", "float16", "uint8")
    cases = [case(kind, dtype, *GROUP, rows=rows) for dtype in types]
    large = bulky(kind, size, ("float32",))
    return cases + [each._replace(shapes=(*each.shapes, (5, 3))) for each in large]


def in_sets(size: int) -> List[Case]:
    """A case of each operation, and a large one, for each process set."""
    cases = []
    for name in SETS:
        members = len(SETS[name](size))
        cases += [
            case("allreduce", "float32", (1003,), among=name),
            case("allreduce", "float64", (3, 5), reduce="Average", among=name),
            case("allgather", "int64", (3,), rows="uneven rows", among=name),
            case("broadcast", "float32", (3, 5), root=-1, among=name),
            case("alltoall", "float32", (3,), rows="uneven rows", among=name),
            case("reducescatter", "float32", (2 * members + 1, 3), among=name),
            *bulky("allreduce", members, ("float64",), among=name),
        ]
    return cases


def operations(size: int) -> List[Tuple[str, List[List[Case]]]]:
    """The operations in order: names and batches, whose cases run at the same time."""
    tried = []
    for reduce in REDUCED:
        types = DTYPES if reduce in ("Min", "Max") else NUMBERS
        large = bulky("allreduce", size, reduce=reduce)
        tried.append(("allreduce " + reduce, [typed("allreduce", types, reduce=reduce), large]))
    alltoalls = [*uneven("alltoall"), case("alltoall", "float32", (2 * size, 3))]
    return [
        *tried,
        ("grouped allreduce", [groups("allreduce", size)]),
        ("allgather", [uneven("allgather"), bulky("allgather", size, DTYPES)]),
        ("grouped allgather", [groups("allgather", size)]),
        ("broadcast", [broadcasts(size), bulky("broadcast", size, DTYPES)]),
        ("alltoall", [alltoalls, bulky("alltoall", size, DTYPES)]),
        ("reducescatter", [reducescatters(size), bulky("reducescatter", size)]),
        ("grouped reducescatter", [groups("reducescatter", size)]),
        (PROCESS_SETS, [in_sets(size)]),
        ("forked processes", [[Case("fork", "", (), label="a process forked after hvd.init()")]]),
    ]
