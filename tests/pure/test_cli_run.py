"""`hvdenv run` and `hvdenv shell` up to the launcher, and how it starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv.base.schema import encode
from hvdenv.environments import generations, manifest
from hvdenv.model.layers import load_recipe
from hvdenv.sites.placement import influences
from tests.support.commands import Hvdenv, ended
from tests.support.environments import ONE, build
from tests.support.files import programs

ACTIVATE = 'VIRTUAL_ENV=/env; export VIRTUAL_ENV\nif [ -n "${BROKEN-}" ]; then return 1; fi\n'

RECIPE = """\
format = 1
name = "site"
extends = "local"
scheduler = "slurm"

[partitions.gpu]
gpus = 4

[job]
partition = "gpu"
nodes = 2
ranks_per_node = 4
gpus_per_node = 4

[launch]
launcher = "srun"
"""


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No allocation and no environments but those of the test."""
    for name in os.environ:
        if name.startswith(("SLURM_", "PBS_", "COBALT_", "LSB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HVDENV_HOME", str(tmp_path / "home"))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The path of a recipe."""
    path = tmp_path / "site.toml"
    path.write_text(RECIPE)
    path.chmod(0o644)
    return str(path)


@pytest.fixture
def built(recipe: str, tmp_path: Path) -> Path:
    """The prefix of an environment of it."""
    prefix = tmp_path / "home" / "envs" / "site"
    prefix.parent.mkdir(parents=True)
    environment = generations.at(prefix)
    generations.claim(environment)
    resolved = encode(load_recipe(recipe).recipe)
    build(environment, ONE, recipe="site", variants=[], resolved=resolved, variables={"A_B": "1"})
    (environment.generation(ONE) / "activate.sh").write_text(ACTIVATE)
    generations.switch(environment, ONE)
    return prefix


def dry(hvdenv: Hvdenv, line: str) -> str:
    """What a dry run prints for the arguments of a line."""
    options, _, program = line.partition(" -- ")
    return hvdenv("run", *shlex.split(options), "--dry-run", "--", *shlex.split(program)).out


# ---------------------------------------------------------------- run


def test_the_line(recipe: str, built: Path, hvdenv: Hvdenv) -> None:
    hosts = "--hosts gpu32:4,gpu33:4 --launcher mpirun"
    said = dry(hvdenv, f"{recipe} -n 8 {hosts} -x 'FOO=a b' -- python train.py '$(reboot)'")
    before = f"( . {built}/activate.sh && export FOO='a b'"
    assert said.startswith(before)
    assert " && exec mpirun -np 8 -H gpu32:4,gpu33:4 " in said
    assert " -x A_B " in said
    assert " -x FOO " in said and "a b" not in said.removeprefix(before)
    assert said.endswith(" python train.py '$(reboot)' )\n")


def test_what_modules_provide_needs_no_build(
    hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("taurus", "--variant", "module", "--set", "environment.run.A='{user} b'")
    line = dry(hvdenv, f"{shlex.join(chosen)} -- sh -c 'echo $A'")
    assert "module load modenv/ml" in line
    programs = """
        module() { LOADEDMODULES=modenv/ml:$2; LMOD_CMD=x; [ "$3" != gone ]; }
        srun() { echo "$PYTHONNOUSERSITE $LOADEDMODULES"; }
        exec() { "$@"; }
    """
    found = ended("bash", "-c", f"{programs}\n{line}")
    assert found.stdout.startswith("1 modenv/ml:Horovod/0.19.5"), found
    script = hvdenv("job", *chosen, "--submit", "--dry-run", "--", "true").out
    assert "activate.sh" not in script
    assert "hvdenv_modules || fail" in script
    assert "A=\"$(id -un)\"' b'" in script


def test_a_prefix_is_enough_and_on_the_host(
    imaged: str, recipe: str, built: Path, hvdenv: Hvdenv
) -> None:
    """Its record holds the recipe; one that names an image does not take it there."""
    said = dry(hvdenv, f"--prefix {built} --hosts a:1,b:1 -- python x.py")
    assert "srun -n 2 -N 2 --ntasks-per-node=1 -w a,b" in said
    said = dry(hvdenv, f"{imaged} --prefix {built} --launcher mpirun -- true")
    assert "singularity" not in said and str(built) in said


IMAGE = """
[modules]
load = ["openmpi/4.1.8", "singularity/3.9.7"]

[container]
runtime = "singularity"
image = "h.sif"
binds = ["/scratch"]
gpu = "nvidia"
"""


@pytest.fixture
def imaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe whose programs run in an image below the current directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "imaged.toml"
    path.write_text(RECIPE.replace('"site"', '"imaged"', 1) + IMAGE)
    path.chmod(0o644)
    return str(path)


def test_ranks_in_an_image(imaged: str, tmp_path: Path, hvdenv: Hvdenv) -> None:
    """The hosts' modules are loaded, and their mpirun starts each rank in the image."""
    said = dry(hvdenv, f"{imaged} -n 4 --hosts a:2,b:2 --launcher mpirun -- python x.py")
    assert "module load openmpi/4.1.8" in said and "module load singularity/3.9.7" in said
    assert subprocess.run(["bash", "-n", "-c", said], check=False).returncode == 0
    assert " mpirun -np 4 -H a:2,b:2 " in said and "VIRTUAL_ENV" not in said
    assert said.endswith(
        " env -u OPAL_PREFIX -u PMIX_INSTALL_PREFIX singularity exec --nv --bind /scratch"
        f" {tmp_path}/h.sif python x.py )\n"
    )


def test_an_image_has_to_be_there_and_its_launcher_reaches_no_other_host(
    imaged: str, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    by_mpirun = ("--launcher", "mpirun", "--", "true")
    said = hvdenv("run", imaged, *by_mpirun, code=125).err
    assert f"{tmp_path}/h.sif: this host has no image" in said
    assert f"hvdenv container {imaged}` writes" in said
    assert "this host has no image" in hvdenv("job", imaged, "--submit", *by_mpirun, code=2).err
    of_image = ("--launcher", "horovodrun-gloo", "--", "true")
    said = dry(hvdenv, f"{imaged} -n 2 --launcher horovodrun-gloo -- true")
    assert said.index("singularity exec") < said.index("horovodrun -np 2")
    said = hvdenv("run", imaged, "--hosts", "a:1,b:1", "--dry-run", *of_image, code=125).err
    assert "horovodrun-gloo is a program of the image" in said
    assert "a program of the image" in hvdenv("job", imaged, *of_image, code=3).err
    hvdenv("job", imaged, "--nodes", "1", *of_image)


def test_the_hosts_mpirun_is_told_what_it_reads(
    imaged: str, tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe says which Open MPI is in the image; the host has another one."""
    path = Path(imaged)
    path.write_text(path.read_text().replace("[modules]\nload", "[environment.run]\n#"))
    said = dry(hvdenv, f"{imaged} --launcher mpirun -- true")
    assert re.match(r"(\( (export OMPI_\S+ && )+exec )?mpirun -np 1 ", said)  # without modules
    for version, told in (("4.1.4", True), ("5.0.11", False)):
        folder = programs(tmp_path / version / "bin", mpirun=f"echo 'mpirun (Open MPI) {version}'")
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        said = dry(hvdenv, f"{imaged} --hosts a:1,b:1 --launcher mpirun -- true")
        assert (f" --prefix {folder.parent} " in said) == told
        assert " -x PATH " in said


def test_a_program_is_the_environments_where_mpi_comes_first(
    recipe: str, built: Path, hvdenv: Hvdenv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun --prefix puts the MPI's directory in front, and a python may lie there."""
    generation = built.resolve()
    for folder in (generation / "venv/bin", tmp_path / "mpi/bin"):
        folder.mkdir(parents=True)
        (folder / "python").touch()
    record = generation / "hvdenv.json"
    found = json.loads(record.read_text())
    found["variables"] = {"OPAL_PREFIX": str(tmp_path / "mpi")}
    record.write_text(json.dumps(found))
    hosts = f"{recipe} --hosts a:1,b:1"
    said = dry(hvdenv, f"{hosts} --launcher mpirun -- python x.py")
    assert f" --prefix {tmp_path}/mpi " in said
    assert said.endswith(f" {built}/venv/bin/python x.py )\n")
    for words in (f"{hosts} --launcher horovodrun-gloo", f"{recipe} --launcher mpirun"):
        assert dry(hvdenv, f"{words} -- python x.py").endswith(" python x.py )\n")
    said = dry(hvdenv, f"{hosts} --launcher mpirun -- sh -c true")
    assert said.endswith(" sh -c true )\n")
    said = hvdenv("job", recipe, "--launcher", "mpirun", "--", "python", "x.py").out
    assert f" {built}/venv/bin/python x.py\n" in said


def test_the_allocation_decides(
    recipe: str, built: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_by_slurm = "JOB_ID=7 JOB_NODELIST=gpu[32-33] NTASKS=8 TASKS_PER_NODE=4(x2)"
    for each in set_by_slurm.split():
        monkeypatch.setenv(f"SLURM_{each.split('=')[0]}", each.split("=")[1])
    assert "srun -n 8 --quit-on-interrupt python" in dry(hvdenv, f"{recipe} -- python x.py")
    line = dry(hvdenv, f"{recipe} --launcher horovodrun-mpi -- python x.py")
    assert " -np 8 -H gpu32:4,gpu33:4 " in line


def test_hosts_from_files(
    recipe: str, built: Path, hvdenv: Hvdenv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts"
    file.write_text("n1\nn2\n")
    options = f"{recipe} --launcher mpirun -n 4"
    said = dry(hvdenv, f"{options} --hostfile {file} -- python x.py")
    assert f"mpirun -np 4 --hostfile {file} -npernode 2 " in said
    monkeypatch.setenv("PBS_JOBID", "9")
    monkeypatch.setenv("PBS_NODEFILE", str(file))
    assert f"--hostfile {file} " in dry(hvdenv, f"{options} -- python x.py")
    file.unlink()
    assert "cannot read the host file" in hvdenv("run", recipe, "--", "true", code=125).err


def test_variables_that_change_results_can_be_dropped(
    recipe: str, built: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in influences(os.environ):
        monkeypatch.delenv(name)
    for name in ("HOROVOD_FUSION_THRESHOLD", "NCCL_ALGO", "LD_BIND_NOW"):
        monkeypatch.setenv(name, "1")
    words = f"{recipe} --launcher mpirun --hosts a:2 -x NCCL_ALGO"
    line = dry(hvdenv, f"{words} -- python x.py")
    assert "unset" not in line and "-x HOROVOD_FUSION_THRESHOLD" in line
    line = dry(hvdenv, f"{words} --clean -- python x.py")
    assert line.startswith("( unset HOROVOD_FUSION_THRESHOLD LD_BIND_NOW; . ")
    assert "-x NCCL_ALGO" in line and "-x HOROVOD_FUSION_THRESHOLD" not in line
    line = hvdenv("shell", recipe, "--clean", "--dry-run").out
    assert line.startswith("env -u HOROVOD_FUSION_THRESHOLD -u NCCL_ALGO -u LD_BIND_NOW bash ")
    said = hvdenv("run", recipe, *words.split()[1:], "-x", "NOT_SET", "--dry-run", "--", "true")
    assert "warning: -x NOT_SET: not exported by your shell" in said.err


def test_secrets_stay_off_command_lines(
    recipe: str, built: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """horovodrun writes all that it sees on command lines on other hosts."""
    monkeypatch.setenv("MY_API_KEY", "hunter2")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "debug")
    shown = f"{recipe} --launcher horovodrun-gloo -n 2"
    line = dry(hvdenv, f"{shown} -- python x.py")
    assert " -u MY_API_KEY " in line
    assert line.index("activate.sh") < line.index("MY_API_KEY")
    assert "HOROVOD_LOG_LEVEL" not in line
    for each in ("MY_API_KEY", "MY_API_KEY=hunter2"):
        refused = hvdenv("run", *shown.split(), "-x", each, "--", "true", code=125)
        assert "would show the value of MY_API_KEY" in refused.err
        assert "hunter2" not in refused.out + refused.err
    assert "HOROVOD_LOG_LEVEL" not in dry(hvdenv, f"{shown} -x HOROVOD_LOG_LEVEL -- true")
    # With the patch, it writes none.
    launcher = built / "venv/lib/python3.11/site-packages/horovod/runner/util/remote.py"
    launcher.parent.mkdir(parents=True)
    launcher.write_text("def read_variables(command): ...\n")
    assert "MY_API_KEY" not in dry(hvdenv, f"{shown} -x MY_API_KEY -- true")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("RECIPE", "no command to run"),
        ("RECIPE -n 0 -- true", "0 ranks"),
        ("RECIPE --hosts a:2,a:2 -- true", "a is listed twice"),
        ("RECIPE --hostfile /none/such -- true", "cannot read the host file"),
        ("RECIPE --launcher mpirum -- true", "unknown launcher mpirum"),
        ("RECIPE --launcher aprun -- true", "in an allocation of cobalt or pbs"),
        ("RECIPE -- true", "srun starts ranks only in an allocation of slurm"),
        ("RECIPE -x 'A B=1' -- true", "not the name of a variable"),
        ("RECIPE --prefix /none/such -- true", " --prefix /none/such\n"),
        ("--prefix /none/such -- true", "there is no environment at /none/such"),
        ("sitte -- true", "no recipe named"),
    ],
)
def test_own_failures_have_a_code_of_their_own(
    words: str, said: str, recipe: str, built: Path, hvdenv: Hvdenv
) -> None:
    captured = hvdenv("run", *shlex.split(words.replace("RECIPE", recipe)), code=125)
    assert said in captured.err
    assert captured.out == ""


def test_an_environment_that_was_not_built(recipe: str, hvdenv: Hvdenv) -> None:
    said = hvdenv("run", recipe, "--launcher", "mpirun", "--", "true", code=125).err
    assert f"hvdenv build {recipe}" in said
    assert "mpirun -np 1 " in dry(hvdenv, f"{recipe} --launcher mpirun -- true")


@pytest.mark.parametrize("named", ["recipe", "prefix"])
def test_a_damaged_environment_is_to_be_rebuilt(
    named: str, recipe: str, built: Path, hvdenv: Hvdenv
) -> None:
    record = built / "hvdenv.json"
    (built / "activate.sh").write_text("set -u\n")
    digest = manifest.write(built.resolve(), (record.name,)).digest
    record.write_text(json.dumps({**json.loads(record.read_text()), "manifest_digest": digest}))
    (built / "activate.sh").write_text("")
    words = (recipe,) if named == "recipe" else ("--prefix", str(built))
    run, shell = ("run", *words, "--", "true"), ("shell", *words)
    for command, code in ((run, 125), (shell, 125), (("module", *words), 2)):
        said = hvdenv(*command, code=code).err
        assert "files of this environment are damaged: activate.sh has 0 bytes" in said
        assert " --rebuild" in said


def test_what_is_not_there(recipe: str, built: Path, tmp_path: Path) -> None:
    """A launcher that neither the environment nor PATH has; modules that are gone."""
    fakes = {each: f'exec /usr/bin/{each} "$@"' for each in ("bash", "env")}
    path = str(programs(tmp_path / "bin", **fakes))
    words = [sys.executable, "-m", "hvdenv", "run", recipe, "--launcher", "mpirun", "--", "true"]
    missing = "mpirun is neither in the environment nor on PATH"
    for variables, said in (({"PATH": path}, missing), ({"BROKEN": "1"}, "")):
        done = subprocess.run(words, env={**os.environ, **variables}, stderr=subprocess.PIPE)
        assert done.returncode == 125
        assert said in done.stderr.decode()


# ---------------------------------------------------------------- shell


def test_shell_in_an_allocation(recipe: str, built: Path, hvdenv: Hvdenv) -> None:
    said = hvdenv("shell", recipe, "--nodes", "3", "--time", "90", "--dry-run")
    assert said.err == "allocation: 3 nodes for 01:30:00, up to 4.5 node-hours and 18 GPU-hours\n"
    assert said.out.startswith(
        "salloc -J hvdenv --time=01:30:00 -p gpu --nodes=3 --ntasks-per-node=4 --gres=gpu:4"
        " srun --interactive --preserve-env --pty "
    )
    # Each option of an allocation asks for one.
    words = "--account a --comment c --name n --ranks-per-node 2 --cpus-per-rank 8".split()
    assert hvdenv("shell", recipe, "--gpus-per-node", "2", *words, "--dry-run").out.startswith(
        "salloc -J n --time=01:00:00 --comment=c -p gpu -A a --nodes=2 --ntasks-per-node=2"
        " --cpus-per-task=8 --gres=gpu:2 srun "
    )
    assert hvdenv("shell", recipe, "--account", "a", "--dry-run").out.startswith("salloc ")


@pytest.mark.parametrize(
    "words",
    [("build",), ("verify",), ("job", "--submit"), ("job", "--to", "job.sh")],
    ids=lambda words: words[0],
)
def test_what_would_be_submitted_is_shown(
    words: tuple[str, ...], recipe: str, built: Path, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    command, *options = words
    rest = ("--", "true") if command == "job" else ("--where", "compute")
    said = hvdenv(command, recipe, *options, "--dry-run", *rest)
    assert said.out.startswith("#!/bin/bash\n#SBATCH -J hvdenv")
    assert "--dry-run" not in said.out
    assert re.search(
        r"hvdenv\S*: [12] nodes? for .*, up to .* node-hours? and .* GPU-hours", said.err
    )
    assert not (tmp_path / "home/jobs").exists() and not Path("job.sh").exists()


def test_nothing_is_submitted_that_cannot_work(
    recipe: str, tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = programs(tmp_path / "bin", env='exec /usr/bin/env "$@"')
    monkeypatch.setenv("PATH", str(fakes))
    assert (
        "there is no environment site" in hvdenv("verify", recipe, "--where", "compute", code=2).err
    )
    said = hvdenv("build", recipe, "--where", "compute", code=5).err
    assert "this machine has no Slurm: there is no sbatch on PATH" in said


def test_no_job_in_a_job_and_none_without_a_scheduler(
    recipe: str, built: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said = hvdenv("shell", recipe, "--nodes", "1", "--dry-run", code=125).err
    assert "this process already runs in job 7" in said
    assert "omit --nodes" in said
    hvdenv("shell", recipe, "--dry-run")
    assert "note: local is not built yet" in hvdenv("shell", "local", "--dry-run").err
    said = hvdenv("shell", "local", "--nodes", "1", "--dry-run", code=125).err
    assert "has no scheduler" in said


def test_the_users_start_files_are_read_first(
    recipe: str, built: Path, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    """So that they do not take PATH away."""
    (tmp_path / ".bashrc").write_text("VIRTUAL_ENV=none OWN=1\nPS1='> '\n")
    words = hvdenv("shell", recipe, "--dry-run").out
    done = subprocess.run(
        shlex.split(words),
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        input='echo "$VIRTUAL_ENV" "$PS1" "${OWN-}"; exit 7\n',
        capture_output=True,
        text=True,
        start_new_session=True,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip() == "/env (site) >  1"
