"""Schedulers and launchers that a recipe or site file adds: the examples of the docs, and mistakes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hvdenv.cli.main import main
from hvdenv.errors import RecipeError, UsageError
from hvdenv.launch.launchers import Launch, named
from hvdenv.launch.placement import Requested, choose_launcher, refuse_unfit
from hvdenv.model.cluster import Job
from hvdenv.model.dialect import Answer
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Recipe
from hvdenv.schema import Problem, decode
from hvdenv.sites import status
from hvdenv.sites.allocation import find_allocation, interactive, refuse_unknown
from hvdenv.sites.batch import HOST_NAMES, HOSTFILE, HOSTS, BatchJob, check, script
from hvdenv.sites.hosts import Host
from tests.files import write

DOCS = Path(__file__).parents[2] / "docs/how-to/add-a-scheduler.md"


def example(name: str) -> str:
    blocks = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return next(str(block) for block in blocks if f"[schedulers.{name}]" in block)


def recipe_with(tmp_path: Path, site: str, scheduler: str = "pjm") -> Recipe:
    (tmp_path / "site.toml").write_text(site)
    return load_recipe(
        "neuron", site=tmp_path / "site.toml", overrides=[f'scheduler="{scheduler}"']
    ).recipe


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, example("pjm"))
    dialect = recipe.dialect
    assert dialect
    job = Job("gpu", 2, 4, account="g1", time="1-12:00:00", output="x.out")
    lines = script(dialect, BatchJob(job=job, folder="/", command=("true",))).splitlines()
    assert [line for line in lines if line.startswith("#PJM")] == [
        "#PJM --name hvdenv",
        '#PJM -L "rscgrp=gpu"',
        '#PJM -L "node=2"',
        '#PJM -L "elapse=36:00:00"',
        '#PJM --mpi "proc=8"',
        "#PJM -g g1",
        "#PJM -o x.out",
        "#PJM -j",
    ]
    with pytest.raises(UsageError, match="PJM does not support qos"):
        check(job._replace(qos="high"), dialect, {})
    answer = status.parse_status(
        "JOB_ID JOB_NAME MD ST USER\n12 x NM RUN u \n", dialect.query, "12"
    )
    assert answer
    assert answer.state == "running"
    gone = status.parse_status("JOB_ID JOB_NAME MD ST USER\n12 x NM RUN u \n", dialect.query, "1")
    assert gone
    assert gone.state == "gone"
    assert status.parse_status("[ERR.] PJM 0103 pjstat error", dialect.query, "1") is None
    environ = {"PJM_JOBID": "12", "PJM_O_NODEINF": "/n"}
    found = find_allocation(environ, lambda _: "n1\nn2\n", recipe.dialects)
    assert (found.scheduler, found.hosts) == ("pjm", (Host("n1"), Host("n2")))


def test_a_variant_of_a_known_one(tmp_path: Path) -> None:
    dialect = recipe_with(tmp_path, example("our-slurm"), "our-slurm").dialect
    assert dialect
    assert dialect.query.states["PENDING"] == "waiting"
    text = script(dialect, BatchJob(job=Job(nodes=2, gpus_per_node=4), folder="/"))
    assert "\n#SBATCH --gpus=8\n" in text
    found = find_allocation({"OUR_ID": "7"}, str, {"ours": dialect._replace(job_id="OUR_ID")})
    assert (found.scheduler, found.job) == ("ours", "7")


def test_interactive_jobs_need_a_template(tmp_path: Path) -> None:
    dialect = recipe_with(tmp_path, example("pjm")).dialect
    assert dialect
    with pytest.raises(UsageError, match="how PJM starts interactive jobs"):
        interactive(dialect._replace(interactive=""), Job(), None, ("bash",))


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
        ("cancel =", "times = ['(?P<x>.+)']\ncancel =", "14: pjm.times[0]", "d, h, m and s"),
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
    answer = Answer(state="^([A-Z]+)", states={"END": "ended"}, exit_code=r"^END (?P<code>\S*)")
    for text in ("END abc", "END ", "END " + "9" * 5000, "END \u0664"):
        found = status.parse_status(text, answer, "1")
        assert found and found.exit_code is None
    found = status.parse_status("END 3", answer, "1")
    assert found and found.exit_code == 3


def test_a_pattern_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Answer(command="q", state=r"^(?:\S+ ?)*(x)$", states={"x": "running"})
    monkeypatch.setattr(status, "PATTERN_SECONDS", 0.1)
    with pytest.raises(RecipeError, match="a pattern takes longer"):
        status.parse_status("a" * 60, own, "1")
    assert status.parse_status("x", own, "1")


def test_names_of_schedulers_are_checked(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match='no scheduler pjn; did you mean "pjm"'):
        recipe_with(tmp_path, example("pjm"), "pjn")


@pytest.mark.parametrize("line", ["--nice=100 '", "--x=`id`", "--x $(id)", "--x #y", "--x \\"])
def test_own_directives_add_nothing_else(line: str) -> None:
    dialect = load_recipe("neuron").recipe.dialect
    assert dialect
    good = BatchJob(job=Job(directives=("--nice=100", '-L "a=b c"')), folder="/")
    assert '\n#SBATCH --nice=100\n#SBATCH -L "a=b c"\n' in script(dialect, good)
    with pytest.raises(UsageError, match="directives"):
        script(dialect, BatchJob(job=Job(directives=(line,)), folder="/"))


@pytest.mark.parametrize("line", ["--x\n#SBATCH -n 9", "x", "--x\u202e", "--x\x85"])
def test_directives_are_options_of_printable_characters(line: str) -> None:
    with pytest.raises(Problem, match="directives"):
        decode(Job, {"directives": [line]})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"NHOSTS": "2", "PE_HOSTFILE": "/sge/hosts"}, '--hostfile "$PE_HOSTFILE"'),
        ({"OAR_NODEFILE": "/var/lib/oar/7"}, "OAR_NODEFILE=/var/lib/oar/7"),
        ({"NHOSTS": "1"}, ""),
        ({}, ""),
    ],
)
def test_an_unknown_allocation(environ: dict[str, str], said: str) -> None:
    if not said:
        refuse_unknown(environ, "hvdenv run local")
        return
    with pytest.raises(UsageError, match="does not know") as caught:
        refuse_unknown(environ, "hvdenv run local")
    assert said in f"{caught.value} {caught.value.remedy}"


def launchers_of_docs() -> str:
    blocks = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return "\n".join(block for block in blocks if "launchers" in block)


@pytest.mark.parametrize(
    ("name", "hosts", "expected"),
    [
        ("ibrun", True, "ibrun -n 8 python t.py"),
        ("prun", False, "prun -n 8 -x PATH -x A python t.py"),
        ("prun", True, "prun -n 8 --host {hosts} -x PATH -x A python t.py"),
    ],
)
def test_launchers_of_the_docs(tmp_path: Path, name: str, hosts: bool, expected: str) -> None:
    (tmp_path / "site.toml").write_text(launchers_of_docs())
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
    """show prints what follows from `like`; check says where the job exceeds its partition."""
    recipe = write(tmp_path / "x.toml", OWN_RECIPE)
    assert main(["show", str(recipe)]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert 'schedulers.ours.cancel = "stop {id}" # recipe' in shown
    assert 'schedulers.ours.prefix = "#SBATCH" # like slurm' in shown
    assert not any(line.startswith("schedulers.") and "default" in line for line in shown)
    main(["check", str(recipe), "--offline"])
    said = capsys.readouterr().out
    assert f"{recipe}:8: job.time: the time limit of" in said
    assert "[srun-without-slurm]" not in said
