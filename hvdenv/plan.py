"""A recipe and facts make a plan: the steps of a build, as plain data."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hvdenv.command import Command
from hvdenv.errors import IncompatibleError
from hvdenv.facts import Facts, Interpreter
from hvdenv.patches import Patch, applicable
from hvdenv.recipe import ByPython, Recipe, Version

PROBES = Path(__file__).parent / "probes"

# In the place of a generation's folder while the plan's digest is computed.
PLACEHOLDER = Path("/GENERATION")

# Says how fast a step runs, not what it makes.
_NOT_IN_DIGEST = {"CMAKE_BUILD_PARALLEL_LEVEL"}

_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


Effect = Literal["", "lookup", "keep", "tidy", "manifest", "record"]


class TextFile(NamedTuple):
    """A file that a step writes before its commands run."""

    path: Path
    text: str


class Step(NamedTuple):
    """One step of a build.

    Attributes:
        name: short, unique within the plan.
        reason: why the step is there.
        commands: what it runs, in order.
        files: what it writes first.
        resets: what is removed before the step is tried again.
        effect: what hvdenv itself does in this step, after the commands:
            ``lookup`` looks for a wheel in the cache that fits what they print,
            ``keep`` keeps the wheel in the cache, ``tidy`` removes the build folder,
            ``manifest`` lists every file, ``record`` marks the generation as complete
            and points the prefix at it.
        spared_by_cache: whether a fitting wheel in the cache makes the step needless.
        installs: whether the commands add packages to the environment.
        report: what pip writes down of what it installed.
        undoes: the step that the next build goes back to when this one fails.
    """

    name: str
    reason: str
    commands: tuple[Command, ...] = ()
    files: tuple[TextFile, ...] = ()
    resets: tuple[Path, ...] = ()
    effect: Effect = ""
    spared_by_cache: bool = False
    installs: bool = False
    report: Path | None = None
    undoes: str = ""


class Plan(NamedTuple):
    """What a build does.

    Attributes:
        recipe, variants: what it is a plan of.
        python: the interpreter that the environment is made with.
        versions: exact versions that the recipe gives for that Python.
        generation: folder that the steps make.
        venv: the environment in it.
        wheel: where the compiled wheel lies until it is installed.
        variables: what programs of the environment need at run time.
        steps: in order.
        wheel_inputs: what, beside the stack, decides whether a cached wheel fits.
        digest: identifies what is built, whatever the folder.
    """

    recipe: str
    variants: tuple[str, ...]
    python: Interpreter
    versions: dict[str, Version]
    generation: Path
    venv: Path
    wheel: Path
    variables: dict[str, str]
    steps: tuple[Step, ...]
    wheel_inputs: dict[str, Any]
    digest: str


def choose_versions(recipe: Recipe, python: Interpreter) -> dict[str, Version]:
    """Exact versions of Horovod and of its frameworks for a Python.

    Raises:
        IncompatibleError: a framework has no version for it.
    """
    versions = {"horovod": recipe.horovod.version}
    for framework in recipe.horovod.frameworks:
        version = recipe.frameworks[framework].version
        found = version if isinstance(version, str) else _for_python(version, python)
        if found is None:
            raise IncompatibleError(
                f"the recipe has no {framework} version for Python {python.version}",
                where=f"frameworks.{framework}.version",
                remedy=f"name another Python with --python, or a variant without {framework}",
            )
        versions[framework] = found
    return versions


def _for_python(alternatives: tuple[ByPython, ...], python: Interpreter) -> Version | None:
    from packaging.specifiers import SpecifierSet

    return next(
        (each.value for each in alternatives if SpecifierSet(each.python).contains(python.version)),
        None,
    )


def candidates(recipe: Recipe, facts: Facts) -> tuple[Interpreter, ...]:
    """Interpreters that the recipe allows, best first."""
    from packaging.specifiers import SpecifierSet

    wanted = SpecifierSet(recipe.python.version)
    return tuple(each for each in facts.interpreters if wanted.contains(each.version))


def make_plan(
    recipe: Recipe,
    variants: tuple[str, ...],
    facts: Facts,
    python: Interpreter,
    generation: Path,
) -> Plan:
    """The plan for one machine.

    Args:
        recipe: the resolved recipe.
        variants: names of its variants, sorted.
        facts: of the machine that builds.
        python: one of candidates().
        generation: folder to build in.
    """
    versions = choose_versions(recipe, python)
    patches = applicable(versions)
    flags = horovod_variables(recipe, facts.machine)
    maker = _Steps(recipe, facts, python, versions, patches, flags, generation)
    reference = maker._replace(generation=PLACEHOLDER).all()
    return Plan(
        recipe.name,
        variants,
        python,
        versions,
        generation,
        maker.venv,
        maker.wheel_path,
        run_variables(recipe, maker.venv),
        maker.all(),
        {
            "source": recipe.horovod.sha256,
            "patches": {patch.name: _digest(patch) for patch in patches},
            "variables": flags,
        },
        _digest([_identity(step) for step in reference]),
    )


def horovod_variables(recipe: Recipe, machine: str) -> dict[str, str]:
    """Build variables: HOROVOD_WITH_* for what is asked for, HOROVOD_WITHOUT_* for the rest.

    Only the value 1 counts (Horovod 0.20 and newer compare as strings), and
    HOROVOD_WITH_GLOO is read by nothing since 0.20: Gloo is there unless refused.
    """
    variables = {}
    for framework, name in (("tensorflow", "TENSORFLOW"), ("torch", "PYTORCH"), ("mxnet", "MXNET")):
        asked = framework in recipe.horovod.frameworks
        variables[f"HOROVOD_WITH{'' if asked else 'OUT'}_{name}"] = "1"
    mpi = "mpi" in recipe.horovod.controllers
    variables[f"HOROVOD_WITH{'' if mpi else 'OUT'}_MPI"] = "1"
    if "gloo" not in recipe.horovod.controllers:
        variables["HOROVOD_WITHOUT_GLOO"] = "1"
    variables["HOROVOD_WITHOUT_NVTX"] = "1"
    # A blank, but set: unset would mean the flags of the machine that builds.
    variables["HOROVOD_BUILD_ARCH_FLAGS"] = recipe.target.arch_flags.get(machine, "") or " "
    # site-packages/horovod/FRAMEWORK -> the environment's lib, and torch's libraries.
    variables["HVDENV_INSTALL_RPATH"] = "$ORIGIN/../../../..:$ORIGIN/../../torch/lib"
    return variables


class _Steps(NamedTuple):
    """The steps, each from the same few inputs."""

    recipe: Recipe
    facts: Facts
    python: Interpreter
    versions: Mapping[str, Version]
    patches: tuple[Patch, ...]
    flags: Mapping[str, str]
    generation: Path

    @property
    def venv(self) -> Path:
        return self.generation / "venv"

    @property
    def build(self) -> Path:
        return self.generation / "build"

    @property
    def env_python(self) -> str:
        return str(self.venv / "bin" / "python")

    @property
    def compiler(self) -> str:
        return self.facts.cxx.path if self.facts.cxx else "g++"

    def all(self) -> tuple[Step, ...]:
        return (
            self.environment(),
            self.tools(),
            self.frameworks(),
            self.stack(),
            self.source(),
            self.wheel(),
            self.inspection(),
            self.installation(),
            self.activation(),
            Step(
                "tidy", "the source and the objects are not part of the environment", effect="tidy"
            ),
            Step(
                "manifest",
                "list every file, so that a purge or a change is noticed",
                effect="manifest",
                undoes="environment",
            ),
            Step(
                "record",
                "mark the generation as complete and point the prefix at it",
                effect="record",
            ),
        )

    def environment(self) -> Step:
        return Step(
            "environment",
            f"an empty environment of Python {self.python.version} ({self.python.path})",
            (self._command(self.python.path, "-m", "venv", str(self.venv)),),
            resets=(self.venv,),
        )

    def tools(self) -> Step:
        recipe = self.recipe
        packages = [f"{name}{spec}" for name, spec in sorted(recipe.build_tools.items())]
        packages += [
            f"{name}{spec}" for name, spec in sorted(recipe.packages.items()) if name != "numpy"
        ]
        if recipe.mpi and "mpi" in recipe.horovod.controllers:
            packages.append(f"{recipe.mpi.package}=={recipe.mpi.version}")
        return Step(
            "build-tools",
            "CMake, Ninja and MPI as packages, and what Horovod imports: nothing of the system's",
            (self._pip("install", "--report", str(self._report("build-tools")), *packages),),
            installs=True,
            report=self._report("build-tools"),
        )

    def frameworks(self) -> Step:
        packages, indexes = [], []
        for framework in self.recipe.horovod.frameworks:
            wanted = self.recipe.frameworks[framework]
            packages.append(f"{wanted.package}=={self.versions[framework]}")
            if wanted.cpu_index:
                indexes += ["--cpu-index", wanted.cpu_index]
        numpy = self.recipe.packages.get("numpy")
        if numpy:
            packages.append(f"numpy{numpy}")
        probe = self._probe("pip_install.py")
        command = self._command(
            self.env_python, str(probe.path), *indexes, "--",
            "--disable-pip-version-check", "--no-input",
            "--report", str(self._report("frameworks")), *packages,
        )  # fmt: skip
        return Step(
            "frameworks",
            "in one go, so that they agree on what they share",
            (command,),
            (probe,),
            installs=True,
            report=self._report("frameworks"),
        )

    def stack(self) -> Step:
        probe = self._probe("stack.py")
        return Step(
            "stack",
            "what Horovod is compiled against decides whether a cached wheel fits",
            (self._command(self.env_python, str(probe.path), self.compiler),),
            (probe,),
            effect="lookup",
        )

    def source(self) -> Step:
        version, sha256 = self.recipe.horovod.version, self.recipe.horovod.sha256
        archive = self.build / f"horovod-{version}.tar.gz"
        probe = self._probe("prepare_source.py")
        requirement = TextFile(
            self.build / "horovod.txt", f"horovod=={version} --hash=sha256:{sha256}\n"
        )
        patches = TextFile(
            self.build / "patches.json",
            json.dumps(
                [
                    {"name": patch.name, "edits": [edit._asdict() for edit in patch.edit]}
                    for patch in self.patches
                ],
                indent=1,
            )
            + "\n",
        )
        names = ", ".join(patch.name for patch in self.patches) or "none"
        return Step(
            "source",
            f"Horovod's source, its hash compared, patched: {names}",
            (
                self._pip(
                    "download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation",
                    "--require-hashes", "--dest", str(self.build), "--requirement", str(requirement.path),
                ),
                self._command(
                    self.env_python, str(probe.path), str(archive), sha256,
                    str(self.build / "source"), str(patches.path),
                ),
            ),
            (probe, requirement, patches),
            resets=(self.build / "source", archive),
            spared_by_cache=True,
        )  # fmt: skip

    def wheel(self) -> Step:
        cc = self.facts.cc.path if self.facts.cc else "gcc"
        env = (
            ("CC", cc),
            ("CXX", self.compiler),
            ("CMAKE_GENERATOR", "Ninja"),
            ("CMAKE_BUILD_PARALLEL_LEVEL", str(self.facts.cores)),
            *self.flags.items(),
        )
        return Step(
            "wheel",
            "compile without build isolation, or pip would build where no framework is",
            (
                self._pip(
                    "wheel", "--verbose", "--no-build-isolation", "--no-deps", "--no-cache-dir",
                    "--wheel-dir", str(self.build / "wheel"), str(self.build / "source"),
                    env=env,
                ),
            ),
            resets=(self.build / "wheel", self.build / "source" / "build"),
            spared_by_cache=True,
        )  # fmt: skip

    def inspection(self) -> Step:
        probe = self._probe("inspect_wheel.py")
        return Step(
            "inspection",
            "a wheel without extensions installs just as well: pip says success, so look",
            (
                self._command(
                    self.env_python,
                    str(probe.path),
                    str(self.wheel_path),
                    *self.recipe.horovod.frameworks,
                ),
            ),
            (probe,),
            effect="keep",
            undoes="stack",
        )

    def installation(self) -> Step:
        return Step(
            "installation",
            "the inspected wheel and nothing else",
            (self._pip("install", "--no-deps", "--no-index", str(self.wheel_path)),),
            installs=True,
        )

    def activation(self) -> Step:
        return Step(
            "activation",
            "a script that makes the environment the current one, without hvdenv",
            files=(TextFile(self.generation / "activate.sh", self.activate_script()),),
        )

    def activate_script(self) -> str:
        return activate_script(self.venv, run_variables(self.recipe, self.venv))

    @property
    def wheel_path(self) -> Path:
        """Where pip leaves the wheel; CPython's tags are the same for all of them."""
        tag = "cp" + "".join(self.python.version.split(".")[:2])
        name = f"horovod-{self.recipe.horovod.version}-{tag}-{tag}-linux_{self.facts.machine}.whl"
        return self.build / "wheel" / name

    def _command(self, *argv: str, env: tuple[tuple[str, str], ...] = ()) -> Command:
        return Command(argv, env)

    def _pip(self, *arguments: str, env: tuple[tuple[str, str], ...] = ()) -> Command:
        folders = (str(self.venv / "bin"), str(Path(self.compiler).parent), *_SYSTEM_PATH)
        path = ("PATH", ":".join(dict.fromkeys(folders)))
        return Command((self.env_python, *_PIP, *arguments), (path, *env))

    def _report(self, name: str) -> Path:
        """Where pip writes down URL and hash of everything that it installs."""
        return self.build / f"{name}.json"

    def _probe(self, name: str) -> TextFile:
        return TextFile(self.build / name, (PROBES / name).read_text(encoding="utf-8"))


def run_variables(recipe: Recipe, venv: Path) -> dict[str, str]:
    """What programs of the environment need at run time.

    The package of Open MPI 4 finds its files through its launchers only: a process that
    is started without one (`python train.py`) does not get through MPI_Init otherwise.
    """
    return {"OPAL_PREFIX": str(venv)} if recipe.mpi and "mpi" in recipe.horovod.controllers else {}


def activate_script(venv: Path, variables: Mapping[str, str]) -> str:
    """A POSIX shell script; works under `set -u` and without hvdenv."""
    lines = [
        "# Makes this environment the current one. Source it from sh, bash, dash or zsh:",
        f"#     . {shlex.quote(str(venv.parent / 'activate.sh'))}",
        "unset PYTHONHOME PYTHONPATH",
        f"VIRTUAL_ENV={shlex.quote(str(venv))}",
        'PATH="$VIRTUAL_ENV/bin${PATH:+:$PATH}"',
        "# Packages in ~/.local would shadow the environment's.",
        "PYTHONNOUSERSITE=1",
        *(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
        " ".join(("export VIRTUAL_ENV PATH PYTHONNOUSERSITE", *variables)),
    ]
    return "\n".join(lines) + "\n"


def _identity(step: Step) -> Any:
    """What a step does, without what does not change the result."""
    return [
        step.name,
        step.effect,
        [
            [
                command.argv,
                [pair for pair in command.env if pair[0] not in _NOT_IN_DIGEST],
            ]
            for command in step.commands
        ],
        [[str(file.path), file.text] for file in step.files],
    ]


def step_identity(step: Step) -> str:
    """Hash of what a step does; journals chain it."""
    return _digest(_identity(step))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
