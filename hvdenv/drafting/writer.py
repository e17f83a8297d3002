"""Writes a draft as TOML, with the origin of each value in a comment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tomlkit

from hvdenv.drafting.combine import Choice, Draft
from hvdenv.drafting.shell import shown, shown_whole
from hvdenv.drafting.values import WITHOUT, Key, Left, Origin, Scalar, Value

_TABLES = (
    "", "modules", "python", "conda", "conda.virtual", "conda.packages", "frameworks", "build_tools",
    "packages", "mpi", "horovod", "horovod.gpu", "target", "partitions", "job", "job.attributes",
    "launch", "launch.mca", "network", "environment.build", "environment.run", "places", "container",
)  # fmt: skip
_WIDTH = 90


def summary_of(draft: Draft) -> str:
    """One line for ``hvdenv recipes``."""
    values = {each.key: str(each.value) for each in draft.values if not each.item}
    titles = {"tensorflow": "TensorFlow", "torch": "PyTorch"}
    frameworks = [
        f"{title} {version}"
        for name, title in titles.items()
        if (version := values.get(("frameworks", name, "version")))
    ]
    horovod = f"Horovod {values.get(('horovod', 'version'), '')}".strip()
    return ", ".join([*frameworks, horovod, "a draft"])


def write(draft: Draft, sources: Sequence[str]) -> str:
    """The draft as TOML; ``sources`` are the pages and commands that it comes from."""
    parts = [_head(draft, sources), _line("format", 1), _line("name", draft.name)]
    parts += [_line("summary", summary_of(draft)), _line("status", "documented")]
    for table in _tables(draft):
        if table:
            parts.append(f"\n[{tomlkit.key(list(table)).as_string()}]")
        parts += _table(draft, table)
    if draft.partition:
        parts += [
            f"\n[{tomlkit.key(['partitions', draft.partition]).as_string()}]",
            "# cores, gpus, memory_gb, max_time of its nodes: `hvdenv init --here` asks the scheduler",
        ]
    parts += _left("Not understood", [each for each in draft.left if not each.understood])
    without = [each for each in draft.left if each.understood]
    parts += _left("Without effect on a recipe", [each for each in without if each.origin.line])
    parts += _left("Also seen on this machine", [each for each in without if not each.origin.line])
    return "\n".join(parts) + "\n"


def _head(draft: Draft, sources: Sequence[str]) -> str:
    lines = [f"Drafted by hvdenv init from {', '.join(sources)}.", "Each value names its source."]
    if draft.missing:
        lines += ["", "Missing:"]
        lines += [f"  {'.'.join(each.key)}: {each.needs}" for each in draft.missing]
    if draft.choices:
        lines += ["", "To choose: the sources differ. Remove the # in front of the right value."]
        lines += [f"  {told_choice(each)}" for each in draft.choices]
    return "\n".join(_comment(line) for line in lines)


def told_choice(choice: Choice) -> str:
    values = ", ".join(f"{told_value(each.value)} ({_where(each)})" for each in choice.values)
    return f"{'.'.join(choice.key)}: {values}"


def told_value(value: Scalar) -> str:
    if isinstance(value, str) and value.startswith(WITHOUT):
        return f"without {rendered(value.removeprefix(WITHOUT))}"
    return rendered(value)


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


def _line(key: str, value: Scalar) -> str:
    return f"{tomlkit.key([key]).as_string()} = {rendered(value)}"


def _tables(draft: Draft) -> list[Key]:
    """Tables of the draft, in the order of the shipped recipes."""
    keys = [each.key for each in draft.values]
    keys += [each.values[0].key for each in draft.choices]
    tables = {key[:-1] for key in keys}

    def place(table: Key) -> tuple[int, Key]:
        names = [name for name in _TABLES if name in (".".join(table), ".".join(table[:1]))]
        best = ".".join(table) if ".".join(table) in names else (names or [""])[0]
        return (_TABLES.index(best) if best else 0 if not table else len(_TABLES)), table

    return sorted(tables | {()}, key=place)


def _table(draft: Draft, table: Key) -> Iterator[str]:
    lists: dict[Key, list[Value]] = {}
    for each in draft.values:
        if each.key[:-1] == table and each.item:
            lists.setdefault(each.key, []).append(each)
        elif each.key[:-1] == table:
            others = [other for other in draft.overruled if other.key == each.key]
            yield _commented(_line(each.key[-1], each.value), _origins(each, others))
    open_lists = [
        choice for choice in draft.choices
        if choice.values[0].item and choice.values[0].key[:-1] == table
    ]  # fmt: skip
    for choice in open_lists:
        lists.setdefault(choice.values[0].key, [])
    for key, items in lists.items():
        yield from _list(key, items, [each for each in open_lists if each.values[0].key == key])
    for choice in draft.choices:
        if choice not in open_lists and choice.values[0].key[:-1] == table:
            for each in choice.values:
                yield _commented(f"# {_line(each.key[-1], each.value)}", _origin(each))


def _list(key: Key, items: Sequence[Value], choices: Sequence[Choice]) -> Iterator[str]:
    if len(items) == 1 and not choices:
        line = f"{tomlkit.key([key[-1]]).as_string()} = [{rendered(items[0].value)}]"
        yield _commented(line, _origin(items[0]))
        return
    yield f"{tomlkit.key([key[-1]]).as_string()} = ["
    for each in items:
        yield _commented(f"    {rendered(each.value)},", _origin(each))
    for choice in choices:
        for each in choice.values:
            text = str(each.value)
            value = each.value if isinstance(each.value, dict) else text.removeprefix(WITHOUT)
            without = "without it: " if text.startswith(WITHOUT) else f"{choice.key[-1]}: "
            yield _commented(f"    # {rendered(value)},", f"{without}{_origin(each)}")
    yield "]"


def _commented(text: str, comment: str) -> str:
    comment = shown(comment)
    room = max(_WIDTH - len(text), 30)
    return f"{text}  # {comment if len(comment) <= room else comment[: room - 3] + '...'}"


def _origin(each: Value) -> str:
    source, line, text = each.origin
    return str(each.origin) if line or not text else f"{source}: {text}"


def _where(each: Value) -> str:
    return f"{each.origin.source}:{each.origin.line}" if each.origin.line else each.origin.source


def _origins(each: Value, others: Iterable[Value]) -> str:
    told = [
        f"{rendered(other.value)} at {_where(other)}"
        for other in others
        if other.value != each.value
    ]
    return f"{_where(each)}; also {', '.join(told)}" if told else _origin(each)


def _left(title: str, left: Sequence[Left]) -> Iterator[str]:
    if not left:
        return
    yield f"\n# {title}:"
    yield from (_comment(f"  {line}") for line in told_left(left))


def told_left(left: Iterable[Left]) -> Iterator[str]:
    reasons: dict[Origin, dict[str, None]] = {}
    for each in left:
        reasons.setdefault(each.origin, {})[each.reason] = None
    yield from (f"{origin}: {'; '.join(told)}" for origin, told in reasons.items())
