from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hvdenv
from hvdenv.cli.main import COMMANDS

PACKAGE = Path(hvdenv.__file__).parent

# Imports point from right to left. Modules of one layer may import each other, but not in a circle.
LAYERS = (
    ("errors", "schema", "masking", "command", "report"),
    ("recipe", "cascade", "facts", "checkbuild", "failures", "launchers", "ranks"),
    ("patches", "rules", "plan"),
    ("runner",),
    ("places", "prefixes", "journal", "buildlock", "manifest", "usage", "registry", "generations",
     "upkeep", "wheelcache", "observe", "installation", "evidence", "script"),
    ("build", "checks", "verify"),
    ("render",),
    ("cli.options", "cli.progress"),
    tuple(f"cli.{command}" for command in COMMANDS),
    ("cli.main",),
    ("__main__",),
)  # fmt: skip
RANK = {module: rank for rank, layer in enumerate(LAYERS) for module in layer}

# Prints a script about all commands, so it reads the table of them.
EXCEPTIONS = {("cli.completion", "cli.main")}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {
    name_of(path): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.name != "__init__.py" and path.parent.name != "probes"
}


def imported(path: Path) -> set[str]:
    """Modules of hvdenv that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
    return {name.removeprefix("hvdenv.") for name in found if name.startswith("hvdenv.")} & set(
        MODULES
    )


IMPORTS = {name: imported(path) for name, path in MODULES.items()}


def test_each_module_has_its_layer() -> None:
    assert set(RANK) == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    upward = {other for other in IMPORTS[module] if RANK[other] > RANK[module]}
    assert {(module, other) for other in upward} <= EXCEPTIONS


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for other in sorted(IMPORTS[module]):
                if (module, other) not in EXCEPTIONS:
                    visit(other, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("probes/*.py")), ids=lambda path: path.name)
def test_probes_stand_alone_and_are_old_python(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert imported(path) == set()
    tree = ast.parse(text, feature_version=(3, 6))
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [each.name for each in node.names] if isinstance(node, ast.Import)
            else [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    frameworks = {"horovod", "torch", "tensorflow", "mxnet", "numpy"}
    assert names <= sys.stdlib_module_names | frameworks
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
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert "subprocess" not in {each.name for each in node.names}, module
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                said = f"{node.value.id}.{node.attr}"
                assert said not in ("os.environ", "os.getenv", "os.system", "os.popen"), module


HEAVY = {
    "dataclasses", "inspect", "rich", "psutil", "packaging", "subprocess", "platformdirs", "asyncio",
    "logging", "urllib.request", "shtab", "uuid", "difflib", "tempfile", "concurrent",
}  # fmt: skip


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["recipes"], ["show", "local"]], ids=" ".join
)
def test_little_is_loaded_at_start(words: list[str]) -> None:
    program = (
        "import sys; before = set(sys.modules); from hvdenv.cli.main import main\n"
        f"try: main({words!r})\n"
        "except SystemExit: pass\n"
        "print(*sorted(set(sys.modules) - before), file=sys.stderr)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )  # fmt: skip
    loaded = set(shown.stderr.split())
    assert "hvdenv.cli.main" in loaded
    assert loaded & HEAVY == set()


def test_a_plan_loads_no_more_than_it_needs(cases: Path) -> None:
    program = (
        "import sys; from hvdenv.cli.main import main\n"
        f"main(['plan', 'local', '--facts', {str(cases / 'facts.json')!r}])\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )  # fmt: skip
    assert not {"dataclasses", "inspect", "rich", "psutil", "hvdenv.build"} & set(
        shown.stderr.split()
    )
