"""What hosts have of what running an image takes: the questions, the answers, the judgement."""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdenv.launch.launchers import Mpi, parse_mpi_version
from hvdenv.launch.preflight import (
    Node,
    Requirements,
    compatible,
    judge_nodes,
    node_query,
    parse_node,
)
from hvdenv.model.cluster import Container
from hvdenv.model.recipe import Mpi as RecipeMpi
from hvdenv.reports.report import Finding, Status, judge
from tests.files import programs

IMAGE = "/images/horovod.sif"
CONTAINER = Container("nvidia/cuda:11.8.0-devel-ubuntu22.04", runtime="singularity", image=IMAGE,
                      gpu="nvidia")  # fmt: skip
MPI = RecipeMpi("openmpi", "4.1.8")
REQUIRED = Requirements(CONTAINER, MPI, "mpirun", scheduled=False)
GOOD = Node(
    name="f1.cluster",
    address="10.0.0.1 f1.cluster",
    tools={"apptainer": "", "singularity": "singularity version 3.7.3-1.el7"},
    sha256="a" * 64,
    mpirun="mpirun (Open MPI) 4.1.4 Report bugs to http://www.open-mpi.org/community/help/",
    driver="550.54.15",
    gpus=("/dev/nvidia0", "/dev/nvidia1"),
)
FIRST = GOOD._replace(peers={"f2": ""})
SECOND = GOOD._replace(name="f2.cluster", peers={"f1": ""})


def findings(
    second: Node | str = SECOND, required: Requirements = REQUIRED, check: str = ""
) -> list[Finding]:
    found = judge_nodes(required, {"f1": FIRST, "f2": second})
    return [finding for finding in found if check in ("", finding.check)]


def test_hosts_that_have_everything() -> None:
    found = findings()
    assert {finding.status for finding in found} == {"pass"}
    assert {finding.check for finding in found} == {"host", "tool", "image", "mpi", "driver", "ssh"}
    assert judge(found) == "pass"


def test_a_host_that_does_not_answer() -> None:
    problem = "ssh: connect to host f2 port 22: Connection refused"
    found = findings(problem)
    assert [f for f in found if f.status != "pass"] == [
        found[1]
    ] and found[1].evidence == problem and found[1].remedy  # fmt: skip
    assert (found[1].check, found[1].subject, found[1].status) == ("host", "f2", "fail")


CH_RUN = REQUIRED._replace(container=CONTAINER._replace(runtime="ch-run"))
AMD = REQUIRED._replace(container=CONTAINER._replace(gpu="rocm"))
MISSING = {"sha256": "", "problem": "No such file or directory"}
CUDA_11, CUDA_12, CUDA_13 = (
    f"nvidia/cuda:{version}-devel-ubuntu22.04" for version in ("11.8.0", "12.4.1", "13.0.1")
)


def on(base: str) -> Requirements:
    return REQUIRED._replace(container=CONTAINER._replace(base=base))


def by(launcher: str, mpi: RecipeMpi) -> Requirements:
    return REQUIRED._replace(launcher=launcher, mpi=mpi)


VERDICTS: list[tuple[str, dict[str, Any], Requirements, str, str]] = [
    *(
        ("tool", {"tools": {"apptainer": "", "singularity": said}}, REQUIRED, status, "")
        for said, status in (
            ("singularity version 3.7.3-1.el7", "pass"),
            ("singularity-ce version 3.11.4", "pass"),
            ("apptainer version 1.4.5", "pass"),
            ("WARNING: something singularity version 4.1.0", "pass"),
            ("2.6.1-dist", "fail"),
            ("singularity: error while loading shared libraries: libseccomp.so.2", "unproven"),
            ("", "fail"),
        )
    ),
    # Charliecloud counts from 0.1 on.
    ("tool", {"tools": {"ch-run": "0.31"}}, CH_RUN, "pass", ""),
    ("tool", {"tools": {"ch-run": "ch-run[7]: error: $USER not set (ch-run.c:122)"}}, CH_RUN, "unproven", ""),
    ("tool", {"tools": {"ch-run": ""}}, CH_RUN, "fail", ""),
    (
        "tool", {"tools": {"apptainer": "apptainer version 1.4.5", "singularity": ""}}, REQUIRED,
        "fail", "--set container.runtime=apptainer",
    ),
    ("image", MISSING, REQUIRED, "fail", "No such file.*scp -p f1:"),
    ("image", {"sha256": "b" * 64}, REQUIRED, "fail", "differs from the file on f1.*b{64}.*a{64}"),
    *(
        ("mpi", {"mpirun": "", "srun": listed}, by(launcher, mpi), status, "")
        for launcher, mpi, listed, status in (
            ("srun", MPI, "MPI plugin types are... none pmi2 pmix", "pass"),
            ("srun", MPI._replace(version="5.0.11"), "MPI plugin types are... none pmi2", "fail"),
            ("srun", RecipeMpi("mpich", "4.2"), "MPI plugin types are... none", "fail"),
            ("srun", MPI, "srun: fatal: Could not establish a configuration source", "unproven"),
            ("aprun", RecipeMpi("mpich", "4.2"), "", "unproven"),
        )
    ),
    ("mpi", {"mpirun": ""}, REQUIRED, "fail", "^mpirun is not installed\n"),
    ("mpi", {"mpirun": "mpirun (Open MPI) 5.0.11"}, REQUIRED, "fail", "install openmpi 4.1.8"),
    *(
        ("driver", {"driver": driver, "gpus": GOOD.gpus[:gpus]}, on(base), status, "")
        for driver, gpus, base, status in (
            ("550.54.15", 4, CUDA_11, "pass"),
            ("450.80.02", 4, CUDA_11, "pass"),
            ("450.80.02", 4, CUDA_12, "fail"),
            ("418.87.00", 4, CUDA_11, "fail"),
            ("570.86.10", 4, CUDA_13, "fail"),
            ("550.54.15", 4, "debian:12", "pass"),
            ("unknown", 1, CUDA_12, "pass"),
            ("550.54.15", 0, "debian:12", "fail"),
            ("", 0, "debian:12", "fail"),
        )
    ),
    ("driver", {}, AMD, "fail", ""),
    ("driver", {"gpus": ("/dev/kfd",)}, AMD, "pass", ""),
    ("name", {}, by("horovodrun-gloo", MPI), "pass", ""),
    ("name", {"address": ""}, by("horovodrun-gloo", MPI), "fail", ""),
    ("ssh", {"peers": {"f1": "Host key verification failed."}}, REQUIRED, "fail", "\nHost key verif"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "change", "required", "status", "said"), VERDICTS)
def test_what_hosts_have(
    check: str, change: dict[str, Any], required: Requirements, status: str, said: str
) -> None:
    found = findings(SECOND._replace(**change), required, check)[-1]
    assert found.status == status, found.message
    assert found.subject == ("f2 -> f1" if check == "ssh" else "f2")
    text = "\n".join((found.message, found.remedy, found.evidence))
    assert re.search(said, text, re.DOTALL), text


def test_an_image_that_no_host_has() -> None:
    nodes = {"f1": FIRST._replace(**MISSING), "f2": SECOND._replace(**MISSING)}  # type: ignore[arg-type]
    found = [f for f in judge_nodes(REQUIRED, nodes) if f.check == "image"]
    assert all(f.status == "fail" and "--build" in f.remedy for f in found)


@pytest.mark.parametrize(
    ("check", "change", "required"),
    [
        ("mpi", {"mpirun": ""}, REQUIRED._replace(launcher="horovodrun-gloo")),
        ("mpi", {}, REQUIRED._replace(mpi=None)),
        ("driver", {"driver": ""}, REQUIRED._replace(container=CONTAINER._replace(gpu="none"))),
        ("name", {"address": ""}, REQUIRED),
    ],
)
def test_what_is_not_needed_is_not_judged(
    check: str, change: dict[str, Any], required: Requirements
) -> None:
    assert findings(SECOND._replace(**change), required, check) == []


@pytest.mark.parametrize(
    ("host", "image", "status"),
    [
        (Mpi("Open MPI", "4.1.4"), Mpi("Open MPI", "4.1.8"), "pass"),
        (Mpi("Open MPI", "4.0.5"), Mpi("Open MPI", "4.1.8"), "unproven"),
        (Mpi("Open MPI", "3.1.2"), Mpi("Open MPI", "4.1.8"), "fail"),
        (Mpi("Open MPI", "5.0.11"), Mpi("Open MPI", "4.1.8"), "fail"),
        (Mpi("Open MPI", "3.1.3"), Mpi("Open MPI", "3.1.2"), "fail"),
        (Mpi("Open MPI", "4.1.4"), Mpi("Open MPI"), "unproven"),
        (Mpi("Open MPI"), Mpi("Open MPI", "4.1.8"), "unproven"),
        (Mpi("Intel MPI", "2021.6"), Mpi("Open MPI", "4.1.8"), "fail"),
        (Mpi("Spectrum MPI", "10.3"), Mpi("Open MPI", "4.1.8"), "fail"),
        (Mpi("Open MPI", "4.1.4"), Mpi("Hydra", "5.0"), "fail"),
        (Mpi("Hydra", "4.0"), Mpi("Hydra", "5.0"), "pass"),
        (Mpi("Intel MPI", "2021.6"), Mpi("Hydra", "5.0"), "pass"),
        (Mpi("Hydra", "4.0"), Mpi("Intel MPI", "2021.6"), "pass"),
        (Mpi("unknown"), Mpi("Open MPI", "4.1.8"), "unproven"),
    ],
)
def test_the_mpi_of_the_host_and_that_of_the_image(host: Mpi, image: Mpi, status: Status) -> None:
    found, reason = compatible(host, image)
    assert found == status, reason


def test_ssh_both_ways() -> None:
    assert [f.subject for f in findings(check="ssh")] == ["f1 -> f2", "f2 -> f1"]


def script(host: str, required: Requirements = REQUIRED) -> str:
    """What a host is asked, in one word for any shell."""
    command = node_query(host, ("f1", "f2", "f3"), required, here=False)
    assert command.argv[-2] == host
    assert not set(command.argv[-1]) & set("\n!")
    return base64.b64decode(command.argv[-1].split()[3]).decode("utf-8", "surrogateescape")


def test_ssh_is_asked_for_where_it_is_used() -> None:
    for host, peers in (("f1", "f2 f3"), ("f2", "f1"), ("f3", "f1")):
        assert f"\nfor peer in {peers}; do" in script(host)
    for launcher in ("mpirun", "horovodrun-mpi", "horovodrun-gloo"):
        by = REQUIRED._replace(launcher=launcher)
        assert "for peer in f1;" in script("f2", by)
        assert "for peer in ;" in script("f2", by._replace(scheduled=True))
    assert "for peer in ;" in script("f2", REQUIRED._replace(launcher="srun"))


@given(st.text(max_size=200))
def test_no_answer_is_no_node(text: str) -> None:
    assert parse_node(text) is None
    assert parse_node(f"@hvdenv-node {text}") is None
    assert parse_node("@hvdenv-node name f1\nkilled") is None


def test_the_answer_is_found_among_other_lines() -> None:
    lines = (
        "Welcome!",
        "@hvdenv-node name f1",
        "@hvdenv-node peer f2 Host key",
        "@hvdenv-node end",
        "bye",
    )
    node = parse_node("\n".join(lines))
    assert node and (node.name, node.peers) == ("f1", {"f2": "Host key"})


def looking_for(image: object) -> Requirements:
    return REQUIRED._replace(container=CONTAINER._replace(image=str(image)))


def ask(image: Path, *, here: bool = True) -> Node:
    """By the very words that ssh would be given, read by a shell."""
    command = node_query("f1", ("f1", "f2"), looking_for(image), here=here)
    words = command.argv if here else ("sh", "-c", command.argv[-1])
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    node = parse_node(shown.stdout)
    assert node, shown
    return node


WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(WORDS, WORDS)
@settings(max_examples=20)
def test_paths_are_words_for_the_shell(image: str, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", folder)
        text = script("f1", looking_for(f"/{image}$(touch x)"))
    started = shlex.split(text.partition("\nsay() ")[0])
    assert started == [f"PATH={folder}:$PATH", f"image=/{image}$(touch x)"]


def test_a_node_is_asked_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "it's $(x).sif"
    image.write_bytes(b"image")
    fakes = {"mpirun": "echo 'mpirun (Open MPI) 4.1.4'", "ssh": "echo refused; exit 255"}
    monkeypatch.setenv("PATH", f"{programs(tmp_path / 'bin', **fakes)}:{os.environ['PATH']}")
    node = ask(image, here=False)
    assert node.sha256 == "6105d6cc76af400325e94d588ce511be5bfdbb73b437dc51eca43917d7a43e3d"
    assert (node.problem, node.peers) == ("", {"f2": "refused"})
    assert parse_mpi_version(node.mpirun) == Mpi("Open MPI", "4.1.4")
    again = ask(Path("/nowhere"))
    assert (again.sha256, again.problem) == ("", "No such file or directory")


def test_an_image_that_is_a_folder_is_compared_by_its_listing(tmp_path: Path) -> None:
    (tmp_path / "one/etc").mkdir(parents=True)
    (tmp_path / "one/etc/hosts").write_text("12345")
    (tmp_path / "one/gone").symlink_to("/nowhere")
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    first = ask(tmp_path / "one").sha256
    assert first and ask(tmp_path / "two").sha256 == first
    (tmp_path / "two/etc/hosts").write_text("123456")
    assert ask(tmp_path / "two").sha256 != first
    (tmp_path / "two/etc/hosts").unlink()
    assert ask(tmp_path / "two").sha256 != first
