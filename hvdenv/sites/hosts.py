"""Lists of hosts as users, schedulers and hostfiles write them."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from hvdenv.base.errors import UsageError

# More than the largest machine has, so that a typing error does not fill the memory.
MOST_HOSTS = 20_000
MOST_SLOTS = 10_000

_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", re.ASCII)
_COMMA = re.compile(r"(?P<brackets>\[[^\]]*\]?)|,")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_REMEDY = "write names with slots, such as gpu32:4,gpu33:4"
LOCAL = ("localhost", "127.0.0.1")


class Host(NamedTuple):
    """A host, and how many ranks go there; 0 if unknown."""

    name: str
    slots: int = 0


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of an option: ``gpu32:4,gpu33:4``, ``gpu[32-33]:4`` or names without slots.

    Raises:
        UsageError: a name or a number is wrong, a host is listed twice, some have slots and
            others not, or localhost is among other hosts.
    """
    hosts: list[Host] = []
    for word in _words(text):
        names, slots = _split(word.strip())
        hosts += [Host(name, slots) for name in expand(names)]
    name, times = Counter(host.name for host in hosts).most_common(1)[0]
    if times > 1:
        remedy = f"list it once, with all its slots: {name}:2"
        raise _wrong(text, f"the host {name} is listed twice", remedy)
    if len({host.slots == 0 for host in hosts}) > 1:
        raise _wrong(text, "some hosts have slots and others not")
    return _refuse_local(hosts, "--hosts")


def expand(text: str) -> tuple[str, ...]:
    """Names in a list as Slurm writes it: ``gpu[32-33,40],login1`` or ``r[1-2]n[01-16]``.

    Raises:
        UsageError: it is not such a list, or names more hosts than any machine has.
    """
    found: list[str] = []
    for word in _words(text):
        names = [""]
        for number, part in enumerate(re.split(r"\[([^\[\]]*)\]", word)):
            # Every second part was in brackets.
            parts = _numbers(part, word) if number % 2 else [part]
            if len(found) + len(names) * len(parts) > MOST_HOSTS:
                raise _wrong(text, f"that is more than {MOST_HOSTS} hosts")
            names = [name + each for name in names for each in parts]
        found += map(_check_name, names)
    return tuple(found)


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """The hosts of a hostfile.

    Lines are ``gpu32``, ``gpu32 slots=4`` (Open MPI), ``gpu32:4`` (MPICH, Intel MPI) or
    ``gpu32 4 gpu.q@gpu32 UNDEFINED`` (Grid Engine).
    A repeated name, as in the files of PBS and LSF, has a slot for each line.

    Raises:
        UsageError: a line is none of these, there are no hosts, or localhost is among others.
    """
    slots: Counter[str] = Counter()
    counted = False
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            name, count = _split(words[0])
            given = [word.removeprefix("slots=") for word in words if word.startswith("slots=")]
            if len(words) == 4 and words[1].isdecimal():  # PE_HOSTFILE of Grid Engine
                given = [words[1]]
            count = _slots(given[0], line) if given else count
            counted = counted or bool(count) or name in slots
            slots[_check_name(name)] += count or 1
        except UsageError as error:
            where = f"{where}:{number}"
            raise UsageError(error.message, where=where, remedy=error.remedy) from error
    if not slots:
        raise UsageError("this file lists no hosts", where=where, remedy=_REMEDY)
    # With one line for each host, the slots are unknown.
    hosts = [Host(name, count if counted else 0) for name, count in slots.items()]
    return _refuse_local(hosts, where)


def short(name: str) -> str:
    """A host's name without its domain, which schedulers and users may omit."""
    return name if name.replace(".", "").isdigit() else name.split(".")[0]


def distribute(hosts: Iterable[Host], ranks: int) -> tuple[Host, ...]:
    """Put ranks on hosts as evenly as their slots allow; hosts without any are omitted."""
    free = {host.name: host.slots for host in hosts}
    turns = [(turn, name) for name, slots in free.items() for turn in range(min(slots, ranks))]
    # All hosts in turn; sorting keeps their order.
    taken = Counter(name for _, name in sorted(turns, key=lambda each: each[0])[:ranks])
    return tuple(Host(name, taken[name]) for name in free if taken[name])


def _words(text: str) -> Iterator[str]:
    """The words of a list; commas in brackets do not separate."""
    commas = [found.start() for found in _COMMA.finditer(text) if found["brackets"] is None]
    for before, after in pairwise((-1, *commas, len(text))):
        yield text[before + 1 : after]


def _refuse_local(hosts: list[Host], where: str) -> tuple[Host, ...]:
    """Refuse localhost among other hosts, since it is a different host to each of them."""
    local = [host.name for host in hosts if host.name in LOCAL]
    if local and len(hosts) > 1:
        raise UsageError(
            f"{local[0]} is a different host to each of them",
            where=where,
            remedy="write the name of this host on the network (hostname)",
        )
    return tuple(hosts)


def _split(word: str) -> tuple[str, int]:
    """A name, or a bracketed list of them, and its slots."""
    name, colon, number = word.partition(":")
    return name, _slots(number, word) if colon else 0


def _slots(number: str, word: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", number, re.ASCII) or not 0 < int(number) <= MOST_SLOTS:
        raise _wrong(word, f"{number!r} is not a number of slots")
    return int(number)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise _wrong(name, "this is not the name of a host")
    return name


def _numbers(ranges: str, word: str) -> list[str]:
    """The numbers of ``01-03,7``, as wide as they are written."""
    numbers: list[str] = []
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        if not found:
            raise _wrong(word, f"[{ranges}] is not a list of numbers")
        first, last = found[1], found[2] or found[1]
        if not 0 <= int(last) - int(first) < MOST_HOSTS:
            raise _wrong(word, f"{each} is not a range of numbers")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _wrong(text: str, reason: str, remedy: str = _REMEDY) -> UsageError:
    shown = repr(text if len(text) <= 60 else text[:57] + "...")
    return UsageError(f"{shown}: {reason}", where="--hosts", remedy=remedy)
