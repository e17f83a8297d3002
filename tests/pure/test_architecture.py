from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hvdenv

PACKAGE = Path(hvdenv.__file__).parent

# Packages, and modules that lie in none: one imports what stands before it, and what stands
# beside it; modules never import each other in a circle.
LAYERS = (
    ("errors", "libraries", "schema", "masking", "reading", "command", "reports", "standalone"),
    ("runner",),
    ("places",),
    ("trust",),
    ("model",),
    ("sites",),
    ("knowledge",),
    ("launch",),
    ("contents",),
    ("locks",),
    ("environments",),
    ("plans",),
    ("wheels",),
    ("verification",),
    ("programs",),
    ("building",),
    ("drafting",),
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


@cache
def imported(path: Path) -> set[str]:
    """Modules of hvdenv that a file imports, wherever in it."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
    return {name.removeprefix("hvdenv.") for name in found if name.startswith("hvdenv.")} & set(
        MODULES
    )


def test_every_layer_has_modules() -> None:
    packages = {module.split(".")[0] for module in MODULES}
    assert packages | {name for name in MODULES if name in RANK} == {*RANK, "cli"}


def test_imports_point_one_way() -> None:
    assert [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in imported(path)
        if rank(other) > rank(module)
    ] == []


def test_commands_import_no_other_command() -> None:
    """But for what declares their options, reads and prints."""
    assert [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in imported(path)
        if other.startswith("cli.") and RANK.get(other) is None
    ] == []


def test_arguments_stay_on_the_command_line() -> None:
    assert [
        module
        for module, path in MODULES.items()
        if not module.startswith(("cli.", "standalone."))
        and "argparse"
        in {
            each.name
            for node in nodes_of(path)
            if isinstance(node, ast.Import)
            for each in node.names
        }
    ] == []


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


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("standalone/*/*.py")), ids=lambda path: path.name
)
def test_programs_stand_alone_and_are_old_python(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert imported(path) == set()
    tree = ast.parse(text, feature_version=(3, 6))
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    frameworks = {"horovod", "torch", "tensorflow", "mxnet", "numpy"}
    others = {
        "rattler",
        "pip",
        "pkg_resources",
        "uv",
        "pytest",
        *(each.stem for each in path.parents[1].rglob("*.py")),
    }
    assert names <= sys.stdlib_module_names | frameworks | others
    assert "dataclasses" not in names
    for node in ast.walk(tree):
        assert not isinstance(node, ast.NamedExpr)
        if isinstance(node, ast.Call):
            keywords = {keyword.arg for keyword in node.keywords}
            assert not keywords & {"capture_output", "text"}, f"{path}:{node.lineno}"


def test_only_the_runner_starts_processes_and_reads_the_environment() -> None:
    """Ruff forbids it as well; this holds where nobody runs ruff."""
    for module, path in MODULES.items():
        if module == "runner":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                assert "subprocess" not in {each.name for each in node.names}, module
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                said = f"{node.value.id}.{node.attr}"
                assert said not in ("os.environ", "os.getenv", "os.system", "os.popen"), module


# What they open they have seen by other means: the null device or a file of their own, and what
# a directory's listing calls a regular file.
OPENERS = {
    "reading",
    "runner",
    "environments.manifest",
    "standalone.steps.archives",
    "wheels.wheelcache",
}


def _reads(node: ast.AST) -> bool:
    """Whether a call reads a file by its path."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("read_text", "read_bytes"):
        return True
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    owner = getattr(getattr(node.func, "value", None), "id", "")
    if name != "open" or owner in ("os", "tarfile"):
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
# which would slow a light command (rich, tomlkit, difflib, ...), and of hvdenv's own modules only
# in hvdenv/cli and hvdenv/session.
LOCAL_IMPORTS = 60
OWN_LOCAL_IMPORTS_OUTSIDE_CLI = 0


def local_imports(path: Path) -> set[tuple[str, str]]:
    """Where a file's functions import something, and from which module."""
    found = set()
    for function in nodes_of(path):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    module = getattr(node, "module", None) or node.names[0].name
                    found.add((f"{path.relative_to(PACKAGE)}:{node.lineno}", module))
    return found


def test_imports_stand_at_the_top() -> None:
    found = [each for path in PACKAGE.rglob("*.py") for each in local_imports(path)]
    own = [where for where, module in found if module.startswith("hvdenv")]
    outside = [where for where in own if not where.startswith("cli/")]
    assert len(found) <= LOCAL_IMPORTS
    assert len(outside) <= OWN_LOCAL_IMPORTS_OUTSIDE_CLI, outside


# Calls that make a type of more than four fields by position. May only go down.
POSITIONAL_CALLS = 3


def test_large_types_are_made_by_keyword() -> None:
    nodes = [node for path in PACKAGE.rglob("*.py") for node in nodes_of(path)]
    large = {
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
        and sum(isinstance(each, ast.AnnAssign) for each in node.body) > 4
    }
    calls = [
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 4
    ]
    assert sum(name in large for name in calls) <= POSITIONAL_CALLS


# What `--help` and `--version` must not load, and what no light command needs.
SLOW = {
    "dataclasses", "inspect", "rich", "psutil", "packaging", "asyncio", "logging",
    "urllib.request", "shtab", "uuid", "difflib", "tempfile", "concurrent", "jinja2", "xml",
    "cyclonedx", "packageurl", "conda_lock", "pydantic", "rattler", "yaml",
}  # fmt: skip
SLOW_LIBRARIES = {
    "rich",
    "psutil",
    "asyncio",
    "urllib.request",
    "shtab",
    "difflib",
    "jinja2",
    "cyclonedx",
    "packageurl",
    "conda_lock",
    "pydantic",
    "rattler",
    "yaml",
}


def loaded_by(*words: str) -> set[str]:
    """The modules that a command loads."""
    program = (
        "import sys; before = set(sys.modules); from hvdenv.cli.main import main\n"
        f"main({words!r})\n"
        "print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    return set(shown.stderr.split())


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        (["--help"], SLOW),
        (["--version"], SLOW),
        (["completion", "bash"], {*SLOW, "hvdenv.cli.options"}),
        (["recipes"], SLOW_LIBRARIES),
        (["show", "local"], SLOW_LIBRARIES),
    ],
)
def test_little_is_loaded_at_start(words: list[str], slow: set[str]) -> None:
    loaded = loaded_by(*words)
    assert "hvdenv.cli.main" in loaded
    assert loaded & slow == set()


def test_a_plan_loads_no_more_than_it_needs(cases: Path) -> None:
    loaded = loaded_by("plan", "local", "--facts", str(cases / "facts.json"))
    assert "hvdenv.plans.plan" in loaded
    assert not {"rich", "psutil", "conda_lock", "hvdenv.building.engine"} & loaded
