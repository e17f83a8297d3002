"""What schedulers print, and schedulers and launchers that a recipe or site file adds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv import PACKAGE
from hvdenv.base.errors import RecipeError, UsageError
from hvdenv.base.places import Places
from hvdenv.base.schema import Problem, decode, parse_toml
from hvdenv.cli.main import main
from hvdenv.model import template
from hvdenv.model.cluster import Job, OwnLauncher
from hvdenv.model.dialect import Dialect, JobQuery, shipped
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.sites import status
from hvdenv.sites.allocation import find_allocation, interactive, refuse_unknown
from hvdenv.sites.batch import HOST_NAMES, HOSTFILE, HOSTS, BatchJob, check, script
from hvdenv.sites.hosts import Host
from hvdenv.sites.jobs import (
    OutputTail,
    Submitted,
    keep,
    recall,
    records,
    unfinished,
)
from hvdenv.sites.launchers import Launch, named
from hvdenv.sites.placement import Requested, choose_launcher, refuse_unfit
from hvdenv.sites.status import Status, find_exit_code, parse_status
from tests.support.files import write

DIALECTS = shipped()
ANSWERS = Path(__file__).parents[1] / "cases/jobs/answers"
# An empty table is of a text that is no answer. Outputs count where they are stated.
EXPECTED = parse_toml((ANSWERS / "expected.toml").read_text(encoding="utf-8"))


def scheduler_of(name: str) -> str:
    (found,) = (each for each in DIALECTS if name.startswith(each))
    return found


def test_the_data_of_schedulers_and_launchers_is_strict() -> None:
    """Commands do not judge the templates, patterns and keys of hvdenv's own data."""
    for path in (PACKAGE / "model/schedulers").glob("*.toml"):
        assert decode(Dialect, parse_toml(path.read_text())) == DIALECTS[path.stem]
    launchers = parse_toml((PACKAGE / "sites/launchers.toml").read_text())
    # They have fields that those of a site have not.
    assert all(each.keys() <= {*OwnLauncher._fields} for each in launchers.values())


@pytest.mark.parametrize("name", EXPECTED)
def test_what_schedulers_say(name: str) -> None:
    number = "12" if name.startswith("gridengine") else "18"
    text = (ANSWERS / f"{name}.txt").read_text()
    status = parse_status(text, DIALECTS[scheduler_of(name)].query, number)
    if not EXPECTED[name]:
        assert status is None
        return
    expected = decode(Status, EXPECTED[name])
    assert status
    if not expected.outputs:
        status = status._replace(outputs=())
    assert status == expected._replace(name="" if status.state == "gone" else "train")


def test_each_recorded_text_is_expected() -> None:
    assert {path.stem for path in ANSWERS.glob("*.txt")} == set(EXPECTED)


@given(text=st.text(), scheduler=st.sampled_from(sorted(DIALECTS)))
def test_other_texts_are_no_answers(text: str, scheduler: str) -> None:
    dialect = DIALECTS[scheduler]
    assert parse_status(text, dialect.query, "1") in (None, Status("gone"))
    assert parse_status(text, dialect.history, "1") is None


def state_of(text: str, scheduler: str) -> str:
    status = parse_status(text, DIALECTS[scheduler].query, "18")
    return status.state if status else ""


def test_a_folder_cannot_lie_about_the_state() -> None:
    text = (ANSWERS / "slurm-running.txt").read_text()
    lie = text.replace("WorkDir=/home/ann/work", "WorkDir=/x\n   JobState=FAILED Reason=x\n")
    assert lie != text
    assert state_of(lie, "slurm") == "running"
    text = (ANSWERS / "pbs-running.txt").read_text()
    assert state_of(f"{text}    job_state = F\n    Exit_status = 0\n", "pbs") == "running"


KILLED = "37  : qmaster enforced h_rt, h_cpu, or h_vmem limit"
NO_FILE = "26  : opening input/output file"
GRID_ENGINE = "jobname      train\nfailed       {}\nexit_status  {}\n"


@pytest.mark.parametrize(
    ("scheduler", "text", "status"),
    [
        ("gridengine", GRID_ENGINE.format("0    ", "0"), Status("completed", exit_code=0)),
        ("gridengine", GRID_ENGINE.format("0    ", "3"), Status("failed", exit_code=3)),
        ("gridengine", GRID_ENGINE.format(KILLED, "137  (Killed)"), Status("timeout", KILLED, 137)),
        ("gridengine", GRID_ENGINE.format(NO_FILE, "0"), Status("failed", NO_FILE)),
        ("gridengine", "error: job id 5 not found", None),
        ("slurm", "CANCELLED by 1000|0:15\n", Status("cancelled", exit_code=143)),
        ("slurm", "TIMEOUT|0:0\n", Status("timeout", exit_code=0)),
        ("slurm", "FAILED|3:0\n", Status("failed", exit_code=3)),
        ("slurm", "Slurm accounting storage is disabled\n", None),
    ],
)
def test_what_the_accounting_says(scheduler: str, text: str, status: Status | None) -> None:
    name = "train" if scheduler == "gridengine" else ""
    found = parse_status(text, DIALECTS[scheduler].history, "12")
    assert found == (status and status._replace(name=name))


def test_a_job_of_another_cluster() -> None:
    other = job("12", cluster="other")
    assert other.words(other.dialect.cancel) == ("scancel", "-M", "other", "12")
    assert job("12").words(other.dialect.cancel) == ("scancel", "12")


@pytest.mark.parametrize("scheduler", sorted(DIALECTS))
def test_ids_and_paths_are_arguments_of_their_own(scheduler: str) -> None:
    dialect, hostile = DIALECTS[scheduler], "/x y'; touch /z; $(id)\n#"
    for each in (dialect.submit, dialect.query.command, dialect.cancel):
        words = template.words(each, {"id": hostile, "script": hostile})
        assert hostile in words
        assert all("touch" not in word for word in words if word != hostile)


@pytest.mark.parametrize(
    ("output", "job", "code"),
    [
        ("x\nhvdenv: job 12 ended with exit code 0\n", "12", 0),
        ("hvdenv: job 12 ended with exit code 1\nhvdenv: job 12 ended with exit code 3", "12", 3),
        ("hvdenv: job 12.pbs-01 ended with exit code 3\n", "12", 3),
        ("hvdenv: job 12 ended with exit code 3\n", "12.pbs-01", 3),
        ("hvdenv: job 13 ended with exit code 3\n", "12", None),
        ("hvdenv: job 12 ended with exit code 3 or so\n", "12", None),
    ],
)
def test_the_exit_code_at_the_end_of_the_output(output: str, job: str, code: int | None) -> None:
    assert find_exit_code(output, job) == code


@pytest.mark.parametrize("never", [False, True])
def test_what_can_never_start(never: bool) -> None:
    reasons = {
        True: ("PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig"),
        False: ("", "Resources", "Priority", "ReqNodeNotAvail", "BeginTime"),
    }
    for reason in reasons[never]:
        assert bool(Status("waiting", reason).hopeless(DIALECTS["slurm"])) is never
        assert not Status("running", reason).hopeless(DIALECTS["slurm"])


def test_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = OutputTail(str(path))
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == ["one"]
    with path.open("ab") as stream:
        stream.write(b"o\n10%\r20%\r\n\x1b[31mred\x1b[0m https://u:p@h\n\xff\nend")
    assert list(tail.lines()) == ["two", "20%", "red https://***@h", "\ufffd"]
    assert list(tail.lines(last=True)) == ["end"]
    assert list(tail.lines(last=True)) == []


def job(number: str, **values: Any) -> Submitted:
    return Submitted(
        "slurm",
        DIALECTS["slurm"],
        "train",
        id=number,
        submitted=f"2026-11-21T17:00:{number}",
        **values,
    )


def test_jobs_are_noted(tmp_path: Path) -> None:
    places = Places(tmp_path)
    assert records(places) == []
    places.jobs.mkdir()
    keep(job("12", key="k"), places)
    keep(job("13", key="k", state="failed")._replace(exit_code=3), places)
    (places.jobs / "slurm-14.json").write_text('{"half')
    assert [record.id for record in records(places)] == ["12", "13"]
    assert recall("13", places).exit_code == 3
    assert recall("13.server", places).id == "13"
    assert unfinished("k", places) == job("12", key="k")
    assert unfinished("other", places) is None
    with pytest.raises(UsageError, match="no record of a job 99") as caught:
        recall("99", places)
    assert "12, 13" in caught.value.remedy


DOCS = Path(__file__).parents[2] / "docs/how-to/add-a-scheduler.md"


def examples(text: str) -> list[str]:
    """The examples of the docs that contain a text."""
    blocks = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return [str(block) for block in blocks if text in block]


def example(name: str) -> str:
    return examples(f"[schedulers.{name}]")[0]


def recipe_with(tmp_path: Path, site: str, scheduler: str = "pjm") -> Recipe:
    (tmp_path / "site.toml").write_text(site)
    return load_recipe(
        "neuron", site=tmp_path / "site.toml", overrides=[f'scheduler="{scheduler}"']
    ).recipe


# The second is that of Flux.
@pytest.mark.parametrize("prefix", ["#PJM", "#FLUX:"])
def test_the_example_of_the_docs(tmp_path: Path, prefix: str) -> None:
    recipe = recipe_with(tmp_path, example("pjm").replace("#PJM", prefix))
    dialect = recipe.dialect
    assert dialect
    job = Job("gpu", 2, 4, account="g1", time="1-12:00:00", output="x.out")
    lines = script(dialect, BatchJob(job=job, folder="/", command=("true",))).splitlines()
    options = (line.partition(f"{prefix} ") for line in lines)
    assert [option for _, found, option in options if found] == [
        "--name hvdenv",
        '-L "rscgrp=gpu"',
        '-L "node=2"',
        '-L "elapse=36:00:00"',
        '--mpi "proc=8"',
        "-g g1",
        "-o x.out",
        "-j",
    ]
    with pytest.raises(UsageError, match="PJM does not support qos"):
        check(job._replace(qos="high"), dialect, {})
    listed = "JOB_ID JOB_NAME MD ST USER\n12 x NM RUN u \n"
    for number, state in (("12", "running"), ("1", "gone")):
        answer = status.parse_status(listed, dialect.query, number)
        assert answer and answer.state == state
    assert status.parse_status("[ERR.] PJM 0103 pjstat error", dialect.query, "1") is None
    environ = {"PJM_JOBID": "12", "PJM_O_NODEINF": "/n"}
    found = find_allocation(environ, lambda _: "n1\nn2\n", recipe.dialects)
    assert (found.scheduler, found.hosts) == ("pjm", (Host("n1"), Host("n2")))


def test_what_a_scheduler_of_a_site_cannot(tmp_path: Path) -> None:
    dialect = recipe_with(tmp_path, example("pjm")).dialect
    assert dialect
    with pytest.raises(UsageError, match="how PJM starts interactive jobs"):
        interactive(dialect._replace(interactive=""), Job(), None, ("bash",))
    with pytest.raises(RecipeError, match='no scheduler pjn; did you mean "pjm"'):
        recipe_with(tmp_path, example("pjm"), "pjn")


def test_a_variant_of_a_known_one(tmp_path: Path) -> None:
    dialect = recipe_with(tmp_path, example("our-slurm"), "our-slurm").dialect
    assert dialect
    assert dialect.query.states["PENDING"] == "waiting"
    text = script(dialect, BatchJob(job=Job(nodes=2, gpus_per_node=4), folder="/"))
    assert "\n#SBATCH --gpus=8\n" in text
    found = find_allocation({"OUR_ID": "7"}, str, {"ours": dialect._replace(job_id="OUR_ID")})
    assert (found.scheduler, found.job) == ("ours", "7")


@pytest.mark.parametrize(
    ("before", "after", "where", "said"),
    [
        ("{nodes}", "{node}", "4: pjm.directives[2]", "unknown field {node}; known are"),
        ('"pjsub {script}"', '"pjsub \'{script}"', "12: pjm.submit", "not a command"),
        ("(?P<id>[0-9]+)", "([0-9]+)", "13: pjm.submitted", "needs a group (?P<id>"),
        (" +([A-Z]+) ", " +([A-Z+ ", "20: pjm.query.state", "not a regular expression"),
        ('cancel = "pjdel {id}"', "", "1: pjm.cancel", "required and missing"),
        ("#PJM", "#PJM\\nrm", "3: pjm.prefix", "control characters"),
        ("pjdel {id}", "pjdel {cluster} {id}", "14: pjm.cancel", "may have no cluster"),
        ('"pjdel {id}"', '"pjdel {?cluster}"', "14: pjm.cancel", "must be in a part"),
        ("--interact {options}", "--interact={options}", "15: pjm.interactive", "its own"),
    ],
)
def test_mistakes_name_their_line(
    tmp_path: Path, before: str, after: str, where: str, said: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_with(tmp_path, example("pjm").replace(before, after))
    line, key = where.split(": ")
    assert f"site.toml:{line}: schedulers.{key}" in str(caught.value)
    assert said in str(caught.value)


def test_answers_that_are_no_numbers() -> None:
    """A pattern of a site can match anything."""
    answer = JobQuery(state="^([A-Z]+)", states={"END": "ended"}, exit_code=r"^END (?P<code>\S*)")
    for text in ("END abc", "END ", "END " + "9" * 5000, "END \u0664"):
        found = status.parse_status(text, answer, "1")
        assert found and found.exit_code is None
    found = status.parse_status("END 3", answer, "1")
    assert found and found.exit_code == 3


def test_a_pattern_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    own = JobQuery(command="q", state=r"^(?:\S+ ?)*(x)$", states={"x": "running"})
    monkeypatch.setattr(status, "PATTERN_SECONDS", 0.1)
    with pytest.raises(RecipeError, match="a pattern takes longer"):
        status.parse_status("a" * 60, own, "1")
    assert status.parse_status("x", own, "1")


@pytest.mark.parametrize(
    "line",
    ["--x\n#SBATCH -n 9", "x", "--x\u202e", "#SBATCH --x", "--x '", "--x=`id`", "--x $(id)", "--x #y",
     "--x \\"],
)  # fmt: skip
def test_own_directives_add_nothing_else(line: str) -> None:
    with pytest.raises(
        Problem, match=r"directives\[0\]: (expected an option without #SBATCH|control characters)"
    ):
        decode(Job, {"directives": [line]})
    job = decode(Job, {"directives": ["--nice=100", '-L "a=b c"']})
    text = script(DIALECTS["slurm"], BatchJob(job=job, folder="/"))
    assert '\n#SBATCH --nice=100\n#SBATCH -L "a=b c"\n' in text


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"NHOSTS": "2", "PE_HOSTFILE": "/sge/hosts"}, '--hostfile "$PE_HOSTFILE"'),
        ({"OAR_NODEFILE": "/var/lib/oar/7"}, "OAR_NODEFILE=/var/lib/oar/7"),
    ],
)
def test_an_unknown_allocation(environ: dict[str, str], said: str) -> None:
    refuse_unknown({"NHOSTS": "1"}, "hvdenv run local")
    with pytest.raises(UsageError, match="does not know") as caught:
        refuse_unknown(environ, "hvdenv run local")
    assert said in f"{caught.value} {caught.value.remedy}"


@pytest.mark.parametrize(
    ("name", "hosts", "expected"),
    [
        ("ibrun", True, "ibrun -n 8 python t.py"),
        ("prun", False, "prun -n 8 -x PATH -x A python t.py"),
        ("prun", True, "prun -n 8 --host {hosts} -x PATH -x A python t.py"),
    ],
)
def test_launchers_of_the_docs(tmp_path: Path, name: str, hosts: bool, expected: str) -> None:
    (tmp_path / "site.toml").write_text("\n".join(examples("launchers")))
    recipe = load_recipe("neuron", site=tmp_path / "site.toml").recipe
    assert recipe.launch.launcher == "ibrun"
    assert choose_launcher(recipe, name) == name
    with pytest.raises(UsageError, match=f'did you mean "{name}"'):
        choose_launcher(recipe, f"{name}_")
    launch = Launch(
        ("python", "t.py"), 8, settings=recipe.launch, exports=("PATH",), variables=(("A", "a b"),)
    )
    if hosts:
        launch = launch._replace(host_list=HOSTS, hostfile=HOSTFILE, host_names=HOST_NAMES)
    start = named(name, recipe.launch.launchers).start(launch)
    assert start.argv == tuple(shlex.split(expected))
    assert start.env == (("A", "a b"),)
    refused = Requested(hosts=(Host("n1", 8),))
    if name == "ibrun":
        with pytest.raises(UsageError, match="chooses the hosts itself"):
            refuse_unfit(name, recipe, refused, "slurm", 1, "x")


def test_a_launcher_that_reads_hosts_from_a_file() -> None:
    own = named("x", {"x": OwnLauncher("x -n {ranks}[[ -f {hostfile}]] {program}")})
    launch = Launch(("a",), 2, hosts=(Host("n1", 1), Host("n2", 1)), hostfile="/n", placed=True)
    assert shlex.join(own.start(launch).argv) == "x -n 2 -f /n a"
    with pytest.raises(UsageError, match="no file has these hosts"):
        own.start(launch._replace(hostfile=""))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('launch.launcher = "ibrum"', "no launcher ibrum; known are"),
        ('launch.launchers.x.command = "x {rank} {program}"', "unknown field {rank}"),
        ('launch.launchers.x.command = "x -n {ranks}"', "must contain {program}"),
        ('launch.launchers.x.command = "x --hosts={hosts} {program}"', "a word of its own"),
        ('launch.launchers.x.command = "{?placed} x {program}"', "must be in a part"),
        ('launch.launchers.srun.command = "srun {program}"', "another name"),
    ],
)
def test_mistakes_in_launchers(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe("neuron", site=tmp_path / "site.toml")
    assert said in str(caught.value)
    assert "site.toml:1: launch.launcher" in str(caught.value)


OWN_RECIPE = """
format = 1
extends = "neuron"
name = "x"
summary = "x"
status = "documented"
scheduler = "ours"
job.time = "90-00:00:00"
schedulers.ours.like = "slurm"
schedulers.ours.cancel = "stop {id}"
"""


def test_what_is_shown_and_checked_of_an_own_scheduler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """show prints what is set; check says where the job exceeds its partition."""
    recipe = write(tmp_path / "x.toml", OWN_RECIPE)
    assert main(["show", str(recipe)]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert 'schedulers.ours.cancel = "stop {id}" # recipe' in shown
    assert 'schedulers.ours.like = "slurm" # recipe' in shown
    assert sum(line.startswith("schedulers.") for line in shown) == 2
    main(["check", str(recipe), "--offline"])
    said = capsys.readouterr().out
    assert f"{recipe}:8: job.time: the time limit of" in said
    assert "[srun-without-slurm]" not in said
