from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from hvdenv.base.errors import RecipeError
from hvdenv.base.schema import KeyPath, Pattern, Problem, decode, line_of, parse_toml
from hvdenv.cli.main import main
from hvdenv.cli.show import recipe_schema
from hvdenv.model import recipe as recipes
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe_files import shipped_recipes
from tests.support.files import write

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

# Right and wrong clauses alike, from what clauses are made of.
CLAUSES = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["~=", "==", "!=", "<=", ">=", "<", ">", "===", "=", ""]),
        st.sampled_from(["", "1!", "!"]),
        st.sampled_from(["3", "3.1", "3.1.0", "3.", ".3", ""]),
        st.sampled_from(["", "a1", "rc2", "rc", ".post1", ".dev0", "b1.post2.dev3", "x"]),
        st.sampled_from(["", "+cpu", "+cu12.1", "+", "+a.", ".*"]),
    ),
)


@given(st.lists(CLAUSES, min_size=1, max_size=2).map(",".join))
@settings(max_examples=250)
def test_every_specifier_that_a_recipe_may_hold_is_one(specifier: str) -> None:
    try:
        decode(recipes.Specifier, specifier)
    except Problem:
        return
    SpecifierSet(specifier)


@pytest.mark.parametrize(
    "text", ["", "~=3", ">=3.*", "==3..1", "3.1", ">= 3", "==1.0;x", "~=1.dev0", ">=1,"]
)
def test_what_is_no_specifier(text: str) -> None:
    with pytest.raises(Problem):
        decode(recipes.Specifier, text)


class Inner(NamedTuple):
    flag: bool
    number: int = 1


class Outer(NamedTuple):
    inner: Inner
    names: tuple[str, ...]
    mode: Literal["a", 1] = "a"
    either: Annotated[str, Pattern("[a-z]+", "letters")] | tuple[Inner, ...] = "x"
    rest: dict[str, int] | None = None


GOOD: dict[str, Any] = {"inner": {"flag": True}, "names": ["x"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inner": {"flag": 1}}, "inner.flag: expected true or false, found 1"),
        ({"rest": {"k": True}}, "rest.k: expected a whole number, found true"),
        ({"rest": {"k": 1.0}}, "rest.k: expected a whole number, found 1.0"),
        ({"mode": True}, 'mode: expected one of "a", "1", found true'),
        ({"mode": 1.0}, 'mode: expected one of "a", "1", found 1.0'),
        ({"mode": ["a"]}, 'mode: expected one of "a", "1"'),
        ({"either": "X"}, "either: expected letters, found 'X'"),
        ({"either": 2.1}, "either: expected a string, found 2.1 (put it in quotes)"),
        ({"rest": []}, "rest: expected a table, found []"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], said: str) -> None:
    """Recipes in tests/cases/recipes.toml show the rest."""
    assert decode(Outer, GOOD) == Outer(Inner(True), ("x",))
    with pytest.raises(Problem) as caught:
        decode(Outer, {**GOOD, **change})
    assert str(caught.value).startswith(said)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(Problem, match="^expected a table, found ") as caught:
        decode(Outer, "x" * 1000)
    assert len(str(caught.value)) < 140


LINES = '''\
# a comment with [ = " and a line separator \u2028 and \x85
a = {b = {}}  # [x]
c.d = 1
e.f = 1
"e"."g h" = 2
text = """
x = [
"# = [ \\""""  # of several lines
[t]
x = [
 1, # = [
 "]",
]
[[l]]
y = '"]'
[[l]]
y = 2
[l.'m.n']
z = 1
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("a",), 2),
        (("a", "b", "no"), 2),
        (("c",), 3),
        (("c", "d"), 3),
        (("e", "f"), 4),
        (("e", "g h"), 5),
        (("text",), 6),
        (("t",), 9),
        (("t", "x", 2), 10),
        (("l", 0), 14),
        (("l", 0, "y"), 15),
        (("l", 1), 16),
        (("l", 1, "y"), 17),
        (("l", 1, "m.n"), 18),
        (("l", 1, "m.n", "z"), 19),
        (("no",), 1),
    ],
)
def test_the_line_that_is_found_holds_the_key(path: KeyPath, line: int) -> None:
    parse_toml(LINES)
    assert line_of(LINES, path) == line


@pytest.mark.parametrize(
    "value",
    ["[\n" + f"{'1,' * 20}\n" * 5000 + "]", '"""\n' + f"{'= [ ' * 20}\n" * 5000 + '"""'],
)
def test_a_statement_of_many_lines_takes_no_long_time(value: str) -> None:
    """As in a lock, or in a file that is meant to hold hvdenv up."""
    started = time.process_time()
    assert line_of(f"a = {value}\nb = 1\n", ("b",)) == 5003
    assert time.process_time() - started < 5


# ---------------------------------------------------------------- recipes

CASES = parse_toml((Path(__file__).parents[1] / "cases/recipes.toml").read_text(encoding="utf-8"))
BASE = CASES.pop("base")
SHIPPED = sorted(shipped_recipes())


def text_of(case: dict[str, Any]) -> str:
    """The recipe of a case."""
    text: str = case.get("text", BASE + case.get("end", ""))
    last = 'status = "documented"\n'
    edits = {last: last + case["top"] + "\n"} if "top" in case else case.get("edits", {})
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


TOO_DEEP = {"text": f"format = 1\nsummary = {'[' * 2000}", "says": "not valid TOML: it is nested"}


@pytest.mark.parametrize("case", [*CASES.values(), TOO_DEEP], ids=[*CASES, "too-deep"])
def test_a_wrong_recipe_is_refused_with_file_line_and_key(
    case: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "case.toml", text := text_of(case))
    variants = ["chosen"] if "variants.chosen" in text else []
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), variants=variants)
    said = str(caught.value)
    assert said.startswith(f"{path}:")
    assert said.removeprefix(f"{path}:").lstrip().startswith(case["says"])


WRONG = """\
format = 1
name = "wrong"
extends = "local"
status = "testd"
colour = 3

[python]
versoin = ">=3.10"

[horovod]
frameworks = ["torchh"]

[variants.a]
python.verzion = "3"
horovod.gpu = 3

[variants."B"]

[variants.c]
without = 3

[variants.d.variants.e]
"""
EXPECTED = """\
4: status: expected one of "tested", "documented", "decommissioned", found 'testd'; did you mean "tested"?
5: colour: unknown key; known are
8: python.versoin: unknown key; did you mean "version"?
11: horovod.frameworks[0]: expected one of "tensorflow", "torch", found 'torchh'; did you mean "torch"?
14: variants.a.python.verzion: unknown key; did you mean "version"?
15: variants.a.horovod.gpu: expected a table, found 3
17: variants.B: expected a name of a-z, 0-9, _ and -, found 'B'
20: variants.c.without: expected a list, found 3
22: variants.d.variants: unknown key"""


WRONG_AS_A_WHOLE = """\
format = 1
name = "whole"
extends = "local"
status = "testd"

[python]
provider = "conda"

[partitions.gpu.v100]
cores = 3

[packages]
ruamel.yaml = ">=0.17"

[job]
partition = "gpus"

[horovod]
sha256 = ""
"""
EXPECTED_AS_A_WHOLE = """\
1: conda: the provider "conda" needs a table [conda] with channels
4: status: expected one of "tested", "documented", "decommissioned", found 'testd'; did you mean "tested"?
9: partitions.gpu.v100: unknown key; a name with a dot needs quotes: partitions."gpu.v100"
13: packages.ruamel: expected a string, found {'yaml': '>=0.17'}; a name with a dot needs quotes: packages."ruamel.yaml"
16: job.partition: there is no [partitions.gpus]; did you mean "gpu"?
19: horovod.sha256: the provider "source" needs the sha256 of Horovod's source archive"""


# What no single value shows, in a recipe that is right otherwise.
EMPTY = 'format = 1\nname = "w"\nextends = "local"\n[horovod]\nframeworks = []\ncontrollers = []\n'
EXPECTED_OF_EMPTY = "5: horovod.frameworks: at least\n6: horovod.controllers: at least"


@pytest.mark.parametrize(
    ("text", "found"),
    [(WRONG, EXPECTED), (WRONG_AS_A_WHOLE, EXPECTED_AS_A_WHOLE), (EMPTY, EXPECTED_OF_EMPTY)],
)
def test_all_errors_of_a_recipe_are_reported_at_once(text: str, found: str, tmp_path: Path) -> None:
    path = write(tmp_path / "wrong.toml", text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    *lines, remedy = str(caught.value).split("\n")
    expected = found.split("\n")
    assert remedy == f"what to do: fix these {len(expected)} errors"
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(f"{path}:{start}")


def test_at_most_twenty_errors_are_reported(tmp_path: Path) -> None:
    keys = "".join(f"x{number} = 1\n" for number in range(50))
    path = write(tmp_path / "wrong.toml", f'format = 1\nname = "w"\nextends = "local"\n{keys}')
    with pytest.raises(RecipeError, match="at most 20 at a time") as caught:
        load_recipe(str(path))
    assert str(caught.value).count("unknown key") == 20


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("/proc/self/mem", "Input/output error"),  # unreadable for the superuser, too
        ("/", "it is a directory, not a regular file"),
        (f"./{'x' * 300}.toml", "File name too long"),
    ],
)
def test_a_recipe_that_cannot_be_read(name: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=f"{Path(name)}: cannot read this file: {reason}"):
        load_recipe(name)


def test_a_recipe_that_is_not_utf8(tmp_path: Path) -> None:
    (path := tmp_path / "latin.toml").write_bytes(b'format = 1\nsummary = "\xe9"\n')
    with pytest.raises(RecipeError, match=f"{path}: cannot read this file: it is not UTF-8"):
        load_recipe(str(path))


@pytest.fixture(scope="module")
def json_schema() -> Draft202012Validator:
    """What `hvdenv show --schema` prints."""
    from jsonschema import Draft202012Validator  # two seconds

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(["show", "--schema"]) == 0
    schema = json.loads(shown.getvalue())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_fit_the_json_schema(name: str, json_schema: Draft202012Validator) -> None:
    document = parse_toml(shipped_recipes()[name].read_text(encoding="utf-8"))
    json_schema.validate(document)


# What a schema can say.
@pytest.mark.parametrize(
    "case",
    "wrong-type number-for-a-version unknown-key unknown-table impossible-version shell-in-name"
    " shell-in-url shell-in-flags format-unknown item-of-a-list second-table-of-a-list"
    " in-a-variant unknown-key-in-a-variant variant-is-no-table".split(),
)
def test_the_json_schema_refuses_what_hvdenv_refuses(
    case: str, json_schema: Draft202012Validator
) -> None:
    assert not json_schema.is_valid(parse_toml(text_of(CASES[case])))


def test_the_published_schema_is_the_one_of_the_code(golden: Callable[[Path, str], None]) -> None:
    published = Path(__file__).parents[2] / "docs" / "recipe.schema.json"
    golden(published, json.dumps(recipe_schema(), indent=1) + "\n")
