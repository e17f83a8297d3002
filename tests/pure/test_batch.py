from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.base.errors import UsageError
from hvdenv.base.schema import decode, parse_toml
from hvdenv.model.cluster import JOB_OPTIONS, Job, JobOf, Partition
from hvdenv.model.dialect import shipped
from hvdenv.sites.batch import (
    HOSTFILE,
    HOSTS,
    BatchJob,
    Cost,
    charged,
    check,
    cost,
    merge,
    own_job,
    own_where,
    quote,
    read_time,
    script,
    seconds,
)

CASES = Path(__file__).parents[1] / "cases" / "jobs" / "scripts"
DIALECTS = shipped()
SCHEDULERS = ("slurm", "pbs", "cobalt", "lsf", "gridengine")


class Case(NamedTuple):
    """A job of a site, and the directives that the site's documents have for it."""

    scheduler: str
    launch: tuple[str, ...]
    command: tuple[str, ...]
    site: tuple[str, ...]
    job: Job
    partition: Partition | None = None
    env: tuple[tuple[str, ...], ...] = ()


def case(name: str) -> Case:
    return decode(Case, parse_toml((CASES / f"{name}.toml").read_text()))


def batch_of(case: Case) -> BatchJob:
    return BatchJob(
        job=case.job,
        partition=case.partition,
        activate="/scratch/ann/envs/train/activate.sh",
        launch=case.launch,
        env=tuple((name, value) for name, value in case.env),
        command=case.command,
        folder="/scratch/ann/train",
    )


NAMES = sorted(path.stem for path in CASES.glob("*.toml"))


def directives(scheduler: str, text: str) -> list[list[str]]:
    """The options that a scheduler reads in a script, each as its words.

    Slurm and PBS read up to the first command, Cobalt only directly below the first
    line, LSF everywhere. Cobalt knows no quotes.
    """
    first, *lines = text.split("\n")
    assert first == "#!/bin/bash"
    prefix, found = DIALECTS[scheduler].prefix, []
    for line in lines:
        if line.startswith(f"{prefix} "):
            option = line.removeprefix(f"{prefix} ")
            found.append(option.split() if scheduler == "cobalt" else shlex.split(option))
        elif (scheduler == "cobalt") or (
            scheduler != "lsf" and line.strip() and not line.startswith("#")
        ):
            break
    return found


@pytest.mark.parametrize("name", NAMES)
def test_scripts(name: str, golden: Callable[[Path, str], None]) -> None:
    """Each has all that the site's documents write."""
    known = case(name)
    dialect = DIALECTS[known.scheduler]
    text = script(dialect, batch_of(known))
    golden(CASES / f"{name}.sh", text)
    read = subprocess.run(["bash", "-n", CASES / f"{name}.sh"], check=True, stderr=subprocess.PIPE)
    assert read.stderr == b""
    assert set(known.site) <= {
        line.removeprefix(f"{dialect.prefix} ") for line in text.splitlines()
    }
    assert len(directives(known.scheduler, text)) == text.count(dialect.prefix)
    partitions = {known.job.partition: known.partition} if known.partition else {}
    assert check(known.job, dialect, partitions) == known.partition  # type: ignore[arg-type]


# ---------------------------------------------------------------- what scripts do

PLAIN = BatchJob(job=Job(), command=("true",), folder="/")
WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
DIRECTIVE = st.sampled_from(
    ["#SBATCH -n 9", "#PBS -q x", "#COBALT -n 9", "#BSUB -n 9", "\n#SBATCH -n 9\n", "\n#PBS -q x",
     "\n#COBALT -t 1", "\n#BSUB -nnodes 100\n", "\r\n#BSUB -x", "'\n#BSUB -x", "$(touch x)", "`id`",
     "a'b\"c", "; exit 0", "\\", "{hosts}", "{hostfile}", "-n", "~", "*", "#", "$HOME", "!!"]
)  # fmt: skip
HOSTILE = DIRECTIVE | WORD


def run(text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    path = folder / "script.sh"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return subprocess.run(
        ["bash", path], capture_output=True, check=False, env={"PATH": "/usr/bin:/bin", **variables}
    )


@given(scheduler=st.sampled_from(SCHEDULERS), words=st.lists(HOSTILE, max_size=3), value=HOSTILE)
def test_nothing_that_a_user_writes_is_a_directive(
    scheduler: str, words: list[str], value: str
) -> None:
    expected = directives(scheduler, script(DIALECTS[scheduler], PLAIN))
    batch = PLAIN._replace(
        command=("python", *words),
        folder=f"/{value}",
        activate=f"/{value}",
        log=f"/{value}",
        env=(("X", value),),
        launch=("srun", *(word for word in words if word != HOSTFILE)),
    )
    assert directives(scheduler, script(DIALECTS[scheduler], batch)) == expected


@given(words=st.lists(HOSTILE, max_size=4), value=HOSTILE)
@settings(max_examples=30)
def test_words_arrive_as_they_are(
    words: list[str], value: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("job")
    batch = PLAIN._replace(
        launch=("printf", "%s\\0"),
        env=(("X", value),),
        folder=str(folder),
        command=("[", *words, "]"),
    )
    done = run(script(DIALECTS["slurm"], batch), folder, SLURM_JOB_ID="7")
    *printed, last = done.stdout.split(b"\0")
    assert printed == [word.encode() for word in batch.command]
    assert last == b"hvdenv: job 7 ended with exit code 0\n"
    assert quote("\udcff\n") == r"$'\xff\x0a'"  # which is no text
    batch = batch._replace(launch=("sh", "-c", 'printf %s "$X"'), command=())
    done = run(script(DIALECTS["slurm"], batch), folder)
    assert done.stdout.rpartition(b"hvdenv: job")[0] == value.encode()


def test_a_script_stops_where_its_folder_or_environment_is_missing(tmp_path: Path) -> None:
    text = script(DIALECTS["pbs"], PLAIN._replace(folder=f"{tmp_path}/no ne"))
    done = run(text, tmp_path, PBS_JOBID="7.x")
    assert done.returncode == 1
    assert re.search(rf"hvdenv: on \S+: cannot enter {tmp_path}/no ne\n", done.stderr.decode())
    assert done.stdout == b"hvdenv: job 7.x ended with exit code 1\n"
    activate = tmp_path / "activate.sh"
    batch = PLAIN._replace(activate=str(activate), command=("sh", "-c", 'echo "$WHO"; exit 3'))
    done = run(script(DIALECTS["slurm"], batch), tmp_path)
    assert done.returncode == 1
    assert "activate.sh did not activate the environment" in done.stderr.decode()
    activate.write_text("return 1\n")
    assert run(script(DIALECTS["slurm"], batch), tmp_path).returncode == 1
    activate.write_text("export WHO=me\n")
    done = run(script(DIALECTS["slurm"], batch), tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (3, b"me")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_the_launcher_passes_on_is_there(scheduler: str) -> None:
    batch = PLAIN._replace(exports=("PATH", "NEW", "OTHER"), launch=("env", "-u", "NEW", "-u", "x"))
    text = script(DIALECTS[scheduler], batch)
    assert re.findall("^export N.*", text, re.M) == ['export NEW="${NEW-}"']
    assert "OTHER" not in text and "export PATH" not in text
    with pytest.raises(UsageError, match="a;b"):
        script(DIALECTS[scheduler], PLAIN._replace(exports=("a;b",)))


@pytest.mark.parametrize("scheduler", ["pbs", "cobalt", "lsf"])
def test_hosts_come_from_the_scheduler(scheduler: str, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    lines = ["batch1"] if scheduler == "lsf" else []
    file.write_text("\n".join([*lines, *["n1"] * 4, *["n2"] * 4, ""]))
    words, dialect = (HOSTFILE, HOSTS), DIALECTS[scheduler]
    batch = PLAIN._replace(job=Job(ranks_per_node=4), launch=("echo", *words), command=words)
    done = run(script(dialect, batch), tmp_path, **{dialect.hostfile: str(file)})
    assert done.stdout.decode().splitlines()[0] == f"{file} n1:4,n2:4 {HOSTFILE} {HOSTS}"
    assert done.stderr == b""


# ---------------------------------------------------------------- values in directives

TEXTS = [name for name, value in Job()._asdict().items() if isinstance(value, (str, type(None)))]


@given(
    scheduler=st.sampled_from(SCHEDULERS),
    field=st.sampled_from([each for each in TEXTS if each not in ("time", "gpu_option")]),
    value=HOSTILE | st.from_regex(r"\A[A-Za-z0-9:=,+ -]{1,9}\Z"),
)
def test_no_value_adds_a_directive_or_an_option(scheduler: str, field: str, value: str) -> None:
    if field in ("cpus_per_rank", "gpus_per_node") or field in DIALECTS[scheduler].unsupported:
        return
    plain = {"memory": "1G", "select": "a=b"}.get(field, "x")

    def read(text: str) -> list[list[str]]:
        job: Any = Job()._asdict() | {field: text}
        return directives(scheduler, script(DIALECTS[scheduler], PLAIN._replace(job=Job(**job))))

    expected = read(plain)
    try:
        found = read(value)
    except UsageError:
        return
    assert [len(words) for words in found] == [len(words) for words in expected]
    different = [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
    assert len(different) <= (2 if field == "name" else 1)


@pytest.mark.parametrize(
    ("scheduler", "field", "value"),
    [
        ("slurm", "name", "x\n#SBATCH -n 9"),
        ("slurm", "memory", "1G,x"),
        ("slurm", "output", "-o"),
        ("pbs", "name", "1st"),
        ("pbs", "select", "a=b+9:c=d"),
    ],
)
def test_values_that_would_be_more_than_one(scheduler: str, field: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        script(DIALECTS[scheduler], PLAIN._replace(job=Job(**{field: value})))
    assert caught.value.where == f"job.{field}"
    assert caught.value.remedy


def test_gpus_are_asked_for_as_the_site_wants_it() -> None:
    def gpus(**values: Any) -> list[str]:
        batch = PLAIN._replace(job=Job(**values), partition=Partition(gpus=4, gpu="A100"))
        return [line for line in script(DIALECTS["slurm"], batch).splitlines() if "gpu" in line]

    assert gpus(gpus_per_node=4) == ["#SBATCH --gres=gpu:A100:4"]
    assert gpus(gpus_per_node=4, gpu_option="gpus-per-node") == ["#SBATCH --gpus-per-node=A100:4"]
    assert gpus(gpus_per_node=4, gpu_option="none") == []
    assert gpus(gpus_per_node=0) == []
    batch = PLAIN._replace(job=Job(gpus_per_node=1), partition=Partition(gpus=4, gpu="x:1,y"))
    with pytest.raises(UsageError, match="x:1,y"):
        script(DIALECTS["slurm"], batch)


# ---------------------------------------------------------------- times


@pytest.mark.parametrize(
    "text", ["1:30", "2h", "1:00:00\n", "1٢", "0", "0:00:00", "1-12", "9999999"]
)
def test_times_that_no_scheduler_gets(text: str) -> None:
    assert (read_time("90"), read_time("48:00:00")) == ("01:30:00", "2-00:00:00")
    with pytest.raises(UsageError, match="^--time: .* is not a time\n.*minutes \\(90\\)"):
        read_time(text)


@given(scheduler=st.sampled_from(SCHEDULERS), total=st.integers(1, 999 * 86400 + 86399))
def test_each_time_comes_back(scheduler: str, total: int) -> None:
    """No scheduler gets less than was asked for, nor a minute more."""
    days, rest = divmod(total, 86400)
    time = f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    assert seconds(read_time(time)) == total
    text = script(DIALECTS[scheduler], PLAIN._replace(job=Job(time=time)))
    option, *sizes = {
        "slurm": ("--time=(.*)", 86400, 3600, 60, 1),
        "pbs": ("walltime=(.*)", 3600, 60, 1),
        "cobalt": ("-t (.*)", 60),
        "lsf": ("-W (.*)", 3600, 60),
        "gridengine": ("h_rt=(.*)", 3600, 60, 1),
    }[scheduler]
    found = re.search(str(option), text)
    assert found
    numbers = [int(each) for each in re.split("[-:]", found[1])]
    asked = sum(n * int(size) for n, size in zip(numbers, sizes, strict=True))
    assert 0 <= asked - total < 60


def test_what_a_job_costs() -> None:
    assert cost(Job(nodes=4, time="06:00:00", gpus_per_node=8)) == Cost(4, 6.0, 24.0, 192.0)
    assert cost(Job(nodes=2, time="00:30:00")) == Cost(2, 0.5, 1.0, 0.0)


def test_gpus_follow_the_ranks_where_each_rank_has_one() -> None:
    job = Job(ranks_per_node=8, gpus_per_node=8)
    assert merge(job, {"ranks_per_node": 2}).gpus_per_node == 2
    assert merge(job, {"ranks_per_node": 2, "gpus_per_node": 4}).gpus_per_node == 4
    assert merge(job._replace(gpus_per_node=4), {"ranks_per_node": 2}).gpus_per_node == 4


def test_what_is_charged_is_told_in_words() -> None:
    one = Job(nodes=1, time="01:00:00", gpus_per_node=1)
    assert charged(one) == "1 node for 01:00:00, up to 1 node-hour and 1 GPU-hour"
    half = Job(nodes=1, time="00:30:00", gpus_per_node=4)
    assert charged(half) == "1 node for 00:30:00, up to 0.5 node-hours and 2 GPU-hours"
    more = charged(half._replace(directives=("--nodes=100",)))
    assert more.endswith("2 GPU-hours; job.directives may change that (--nodes=100)")


def test_the_jobs_of_hvdenv_itself_have_resources_of_their_own() -> None:
    job = Job(nodes=4, ranks_per_node=8, gpus_per_node=8, time="24:00:00", comment="pytorch")
    build, verify = own_job(job, "build"), own_job(job, "verify")
    assert (build.nodes, build.time, build.gpus_per_node) == (1, "24:00:00", 8)
    assert (verify.nodes, verify.time, verify.comment) == (2, "00:30:00", "pytorch")
    stated = job._replace(build=JobOf(gpus_per_node=0, time="08:00:00"), verify=JobOf(nodes=3))
    build, verify = own_job(stated, "build"), own_job(stated, "verify")
    assert (build.name, build.time, build.gpus_per_node) == ("hvdenv-build", "08:00:00", 0)
    assert (verify.nodes, verify.time) == (3, "00:30:00")
    assert own_where(stated, "build", str)("job.time") == "job.build.time"
    assert own_where(stated, "verify", str)("job.time") == "job.time"


# ---------------------------------------------------------------- checks

PARTITIONS = {
    "amd_a100nv_8": Partition(cores=64, gpus=8, nodes=24, memory_gb=512, max_time="2-00:00:00"),
    "cas_v100_4": Partition(cores=40, gpus=4),
    "skl": Partition(cores=20),
}


def refused(given: tuple[str, ...] = (), scheduler: str = "slurm", **values: Any) -> str:
    job = Job(partition="amd_a100nv_8")._replace(**values)
    with pytest.raises(UsageError) as caught:
        check(job, DIALECTS[scheduler], PARTITIONS, given)
    assert caught.value.remedy
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ({"partition": "amd_a100nv_4"}, "partition", 'did you mean "amd_a100nv_8"'),
        ({"gpus_per_node": 9}, "gpus_per_node", "has 8 GPUs, requested: 9"),
        ({"memory": "600G"}, "memory", "has 512 GB, requested: 600"),
        ({"memory": "1T"}, "memory", "has 512 GB, requested: 1024"),
        ({"memory": "524289M"}, "memory", "has 512 GB, requested: 513"),
        ({"nodes": 25}, "nodes", "has 24 nodes, requested: 25"),
        ({"time": "2-00:00:01"}, "time", "time limit of amd_a100nv_8 is 2-00:00:00"),
        ({"ranks_per_node": 4, "cpus_per_rank": 17}, "cpus_per_rank", "64 cores, requested: 68"),
        ({"ranks_per_node": 65}, "ranks_per_node", "has 64 cores, requested: 65"),
        ({"nodes": 0}, "nodes", "0 is too few"),
        ({"gpus_per_node": -1}, "gpus_per_node", "-1 is too few"),
        ({"time": "00:00:00"}, "time", "must not be 0"),
        ({"select": "a=b"}, "select", "Slurm does not support select"),
        ({"requires": ("comment",)}, "comment", "requires comment for every job"),
        ({"requires": ("account",)}, "account", "give --account, or set job.account"),
        ({"requires": ("acount",)}, "requires", "keys are partition, nodes"),
    ],
)
def test_what_a_site_cannot_give(values: dict[str, Any], field: str, said: str) -> None:
    in_recipe = refused(**values)
    assert said in in_recipe
    assert f"recipe: job.{field}: " in in_recipe
    assert f"--{field.replace('_', '-')}: " in refused((field,), **values)


def test_all_that_is_wrong_is_told_at_once() -> None:
    told = refused(nodes=25, gpus_per_node=9, time="3-00:00:00", select="a", requires=("qos",))
    for field in ("nodes", "gpus_per_node", "time", "select", "qos"):
        assert f"recipe: job.{field}: " in told
    assert told.count("what to do: ") == 5


def test_options_win_over_the_recipe() -> None:
    job = Job(nodes=2, time="01:00:00", account="a")
    given = {"nodes": 4, "time": "90", "account": None}
    assert merge(job, given) == job._replace(nodes=4, time="01:30:00")
    assert set(JOB_OPTIONS) <= set(Job._fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "x\n#SBATCH -n 9"), ("output", "a b"), ("account", "x y"), ("time", "soon")],
)
def test_options_are_judged_like_a_recipe(field: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        merge(Job(), {field: value})
    assert caught.value.where == f"--{field}"


def test_a_job_whose_image_was_removed_says_what_to_do(tmp_path: Path) -> None:
    image = tmp_path / "env.sqsh"
    batch = PLAIN._replace(command=("echo", "it ran"), folder=str(tmp_path), image=str(image))
    text = script(DIALECTS["slurm"], batch)
    done = run(text, tmp_path)
    assert (done.returncode, b"it ran" in done.stdout) == (1, False)
    assert b"env.sqsh was removed; write this script again: hvdenv job RECIPE" in done.stderr
    image.touch()
    assert b"it ran" in run(text, tmp_path).stdout
