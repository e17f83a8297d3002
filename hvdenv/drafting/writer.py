"""Writes a draft as TOML, with the origin of each value in a comment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tomlkit

from hvdenv.drafting.draft import Draft
from hvdenv.drafting.reader import OTHER_WAY
from hvdenv.drafting.values import (
    WITHOUT,
    Key,
    Left,
    Origin,
    Scalar,
    Value,
    find,
    shown,
    shown_whole,
)

# Tables in the order of the shipped recipes.
_TABLES = (
    "", "modules", "python", "conda", "conda.virtual", "conda.packages", "frameworks", "build_tools",
    "packages", "mpi", "horovod", "horovod.gpu", "target", "partitions", "job",
    "launch", "launch.mca", "network", "environment.build", "environment.run", "places", "container",
)  # fmt: skip
_WIDTH = 90


def write(draft: Draft, sources: Sequence[str]) -> str:
    """The draft as TOML; ``sources`` are the pages and commands that it comes from."""
    head = [f"Drafted by hvdenv init from {', '.join(sources)}.", "Each value names its source."]
    for title, lines in open_points(draft).items():
        head += ["", f"{title.capitalize()}:", *(f"  {line}" for line in lines)]
    parts = [*map(_comment, head), "format = 1", _line("name", draft.name)]
    parts += [_line("summary", f"{draft.name}, a draft"), _line("status", "documented")]
    if draft.base:
        parts.append(f"{_line('extends', draft.base)}  # what this machine does not show")
    # Left lines in the tables that they are about, and in lists at the end.
    offered = [each for choice in draft.choices for each in choice.values]
    tables: dict[Key, list[Left]] = {each.key[:-1]: [] for each in (*draft.values, *offered)}
    tables[()] = []
    lists: dict[str, list[Left]] = {}
    for left in sorted(draft.left, key=lambda left: (left.understood, not left.origin.line)):
        if left.table in ("", OTHER_WAY):
            lists.setdefault(_title(left), []).append(left)
        else:
            tables.setdefault(tuple(left.table.split(".")), []).append(left)
    partition = find(draft.values, "job.partition")
    if partition:
        tables.setdefault(("partitions", str(partition.value)), [])
    for table in sorted(tables, key=_table_order):
        lines = [*_values(draft, table), *map(_comment, left_lines(tables[table]))]
        if table[:1] == ("partitions",) and not lines:
            parts += ["", _heading(table), "# cores, gpus, memory_gb and max_time of its nodes"]
        elif table:
            parts += ["", "# " * all(each[0] == "#" for each in lines) + _heading(table), *lines]
        else:
            parts += lines
    for title, of_list in lists.items():
        parts += ["", f"# {title}:", *(_comment(f"  {line}") for line in left_lines(of_list))]
    return "\n".join(parts) + "\n"


def open_points(draft: Draft) -> dict[str, list[str]]:
    """What the reader of a draft has to add and to choose, each kind with its title."""
    points = {
        "missing": [f"{'.'.join(key)}: {needs}" for key, needs in draft.missing],
        "to choose, because the sources differ (remove the # in front of one)": [
            f"{'.'.join(choice.key)}: "
            + ", ".join(f"{_choice(each)} ({each.origin.place})" for each in choice.values)
            for choice in draft.choices
        ],
    }
    return {title: lines for title, lines in points.items() if lines}


def _title(left: Left) -> str:
    if left.table == OTHER_WAY:
        return "Another way of the page; the draft follows the first"
    return "Without effect on a recipe" if left.understood else "Not understood"


def _choice(each: Value) -> str:
    out, text = _item(each)
    return f"without {text}" if out else text


def _item(each: Value) -> tuple[bool, str]:
    """Whether it is to leave an item out, and the item as TOML writes it."""
    out = str(each.value).startswith(WITHOUT)
    return out, rendered(str(each.value).removeprefix(WITHOUT) if out else each.value)


def _table_order(table: Key) -> tuple[int, Key]:
    names = (".".join(table), ".".join(table[:1]))
    return min((_TABLES.index(name) for name in names if name in _TABLES), default=99), table


def _heading(table: Key) -> str:
    return f"[{tomlkit.key(list(table)).as_string()}]"


def _values(draft: Draft, table: Key) -> Iterator[str]:
    """The keys of a table, its lists, and open choices as comments."""
    values = [(each, "") for each in draft.values if each.key[:-1] == table]
    values += [
        (each, choice.key[-1])
        for choice in draft.choices
        for each in choice.values
        if each.key[:-1] == table
    ]
    for each, choice in values:
        if not each.item:
            yield _value_line("# " * bool(choice) + _line(each.key[-1], each.value), each)
    for name in dict.fromkeys(each.key[-1] for each, _ in values if each.item):
        yield f"{tomlkit.key([name]).as_string()} = ["
        for each, choice in values:
            if each.item and each.key[-1] == name:
                out, text = _item(each)
                label = "without it" if out else choice
                yield _value_line(
                    f"    {'# ' * bool(choice)}{text},", each, f"{label}: " * bool(label)
                )
        yield "]"


def _value_line(text: str, each: Value, label: str = "") -> str:
    """A line with the origin of its value. The origin's text is cut, but never its place."""
    origin = each.origin
    comment = shown(label + ": ".join(filter(None, (origin.place, origin.text))))
    room = max(_WIDTH - len(text), len(label) + len(origin.place) + 4, 30)
    return f"{text}  # {comment if len(comment) <= room else comment[: room - 3] + '...'}"


def _line(key: str, value: Scalar) -> str:
    return f"{tomlkit.key([key]).as_string()} = {rendered(value)}"


def rendered(value: Scalar) -> str:
    """A value as TOML writes it, on one line."""
    return tomlkit.item(value).as_string()


def _comment(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return f"# {' ' * indent}{shown_whole(text)}".rstrip()


def left_lines(left: Iterable[Left]) -> Iterator[str]:
    reasons: dict[Origin, dict[str, None]] = {}
    for each in left:
        reasons.setdefault(each.origin, {})[each.reason] = None
    yield from (f"{origin}: {'; '.join(told)}" for origin, told in reasons.items())
