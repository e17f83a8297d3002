"""Where the ranks of verify go, from its options."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hvdenv.cli import verify
from hvdenv.cli.main import make_parser
from hvdenv.cli.options import command_line
from hvdenv.environments.installation import Expectation
from hvdenv.errors import UsageError
from hvdenv.sites.hosts import Host
from hvdenv.verification.verify import usual_ranks


def hosts_of(*words: str) -> tuple[int, tuple[Host, ...]]:
    """How many ranks there are, and where, in an environment without a recipe."""
    parser = argparse.ArgumentParser()
    verify.configure(parser)
    launch, _ = verify._launched(parser.parse_args(words), None, Expectation())
    return launch.ranks, launch.hosts


@pytest.fixture(autouse=True)
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "COBALT_JOBID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "options", "ranks", "hosts"),
    [
        ("gpu32 slots=2\ngpu33 slots=1\n", (), 3, (Host("gpu32", 2), Host("gpu33", 1))),
        ("gpu32:2\ngpu33:2\n", ("-n", "2"), 2, (Host("gpu32", 1), Host("gpu33", 1))),
        ("gpu32\ngpu33\n", (), 2, (Host("gpu32", 1), Host("gpu33", 1))),
        ("gpu32\ngpu33\n", ("-n", "4"), 4, (Host("gpu32", 2), Host("gpu33", 2))),
    ],
)
def test_a_hostfile(
    tmp_path: Path, text: str, options: tuple[str, ...], ranks: int, hosts: tuple[Host, ...]
) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert hosts_of("--hostfile", str(path), *options) == (ranks, hosts)
    named = ",".join(line.replace(" slots=", ":") for line in text.splitlines())
    assert hosts_of("--hosts", named, *options) == (ranks, hosts)


@pytest.mark.parametrize(
    ("cores", "gpus", "ranks"),
    [(1, 0, 3), (2, 0, 3), (4, 0, 4), (64, 0, 4), (64, 1, 4), (64, 2, 2), (64, 3, 3), (64, 8, 4)],
)
def test_enough_ranks_for_process_sets(cores: int, gpus: int, ranks: int) -> None:
    """Two share no proper subset; more than there are GPUs would take NCCL its proof."""
    assert usual_ranks(cores, gpus) == ranks


def test_allreduces_alone_take_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(verify, "gpus", lambda: ())
    for words, ranks in (((), 3), (("--full",), 3), (("--quick",), 2), (("--quick", "-n", "5"), 5)):
        assert hosts_of(*words) == (ranks, ())


def test_hosts_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as caught:
        hosts_of("--hostfile", str(tmp_path / "none"))
    assert caught.value.where == str(tmp_path / "none")
    with pytest.raises(SystemExit):
        hosts_of("--hosts", "gpu32:1", "--hostfile", "hosts")
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_command_without_variables_of_the_shell() -> None:
    arguments = make_parser("verify").parse_args(["verify", "--prefix", "/my env", "-n", "2"])
    assert command_line(arguments, clean=True) == (
        "verify",
        "--prefix=/my env",
        "--ranks=2",
        "--clean",
    )
