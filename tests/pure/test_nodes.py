"""What runs on hosts by ssh: the check of an image, and the end of what a run has left."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.base.command import Command, Outcome
from hvdenv.base.runner import Runner
from hvdenv.model.cluster import Container
from hvdenv.reports.report import Finding, Status, judge
from hvdenv.sites import nodes
from hvdenv.sites.launchers import MpiVersion
from hvdenv.sites.nodes import Node, Requirements, compatible, judge_nodes, node_query, parse_node
from tests.support.files import programs
from tests.support.waiting import runs, wait_until

HERE = os.uname().nodename
# What ssh does: the words that it gets are read by a shell.
LAST = 'for last; do :; done; exec sh -c "$last"'
CONTAINER = Container(
    "nvidia/cuda:11.8.0-devel-ubuntu22.04", (), "singularity", "/images/h.sif", gpu="nvidia"
)
REQUIRED = Requirements(CONTAINER, MpiVersion("Open MPI", "4.1.8"))
GOOD: Node = {
    "apptainer": "",
    "singularity": "singularity version 3.7.3-1.el7",
    "ch-run": "",
    "sha256": "a" * 64 + " -",
    "mpirun": "mpirun (Open MPI) 4.1.4 Report bugs to http",
    "driver": "550.54.15",
    "gpus": "/dev/nvidia0 /dev/nvidia1",
    "end": "",
}


def findings(
    second: Node | str = GOOD, required: Requirements = REQUIRED, check: str = ""
) -> list[Finding]:
    found = judge_nodes(required, {"f1": GOOD, "f2": second})
    return [finding for finding in found if check in ("", finding.check)]


def test_hosts_that_have_everything() -> None:
    found = findings()
    assert judge(found) == "pass"
    assert {finding.check for finding in found} == {"host", "tool", "image", "mpi", "driver"}


def test_a_host_that_does_not_answer() -> None:
    problem = "ssh: connect to host f2 port 22: Connection refused"
    (failed,) = [finding for finding in findings(problem) if finding.status != "pass"]
    assert (failed.check, failed.subject, failed.evidence) == ("host", "f2", problem)
    assert "without a password" in failed.remedy


MISSING = {"sha256": "", "problem": "head: cannot open: No such file or directory"}
AMD = REQUIRED._replace(container=CONTAINER._replace(gpu="rocm"))
BY_SRUN = REQUIRED._replace(launcher="srun")


def cuda(version: str) -> Requirements:
    return REQUIRED._replace(container=CONTAINER._replace(base=f"nvidia/cuda:{version}-devel"))


VERDICTS: list[tuple[str, dict[str, Any], Requirements, str, str]] = [
    ("tool", {"singularity": ""}, REQUIRED, "fail", "singularity is not installed"),
    (
        "tool",
        {"singularity": "", "apptainer": "apptainer version 1.4.5"},
        REQUIRED,
        "fail",
        "--set container.runtime=apptainer",
    ),
    ("image", MISSING, REQUIRED, "fail", "No such file or directory\nevery node needs the same"),
    ("image", {"sha256": "b" * 64}, REQUIRED, "fail", "differs from the file on f1"),
    ("mpi", {"mpirun": ""}, REQUIRED, "fail", "mpirun is not installed"),
    ("mpi", {"mpirun": "mpirun (Open MPI) 5.0.11"}, REQUIRED, "fail", "install Open MPI 4.1.8"),
    ("mpi", {}, BY_SRUN, "unproven", "whether srun has the PMI that Open MPI needs"),
    ("driver", {"driver": "450.80.02"}, cuda("11.8.0"), "pass", "2 GPUs"),
    ("driver", {"driver": "450.80.02"}, cuda("12.4.1"), "fail", "needs 525 or newer"),
    ("driver", {"driver": "unknown"}, cuda("12.4.1"), "pass", "2 GPUs"),
    ("driver", {"gpus": ""}, REQUIRED, "fail", "but no GPU"),
    ("driver", {"driver": "", "gpus": ""}, REQUIRED, "fail", "no NVIDIA driver"),
    ("driver", {}, AMD, "fail", "/dev/kfd does not exist"),
    ("driver", {"gpus": "/dev/kfd"}, AMD, "pass", "an AMD GPU"),
]


@pytest.mark.parametrize(("check", "change", "required", "status", "text"), VERDICTS)
def test_what_hosts_have(
    check: str, change: dict[str, Any], required: Requirements, status: str, text: str
) -> None:
    found = findings({**GOOD, **change}, required, check)[-1]
    assert (found.subject, found.status) == ("f2", status), found
    assert text in f"{found.message}\n{found.remedy}"


def test_an_image_that_no_host_has() -> None:
    found = judge_nodes(REQUIRED, {"f1": {**GOOD, **MISSING}, "f2": {**GOOD, **MISSING}})
    images = [each for each in found if each.check == "image"]
    assert all(each.status == "fail" and "--build" in each.remedy for each in images)


def test_what_is_not_needed_is_not_judged() -> None:
    bare = Requirements(CONTAINER._replace(gpu="none"))
    assert {finding.check for finding in findings(required=bare)} == {"host", "tool", "image"}


@pytest.mark.parametrize(
    ("host", "image", "status"),
    [
        (MpiVersion("Open MPI", "4.1.4"), MpiVersion("Open MPI", "4.1.8"), "pass"),
        (MpiVersion("Open MPI", "4.0.5"), MpiVersion("Open MPI", "4.1.8"), "unproven"),
        (MpiVersion("Open MPI", "5.0.11"), MpiVersion("Open MPI", "4.1.8"), "fail"),
        (MpiVersion("Open MPI", "3.1.3"), MpiVersion("Open MPI", "3.1.2"), "fail"),
        (MpiVersion("Open MPI", "4.1.4"), MpiVersion("Open MPI"), "unproven"),
        (MpiVersion("Spectrum MPI", "10.3"), MpiVersion("Open MPI", "4.1.8"), "fail"),
        (MpiVersion("Hydra", "4.0"), MpiVersion("Hydra", "5.0"), "pass"),
        (MpiVersion("Intel MPI", "2021.6"), MpiVersion("Hydra", "5.0"), "pass"),
        (MpiVersion("unknown"), MpiVersion("Open MPI", "4.1.8"), "unproven"),
    ],
)
def test_the_mpi_of_the_host_and_that_of_the_image(
    host: MpiVersion, image: MpiVersion, status: Status
) -> None:
    found, reason = compatible(host, image)
    assert found == status, reason


@given(st.text(max_size=200).filter(lambda text: "end" not in text))
def test_a_part_of_an_answer_is_none(text: str) -> None:
    for output in (text, f"@hvdenv-node {text}", "@hvdenv-node mpirun x\nkilled"):
        assert isinstance(parse_node(Outcome(Command(()), 0, output, 0.0)), str)


def ask(image: Path, path: str, host: str = HERE) -> Node:
    """The answer of a host to the query, with these programs on PATH."""
    required = REQUIRED._replace(container=CONTAINER._replace(image=str(image)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        answer = parse_node(Runner({"PATH": path}).run(node_query(host, required)))
    assert not isinstance(answer, str), answer
    return answer


def test_a_host_is_asked_by_ssh(tmp_path: Path) -> None:
    """The words that ssh gets, read by a shell, with an image and a directory of odd names."""
    image = tmp_path / "it's $(x).sif"
    image.write_bytes(b"image")
    mpirun = "echo 'mpirun (Open MPI) 4.1.4'"
    folder = programs(tmp_path / "a b;'c", ssh=LAST, mpirun=mpirun, singularity="exit 1")
    node = ask(image, f"{folder}:/usr/bin:/bin", "f9")
    assert node["mpirun"] == "mpirun (Open MPI) 4.1.4"
    assert node["sha256"].startswith(
        "6105d6cc76af400325e94d588ce511be5bfdbb73b437dc51eca43917d7a43e3d"
    )
    assert node["singularity"] == ""
    assert "No such file" in ask(Path("/nowhere"), f"{folder}:/usr/bin:/bin")["problem"]


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
@settings(max_examples=10)
def test_a_csh_gets_one_line(name: str) -> None:
    required = REQUIRED._replace(container=CONTAINER._replace(image=f"/{name}"))
    command = node_query("f9", required)
    assert command.argv[-2] == "f9"
    assert not set(command.argv[-1]) & set("\n!")
    assert shlex.split(command.argv[-1])[:2] == ["sh", "-c"]


def test_an_image_that_is_a_folder_is_compared_by_its_listing(tmp_path: Path) -> None:
    (tmp_path / "one/etc").mkdir(parents=True)
    (tmp_path / "one/etc/hosts").write_text("12345")
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    path = os.environ["PATH"]
    first = ask(tmp_path / "one", path)["sha256"]
    assert first and ask(tmp_path / "two", path)["sha256"] == first
    (tmp_path / "two/etc/hosts").write_text("123456")
    assert ask(tmp_path / "two", path)["sha256"] != first


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner({"PATH": f"{tmp_path}:/usr/bin:/bin"})


@pytest.mark.parametrize("branch", ["", ".ab12"])
def test_processes_on_another_host(tmp_path: Path, runner: Runner, branch: str) -> None:
    # The other host is this one, and has its process only when it is asked.
    mark = f"HVDENV_TOKEN={runner.token}{branch}"
    start = f"{mark} sleep 600 & echo $! > {tmp_path}/pid"
    started = f"until grep -qsz '^{mark}$' /proc/$!/environ; do sleep 0.05; done"
    programs(tmp_path, ssh=f"{start}\n{started}\nHVDENV_TOKEN=other\nexport HVDENV_TOKEN\n{LAST}")
    (finding,) = nodes.end_orphans(["n2", HERE], runner, 60)
    assert finding.status == "pass"
    # It may be seen dying when this host is looked at, which is the same.
    assert finding.message.removesuffix(f", 1 on {HERE}") == (
        f"no processes of this run are left on n2, {HERE}; hvdenv ended: 1 on n2"
    )
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not runs(pid))


def test_nothing_is_left(tmp_path: Path, runner: Runner) -> None:
    programs(tmp_path, ssh=f"HVDENV_TOKEN=other\nexport HVDENV_TOKEN\n{LAST}")
    (finding,) = nodes.end_orphans(["n2"], runner, 60)
    assert finding.message == f"no processes of this run are left on n2, {HERE}"


@pytest.mark.parametrize(
    ("text", "seconds", "why"),
    [
        ("echo 'ssh: connect to host n2 port 22: No route'; exit 255", 60, "22: No route"),
        ("exec sleep 600", 1, "no answer within 1 s"),
        ("exit 3", 60, "exit code 3"),
    ],
)
def test_orphans_of_a_host_that_does_not_answer_are_unconfirmed(
    tmp_path: Path, runner: Runner, text: str, seconds: float, why: str
) -> None:
    programs(tmp_path, ssh=text)
    began = time.monotonic()
    unknown, rest = nodes.end_orphans(["n2"], runner, seconds)
    assert time.monotonic() - began < 60
    assert (unknown.subject, unknown.status) == ("n2", "unproven")
    assert unknown.message.startswith("unconfirmed whether ranks still run on n2: ")
    assert why in unknown.message
    assert rest.message == f"no processes of this run are left on {HERE}"


def test_a_runner_that_was_stopped_still_ends_what_it_started(
    tmp_path: Path, runner: Runner
) -> None:
    runner.stop()
    programs(tmp_path, ssh=LAST)
    assert [finding.status for finding in nodes.end_orphans(["n2"], runner, 60)] == ["pass"]
