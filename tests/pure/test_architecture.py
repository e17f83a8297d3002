from __future__ import annotations

import ast
import os
import sys
from functools import cache
from pathlib import Path

import pytest

import hvdenv
from tests.support import needs
from tests.support.commands import ended

PACKAGE = Path(hvdenv.__file__).parent
# Packages and some modules: each imports what is listed before it, and what is listed beside
# it; modules never import each other in a circle.
LAYERS = (
    ("base", "standalone"),
    ("model", "reports"),
    ("sites",),
    ("knowledge", "locks"),
    ("environments", "drafting"),
    ("plans", "verification"),
    ("building",),
    ("session",),
    ("cli.options", "cli.verify_report"),
    ("cli",),
    ("cli.main",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def rank(module: str) -> int:
    return RANK[module] if module in RANK else RANK[module.split(".")[0]]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


# The stand-alone programs that hvdenv imports.
SHARED = ("standalone.ranks.events", "standalone.steps.archives")
MODULES = {
    name_of(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py"
    and (path.parent.parent.name != "standalone" or name_of(path) in SHARED)
}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def modules_of(node: ast.AST) -> set[str]:
    """The modules that a statement imports, or may: `from a import b` is about a.b or a."""
    if isinstance(node, ast.Import):
        return {each.name for each in node.names}
    if isinstance(node, ast.ImportFrom):
        return {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
    return set()


@cache
def imports(path: Path) -> frozenset[str]:
    """Everything that a file imports, wherever in it."""
    levels = {node.level for node in nodes_of(path) if isinstance(node, ast.ImportFrom)}
    assert levels <= {0}, f"{path}: a relative import"
    return frozenset().union(*map(modules_of, nodes_of(path)))


def imported(path: Path) -> set[str]:
    """Modules of hvdenv that a file imports."""
    return {name.removeprefix("hvdenv.") for name in imports(path)} & set(MODULES)


def test_every_layer_has_modules() -> None:
    packages = {module.split(".")[0] for module in MODULES}
    assert packages | {name for name in MODULES if name in RANK} == {*RANK, "cli"}


def test_imports_point_one_way_and_commands_import_no_other_command() -> None:
    """But for what declares the options of commands, reads and prints."""
    pairs = [(module, other) for module, path in MODULES.items() for other in imported(path)]
    assert [pair for pair in pairs if rank(pair[1]) > rank(pair[0])] == []
    assert [pair for pair in pairs if pair[1].startswith("cli.") and pair[1] not in RANK] == []


def test_arguments_stay_on_the_command_line() -> None:
    users = {module for module, path in MODULES.items() if "argparse" in imports(path)}
    assert {each for each in users if not each.startswith(("cli.", "standalone."))} == set()


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for other in sorted(imported(MODULES[module])):
                visit(other, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


FOREIGN = "horovod torch tensorflow mxnet numpy rattler pip pkg_resources uv pytest"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("standalone/*/*.py")), ids=lambda path: path.name
)
def test_programs_stand_alone_and_are_old_python(path: Path) -> None:
    assert imported(path) == set()
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 6))
    own = {each.stem for each in path.parents[1].rglob("*.py")}
    names = {name.split(".")[0] for name in imports(path)}
    assert names <= sys.stdlib_module_names | own | {*FOREIGN.split()}
    assert "dataclasses" not in names
    for node in nodes_of(path):
        assert not isinstance(node, ast.NamedExpr)
        if isinstance(node, ast.Call):
            keywords = {keyword.arg for keyword in node.keywords}
            assert not keywords & {"capture_output", "text"}, f"{path}:{node.lineno}"


def test_only_the_runner_starts_processes_and_reads_the_environment() -> None:
    """Ruff forbids it as well; this holds where nobody runs ruff."""
    forbidden = {"os.environ", "os.getenv", "os.system", "os.popen"}
    for module in MODULES.keys() - {"base.runner"}:
        nodes = nodes_of(MODULES[module])
        used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        assert not used & forbidden, module
        assert "subprocess" not in imports(MODULES[module]), module


# What they open they have seen by other means: the null device or a file of their own, and what
# a directory's listing calls a regular file.
OPENERS = {
    "base.reading",
    "base.runner",
    "building.wheelcache",
    "environments.manifest",
    "standalone.steps.archives",
}


def _reads(node: ast.AST) -> bool:
    """Whether a call reads a file by its path."""
    if not isinstance(node, ast.Call):
        return False
    function = ast.unparse(node.func)
    if function.endswith((".read_text", ".read_bytes")):
        return True
    if function.rpartition(".")[2] != "open" or function in ("os.open", "tarfile.open"):
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    modes = {each.value for each in given if isinstance(each, ast.Constant)}
    return not modes & {"w", "wb", "a", "ab", "x", "xb"}


def test_files_are_read_by_the_one_reader() -> None:
    """It refuses devices and pipes, and bounds what is read."""
    assert [
        f"{module}: {ast.unparse(node)}"
        for module in MODULES.keys() - OPENERS
        for node in nodes_of(MODULES[module])
        if _reads(node)
    ] == []


# Only these functions import at run time: the dispatch of a command, and those that need a library
# which would slow a light command (psutil, tomlkit, difflib, ...), and of hvdenv's own modules only
# in hvdenv/cli and hvdenv/session.
LOCAL_IMPORTS = 60
# Calls that make a type of more than four fields by position. May only go down.
POSITIONAL_CALLS = 3


def test_imports_stand_at_the_top() -> None:
    found = {
        (path, node.lineno, node)
        for path in PACKAGE.rglob("*.py")
        for function in nodes_of(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(found) <= LOCAL_IMPORTS
    own = [each for each in found if any(m.startswith("hvdenv") for m in modules_of(each[2]))]
    assert [each for each in own if each[0].parent.name != "cli"] == []


def test_large_types_are_made_by_keyword() -> None:
    nodes = [node for path in PACKAGE.rglob("*.py") for node in nodes_of(path)]
    large = {
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and "NamedTuple" in map(ast.unparse, node.bases)
        and sum(isinstance(each, ast.AnnAssign) for each in node.body) > 4
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) > 4]
    assert sum(ast.unparse(call.func) in large for call in calls) <= POSITIONAL_CALLS


# What `show` and `recipes` must not load; --help, --version and completion load none of the rest
# either. Few instructions (tests/real/test_startup.py) leave room for a small module.
HEAVY = {
    *"psutil asyncio urllib.request shtab difflib jinja2 cyclonedx packageurl".split(),
    *"conda_lock pydantic rattler yaml".split(),
}
LIGHT = {
    *HEAVY,
    *"dataclasses inspect packaging logging uuid tempfile concurrent xml".split(),
    "hvdenv.cli.options",
}
LOADED = """
import sys
before = set(sys.modules)
from hvdenv.cli.main import main
main(sys.argv[1:])
print(*sys.modules.keys() - before, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        ("--help", LIGHT),
        ("--version", LIGHT),
        ("completion bash", LIGHT),
        ("recipes", HEAVY),
        ("show local", HEAVY),
        ("plan local --facts {facts}", {"psutil", "conda_lock", "hvdenv.building.engine"}),
    ],
)
def test_little_is_loaded_at_start(words: str, slow: set[str], cases: Path) -> None:
    command = words.format(facts=cases / "facts.json").split()
    said = ended(
        sys.executable,
        "-c",
        LOADED,
        *command,
        check=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    loaded = set(said.stderr.split())
    assert "hvdenv.cli.main" in loaded
    assert not loaded & slow


# ---------------------------------------------------------------- packages that tests need


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(needs.Missing, match="^needs Debian's gcc chromium$"):
        needs.need("gcc", "chromium", "python3-venv", path=str(tmp_path))


def test_the_last_line_of_make_test() -> None:
    assert needs.summary([]) == "0 tests were skipped."
    assert needs.summary(["needs root", "needs Debian's zsh"]) == (
        "2 tests were skipped. As root on Debian or Ubuntu, .ci/run packages installs what they need."
        " Some need root."
    )


def test_tests_that_ci_does_not_run_can_be_collected() -> None:
    words = ["--collect-only", "--quiet", "-p", "no:cacheprovider", "tests/optin"]
    done = ended(sys.executable, "-m", "pytest", *words, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stdout
