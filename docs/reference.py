"""The pages of the reference that are generated from code and data.

`make docs` runs this before Sphinx: `python -m docs.reference` writes docs/generated/, which is
not committed.
"""

from __future__ import annotations

import argparse
import inspect
import re
import shlex
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdenv.base.errors import MEANINGS
from hvdenv.base.reading import OWN, read_text
from hvdenv.base.schema import Pattern, fields, parse_toml
from hvdenv.cli.main import COMMANDS, make_parser
from hvdenv.knowledge.combinations import TriedRow, all_rows
from hvdenv.knowledge.failures import Meaning, all_failures
from hvdenv.knowledge.rules import Rule, all_rules, each_of, themes
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.model.recipe_files import shipped_recipes, variants_of
from hvdenv.reports.report import Report

FOLDER = Path(__file__).parent / "generated"
# The release that added a key, where it is later than the first.
SINCE: dict[str, str] = {}
FIRST_RELEASE = "0.1"
KINDS = {
    "cause": "A cause: the text says why.",
    "symptom": "A symptom: the text says where it stopped. Look for the cause above it.",
    "consequence": "A follow-on error: something else failed first. Look for it above.",
    "warning": "A warning: logs of successful runs contain it too.",
}


def main() -> None:
    """Write all pages; keep the time of those that did not change, for Sphinx."""
    wanted = pages()
    for path in [path for path in FOLDER.rglob("*.md") if not wanted.get(_name(path))]:
        path.unlink()
    for name, text in wanted.items():
        path = FOLDER / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _name(path: Path) -> str:
    return str(path.relative_to(FOLDER))


def pages() -> dict[str, str]:
    """Every generated page, by its path below docs/generated."""
    made = {
        "commands.md": commands(),
        "recipe-keys.md": recipe_keys(),
        "exit-codes.md": exit_codes(),
        "report-fields.md": report_fields(),
        "rules.md": rules(),
        "recipes.md": recipes(),
        "combinations.md": combinations(all_rows()),
        **failure_pages(),
    }
    return {name: f"{text.rstrip()}\n" for name, text in made.items()}


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the cells are Markdown."""
    lines = [tuple(titles), *map(tuple, rows)]
    lines.insert(1, ("---",) * len(lines[0]))
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def plain(text: str) -> str:
    """A text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    return f"``{text}``" if "`" in text else f"`{text}`"


def linked(source: str) -> str:
    return f"<{source}>" if re.fullmatch(r"https?://\S+", source) else plain(source)


def block(text: str) -> str:
    """A literal block, fenced by more backticks than the text has."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


# ---------------------------------------------------------------- commands


def commands() -> str:
    parser = make_parser()
    parts = [
        "# Commands",
        "`hvdenv COMMAND --help` prints the same in a terminal.",
        table(
            ("command", "what it does"),
            (
                (f"[`hvdenv {name}`](#hvdenv-{name})", plain(text))
                for name, text in COMMANDS.items()
            ),
        ),
    ]
    for name, command in _subcommands(parser):
        parts += [f"## hvdenv {name}", *_command(command)]
    return "\n\n".join(parts)


def _subcommands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    if parser.description:
        yield plain(parser.description)
    yield block(parser.format_usage().removeprefix("usage: ").rstrip())
    options = [
        (", ".join(map(code, _spellings(action))), plain(_help(parser, action)))
        for action in parser._actions
        if action.help != argparse.SUPPRESS and action.dest != "help"
        if not isinstance(action, argparse._SubParsersAction)
    ]
    if options:
        yield table(("argument", "meaning"), options)
    for name, action in _subcommands(parser):
        yield f"### {parser.prog} {name}"
        yield from _command(action)
    if parser.epilog:
        yield block(parser.epilog.strip())


def _spellings(action: argparse.Action) -> list[str]:
    value = action.metavar or (action.dest if not action.option_strings else "")
    if action.option_strings and action.nargs != 0 and not value:
        value = action.dest.upper()
    if action.choices is not None and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    return [f"{option} {value}".strip() for option in action.option_strings] or [str(value)]


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


# ---------------------------------------------------------------- types


def recipe_keys() -> str:
    intro = (
        "Generated from the types that read recipes (`hvdenv/model`). `NAME` stands for a name that"
        " the author chooses. [The recipe format](../reference/recipe-format.md) explains layers,"
        " variants, site files and templates; `hvdenv show --schema` prints the JSON Schema."
    )
    return "\n\n".join(["# Recipe keys", intro, *_tables(Recipe, "", since=True)])


def report_fields() -> str:
    return "\n\n".join(
        [
            "# Report fields",
            "Generated from the types in `hvdenv/reports/report.py`. [The report](../reference/report.md)"
            " explains the checks and their findings.",
            *_tables(Report, "", since=False),
        ]
    )


def _tables(kind: Any, prefix: str, *, since: bool) -> Iterator[str]:
    """A table of a type's fields, then the tables of the types below it."""
    meanings, defaults = attributes(kind), kind._field_defaults
    yield f"## {prefix.rstrip('.') or 'Top level'}"
    if prefix:
        yield plain(_about(kind))
    titles = ("key", "type", "required", "default", *(["since"] if since else []), "meaning")
    below, rows = [], []
    for name, annotation in fields(kind).items():
        inner, path = _inner(annotation, name)
        if inner:
            below.append((inner, f"{prefix}{path}."))
        # TOML has no null: there, a key is left out.
        null = " or null" if type(None) in typing.get_args(annotation) and not since else ""
        rows.append(
            (
                code(path),
                _type(annotation) + null,
                "yes" if name not in defaults else "no",
                _default(defaults.get(name)),
                *([SINCE.get(f"{prefix}{path}", FIRST_RELEASE)] if since else []),
                plain(meanings.get(name) or _about(inner)),
            )
        )
    yield table(titles, rows)
    for inner, path in below:
        yield from _tables(inner, path, since=since)


def _about(kind: Any) -> str:
    """The first paragraph of a type's docstring."""
    return (kind.__doc__ or "").split("\n\n")[0].replace("``", "") if kind else ""


def attributes(kind: Any) -> dict[str, str]:
    """What the docstring of a type says of each of its fields."""
    _, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    found = re.findall(
        r"^    ([a-z_][a-z0-9_, ]*): ((?:.+\n?(?:^     .+\n?)*))", listed, re.MULTILINE
    )
    return {
        name: " ".join(text.replace("``", "").split())
        for names, text in found
        for name in names.split(", ")
    }


def _inner(annotation: Any, name: str) -> tuple[Any, str]:
    """The record type in an annotation, if any, and how the key is written."""
    for kind in _parts(annotation):
        if typing.get_origin(kind) is dict:
            value = typing.get_args(kind)[1]
            return (value if hasattr(value, "_fields") else None), f"{name}.NAME"
        if typing.get_origin(kind) is tuple and hasattr(typing.get_args(kind)[0], "_fields"):
            return typing.get_args(kind)[0], f"{name}[]"
        if hasattr(kind, "_fields"):
            return kind, name
    return None, name


def _parts(kind: Any) -> list[Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [each for each in typing.get_args(kind) if each is not type(None)]
    return [kind]


def _type(kind: Any) -> str:
    return " or ".join(map(_one_type, _parts(kind)))


def _one_type(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return plain(inner[1].meaning if isinstance(inner[1], Pattern) else str(inner[0]))
    if origin is typing.Literal:
        return ", ".join(code(str(each)) for each in inner)
    if origin is tuple:
        return (
            f"list of: {_type(inner[0])}" if not hasattr(inner[0], "_fields") else "list of tables"
        )
    if origin is dict:
        return f"table of: {_type(inner[1])}" if not hasattr(inner[1], "_fields") else "table"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return names.get(kind, "table" if hasattr(kind, "_fields") else "value")


def _default(value: Any) -> str:
    if value is None or value in ("", (), {}) or hasattr(value, "_fields"):
        return ""
    if isinstance(value, tuple):
        return ", ".join(code(str(each)) for each in value)
    return code(str(value).lower() if isinstance(value, bool) else str(value))


def exit_codes() -> str:
    """A table that docs/reference/exit-codes.md includes."""
    return table(("code", "meaning"), ((str(each), plain(text)) for each, text in MEANINGS.items()))


# ---------------------------------------------------------------- knowledge


def rules() -> str:
    parts = [
        "# Rules",
        f"`hvdenv check` knows {len(all_rules())} incompatibilities. A rule that blocks refuses the"
        " build (exit code 3) unless you pass `--allow RULE`; warnings and notes are only printed."
        " Each rule states how sure it is: *run* (reproduced by us), *source* (read in the code),"
        " *documented*, *reported* (by others) or *general* knowledge. The last two never block.",
    ]
    for theme, about in themes().items():
        parts += [f"## {plain(about[0].upper() + about[1:])}"]
        for rule in all_rules():
            if rule.theme == theme:
                parts += [f"### {rule.id}", _rule(rule)]
    return "\n\n".join(parts)


def _rule(rule: Rule) -> str:
    applies_when = (
        "; ".join(f"{name} {' and '.join(each_of(several))}" for name, several in each.items())
        for each in rule.alternatives()
    )
    edits = [
        ", ".join(
            f"`{key} = {value}`" if value else f"remove `{key}`" for key, value in edit.items()
        )
        for edit in rule.edits
    ]
    lines = [
        f"**{rule.severity}**: {plain(rule.message.replace('{found}', '…'))}",
        f"Applies when: {', or '.join(map(code, applies_when))}",
        f"Symptom: {plain(rule.symptom)}",
        f"What to do: {plain(rule.remedy)}",
        *([f"Recipe change: {'; or '.join(edits)}"] if edits else []),
        f"Source ({rule.certainty}): {linked(rule.source)}",
    ]
    return "\n".join(f"- {line}" for line in lines)


def recipes() -> str:
    shipped = {name: load_recipe(name).recipe for name in sorted(shipped_recipes())}
    parts = [
        "# Recipes",
        "*tested*: built and verified by the tests. *documented*: written from the site's documents,"
        " not run there by us. *decommissioned*: the machine is gone; the recipe does what its"
        " documents said.",
        table(
            ("recipe", "for", "status"),
            (
                (f"[`{name}`](#{name})", plain(each.summary), each.status)
                for name, each in shipped.items()
            ),
        ),
    ]
    for name, recipe in shipped.items():
        text = read_text(shipped_recipes()[name], OWN)
        variants = variants_of(parse_toml(text))
        parts += [f"## {name}", plain(recipe.site or recipe.summary)]
        if variants:
            parts += ["Variants: " + ", ".join(map(code, variants)) + "."]
        if recipe.sources:
            parts += ["Sources:", "\n".join(f"- {linked(each)}" for each in recipe.sources)]
        if recipe.deviations:
            rows = (
                (code(each.document), plain(each.recipe), plain(each.reason))
                for each in recipe.deviations
            )
            parts += [table(("the site's document", "this recipe", "reason"), rows)]
        if recipe.notes:
            parts += [
                "\n".join(f"- {plain(each.text)} ({linked(each.source)})" for each in recipe.notes)
            ]
    return "\n\n".join(parts)


def combinations(rows: Sequence[TriedRow]) -> str:
    """The page of combinations that were tried."""
    passed = sum(row.verdict == "pass" for row in rows)
    common = set.intersection(*({*row.patches} for row in rows))
    machines = list(dict.fromkeys(map(_machine, rows)))
    commands = (f"$ {shlex.join(_build_command(row))}    # {row.name}" for row in rows)
    parts = [
        "# Combinations that were built and verified",
        f"`python benchmarks/combinations.py` tried {len(rows)} combinations of versions, each in a new"
        f" environment and, except for local-cuda, without cached wheels. {passed} of them built and passed"
        " `hvdenv verify`. `hvdenv check` names the nearest of them.",
        '"pass" means: on that machine, two ranks got correct results from every operation and the same'
        " model from a training run, with each framework under each controller. None of the machines had"
        " a GPU, so rows with CUDA are unproven. Times are from machines that were also doing other work.",
        f"Patches in all of them: {', '.join(sorted(common)) or 'none'}.",
        "Machines, by the number in the last column:",
        "\n".join(f"{number}. {each}" for number, each in enumerate(machines, 1)),
        table(
            (
                "row",
                "frameworks",
                "Python",
                "MPI",
                "CUDA",
                "Horovod",
                "further patches",
                "with",
                "over MPI",
                "over Gloo",
                "build",
                "verify",
                "date",
                "hvdenv",
                "machine",
            ),
            (_combination(row, common, machines) for row in rows),
        ),
        "## Reproduce them",
        "```console\n" + "\n".join(commands) + "\n```",
        "## What failed",
        *(_combination_failure(row) for row in rows if row.failure),
    ]
    return "\n\n".join(parts)


def _machine(row: TriedRow) -> str:
    return f"{row.system}, {row.machine}, glibc {row.glibc}, {row.compiler}"


def _build_command(row: TriedRow) -> Iterator[str]:
    yield from ("hvdenv", "build", row.base)
    for key, value in row.settings.items():
        yield from ("--set", f"{key}={value}")
    for rule in row.allow:
        yield from ("--allow", rule)


def _combination(row: TriedRow, common: set[str], machines: Sequence[str]) -> tuple[str, ...]:
    return (
        row.name,
        _versions(row.frameworks.items()),
        row.python,
        f"{row.mpi} {row.mpi_version}",
        row.cuda or "none",
        row.horovod,
        ", ".join(sorted({*row.patches} - common)) or "none",
        _versions(row.packages.items()),
        _verified(row, "mpi"),
        _verified(row, "gloo"),
        f"{row.build_seconds:.0f} s",
        f"{row.verify_seconds:.0f} s" if row.verify_seconds else "",
        row.date,
        row.hvdenv,
        str(machines.index(_machine(row)) + 1),
    )


def _versions(versions: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions)


def _verified(row: TriedRow, controller: str) -> str:
    found = [each for each in row.judged if each.controller == controller]
    if row.verdict == "not built":
        return row.verdict
    return ", ".join(f"{each.framework} {each.status}" for each in found) or "not requested"


def _combination_failure(row: TriedRow) -> str:
    assert row.failure
    cause = row.failure.cause or "unknown cause"
    name = f" [{row.failure.signature}]" if row.failure.signature else ""
    lines = block("\n".join(row.failure.lines))
    return f"### {row.name}\n\nAt {row.failure.step}: {cause}{name}.\n\n{lines}"


def failure_pages() -> dict[str, str]:
    """A page for each known cause and type of event, so that a search finds it, and lists of them."""
    known = all_failures()
    lists = {
        theme: (about, [each.id for each in known.causes if each.theme == theme])
        for theme, about in known.themes.items()
    }
    lists["events"] = (
        "what logs show, where no cause fits better",
        [each.id for each in known.events],
    )
    made = {f"errors/theme-{name}.md": _list(*each) for name, each in lists.items()}
    made |= {f"errors/{each.id}.md": _cause(each) for each in known.causes}
    made |= {f"errors/{each.id}.md": _event(each) for each in known.events}
    made["errors/index.md"] = (
        "# Error messages\n\n"
        f"`hvdenv doctor LOG` reads {len(known.events)} types of events and {len(known.causes)} causes from a log,"
        " and prints the first cause first. Search this site for the words of your error message."
        f" In a message, `{{name}}` stands for a word of the log.\n\n{_toctree(f'theme-{each}' for each in lists)}"
    )
    return made


def _list(about: str, names: Iterable[str]) -> str:
    return f"# {plain(_sentence(about))}\n\n{_toctree(names)}"


def _toctree(names: Iterable[str]) -> str:
    listed = "\n".join(names)
    return f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```"


def _sentence(text: str) -> str:
    filled = re.sub(r"\{(\w+)\}", "…", text.replace("{where}", ""))
    return filled[0].upper() + filled[1:]


def _event(event: Meaning) -> str:
    parts = [
        f"# {plain(_sentence(event.says))}",
        KINDS[event.kind],
        block("\n".join(event.texts)),
        "\n".join(f"1. {plain(each)}." for each in event.remedies),
        f"Name in hvdenv: {code(event.id)}.",
    ]
    return "\n\n".join(filter(None, parts))


def _cause(cause: Meaning) -> str:
    rules = ", ".join(f"[{each}](../rules.md#{each})" for each in cause.rules)
    conditions = [
        *(
            f"{slot} is {_listed([each] if isinstance(each, str) else each)}"
            for slot, each in cause.when.items()
        ),
        *([f"the log also has {_listed(cause.needs)}"] if cause.needs else []),
        *([f"the log does not have {_listed(cause.unless)}"] if cause.unless else []),
    ]
    inside = [
        f"1. In a log with {code(name)}: {plain(each)}."
        for name, remedies in cause.inside.items()
        for each in ([remedies] if isinstance(remedies, str) else remedies)
    ]
    parts = [
        f"# {plain(_sentence(cause.says))}",
        KINDS[cause.kind],
        block("\n".join(cause.texts)) if cause.texts else "",
        f"Of the events {_listed(cause.event)}." if cause.event else "",
        f"If {', and '.join(conditions)}." if conditions else "",
        "\n".join((*inside, *(f"1. {plain(each)}." for each in cause.remedies))),
        f"`hvdenv check` warns before a build: {rules}." if rules else "",
        f"Source ({linked(cause.source).replace(': ', '): ', 1)}. Name in hvdenv: {code(cause.id)}.",
    ]
    return "\n\n".join(filter(None, parts))


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(map(code, texts))


if __name__ == "__main__":
    main()
