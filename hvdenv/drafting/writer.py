"""Writes a draft as TOML, with the origin of each value in a comment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tomlkit

from hvdenv.drafting.draft import Choice, Draft
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
    parts = [_head(draft, sources), _line("format", 1), _line("name", draft.name)]
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
    for table in sorted(tables, key=_table_order):
        lines = [*_values(draft, table), *map(_comment, left_lines(tables[table]))]
        empty = all(line.startswith("#") for line in lines)
        parts += [*_heading(table, empty=empty), *lines]
    partition = find(draft.values, "job.partition")
    nodes = ("partitions", str(partition.value) if partition else "")
    if partition and not any(each.key[:2] == nodes for each in draft.values):
        parts += [*_heading(nodes), "# cores, gpus, memory_gb and max_time of its nodes"]
    for title, of_list in lists.items():
        parts += [f"\n# {title}:", *(_comment(f"  {line}") for line in left_lines(of_list))]
    return "\n".join(parts) + "\n"


def _head(draft: Draft, sources: Sequence[str]) -> str:
    lines = [f"Drafted by hvdenv init from {', '.join(sources)}.", "Each value names its source."]
    if any(each.table == OTHER_WAY for each in draft.left):
        lines.append("The page describes several ways to an environment. This is the first one.")
    if draft.missing:
        lines += ["", "Missing:"]
        lines += [f"  {'.'.join(each.key)}: {each.needs}" for each in draft.missing]
    if draft.choices:
        lines += ["", "To choose: the sources differ. Remove the # in front of the right value."]
        lines += [f"  {choice_text(each)}" for each in draft.choices]
    return "\n".join(map(_comment, lines))


def _title(left: Left) -> str:
    if left.table == OTHER_WAY:
        return "Another way of the page"
    return "Without effect on a recipe" if left.understood else "Not understood"


def _table_order(table: Key) -> tuple[int, Key]:
    names = (".".join(table), ".".join(table[:1]))
    return min((_TABLES.index(name) for name in names if name in _TABLES), default=99), table


def _heading(table: Key, *, empty: bool = False) -> list[str]:
    name = tomlkit.key(list(table)).as_string() if table else ""
    return [f"\n{'# ' if empty else ''}[{name}]"] if table else []


def _values(draft: Draft, table: Key) -> Iterator[str]:
    """The keys of a table, its lists, and open choices as comments."""
    values = [each for each in draft.values if each.key[:-1] == table]
    choices = [each for each in draft.choices if each.values[0].key[:-1] == table]
    offered = [each for choice in choices for each in choice.values]
    for each in values:
        if not each.item:
            yield _value_line(_line(each.key[-1], each.value), each)
    for key in dict.fromkeys(each.key for each in [*values, *offered] if each.item):
        of_key = [choice for choice in choices if choice.values[0].key == key]
        yield from _list([each for each in values if each.key == key], key[-1], of_key)
    for each in offered:
        if not each.item:
            yield _value_line(f"# {_line(each.key[-1], each.value)}", each)


def _list(items: Sequence[Value], name: str, choices: Sequence[Choice]) -> Iterator[str]:
    opening = f"{tomlkit.key([name]).as_string()} = ["
    if len(items) == 1 and not choices:
        yield _value_line(f"{opening}{rendered(items[0].value)}]", items[0])
        return
    yield opening
    for each in items:
        yield _value_line(f"    {rendered(each.value)},", each)
    for choice in choices:
        for each in choice.values:
            value = str(each.value)
            label = "without it" if value.startswith(WITHOUT) else choice.key[-1]
            yield _value_line(f"    # {rendered(value.removeprefix(WITHOUT))},", each, f"{label}: ")
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
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update(value)
        return table.as_string()
    return tomlkit.item(value).as_string()


def _comment(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return f"# {' ' * indent}{shown_whole(text)}".rstrip()


def choice_text(choice: Choice) -> str:
    values = ", ".join(f"{_value_text(each.value)} ({each.origin.place})" for each in choice.values)
    return f"{'.'.join(choice.key)}: {values}"


def _value_text(value: Scalar) -> str:
    if isinstance(value, str) and value.startswith(WITHOUT):
        return f"without {rendered(value.removeprefix(WITHOUT))}"
    return rendered(value)


def left_lines(left: Iterable[Left]) -> Iterator[str]:
    reasons: dict[Origin, dict[str, None]] = {}
    for each in left:
        reasons.setdefault(each.origin, {})[each.reason] = None
    yield from (f"{origin}: {'; '.join(told)}" for origin, told in reasons.items())
