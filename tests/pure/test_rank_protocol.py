"""What ranks report survives whatever launchers and programs print around it."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.base.masking import clean, learn
from hvdenv.standalone.ranks.events import (
    DataPath,
    EventWriter,
    Gpu,
    Operation,
    RankEvent,
    Result,
    Skipped,
    Stage,
    Training,
    to_table,
)
from hvdenv.verification.datapath import rank_records
from hvdenv.verification.rank_judgement import causes_by_rank, judge_exercise, judge_run
from hvdenv.verification.rank_run import (
    RankRun,
    Received,
    collect,
    event_of,
    read_events,
)
from tests.support.rank_events import (
    event,
    exited,
    extension,
    good,
    lines,
    overdue,
    reduced,
    run,
    started,
)
from tests.support.standalone import load

rank = load("rank")
TOKEN = "0123abc"
RIGHT = [event(rank, Result(tests=30, wrong=0)) for rank in (0, 1)]


def said(message: Received, token: str = TOKEN) -> list[str]:
    """As a process that reports only this event writes it, but once."""
    return lines(message, EventWriter(token))


PREFIXES = ["", "[0]<stdout>:", "[1,0]<stdout>:", "Thu Nov 21 13:00:00 2026[0]<stdout>:", "0: "]


@given(st.lists(st.sampled_from(PREFIXES), min_size=8, max_size=8), st.text(max_size=200))
def test_prefixes_and_other_lines(prefixes: list[str], noise: str) -> None:
    events = good()
    text = "\n".join(
        f"{prefix}{line}\n{noise}"
        for prefix, event in zip(prefixes, events, strict=True)
        for line in said(event)
    )
    assert read_events(text, TOKEN) == events
    assert read_events(text, "ffff") == []  # another run's


@given(st.integers(0, 2**32))
def test_a_damaged_line_is_not_believed(seed: int) -> None:
    source = random.Random(seed)
    text = "\n".join(said(RIGHT[0]))
    at = source.randrange(len(text))
    damaged = text[:at] + chr(source.randrange(32, 127)) + text[at + 1 :]
    assert read_events(damaged, TOKEN) in ([], RIGHT[:1])


TIMED = {"host": "n1", "pid": 1, "event": "Timed", "size": 1}


@pytest.mark.parametrize(
    "table",
    [
        [],
        "x",
        {"host": 1},
        {"host": "n1", "pid": 1, "event": "Begun"},
        {"host": "n1", "pid": 1, "event": "Stage"},
        {"host": "n1", "pid": 10**300, "event": "Stage", "stage": ""},
        {**TIMED, "seconds": [10**400]},
        {**TIMED, "size": float("nan"), "seconds": []},
    ],
)
def test_an_event_of_another_form_hides_no_other(table: object) -> None:
    writer = EventWriter(TOKEN)
    writer.source = "0" * 8
    payload = base64.b64encode(json.dumps(table).encode()).decode().rstrip("=")
    rest = f"{writer.source}.7.0.1.{payload}"
    odd = f"@hvdenv {TOKEN} {zlib.crc32(rest.encode()):08x} {rest}"
    long = rest.replace(".7.0.1.", f".7.{'1' * 5000}.1.")
    longer = f"@hvdenv {TOKEN} {zlib.crc32(long.encode()):08x} {long}"
    text = "\n".join([*said(RIGHT[0]), odd, longer, *said(RIGHT[1])])
    assert read_events(text, TOKEN) == RIGHT


def test_the_supervisor_survives_what_a_rank_writes() -> None:
    supervisor = _Unseen(EventWriter(TOKEN), 60.0, ("torch", "MPI", "host"))
    supervisor.child.communicate()
    supervisor._take_report(b'{"stage": 3}\nnot JSON\n[]\n{"event": "Stage"}\n')
    assert supervisor.tail.text().count("malformed event") == 3
    supervisor._take_report(b'{"event": "Stage", "stage": 3, "detail": null}\n')
    assert supervisor.at == Stage("3", "None")


@pytest.mark.parametrize(
    "sent",
    [
        Stage("training", "step 3"),
        DataPath(gpu=Gpu("cuda:0", on_host=2), libraries={"libmpi": ["/a", "/b"]}),
        Operation("alltoall", 3, 0, skipped=[Skipped("int8", "no", 2), Skipped("", "why", 1)]),
        Training("Keras fit", 1, losses=[float("inf"), 0.5]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_event_arrives_as_it_was_sent(sent: RankEvent) -> None:
    table = json.loads(json.dumps({**to_table(sent), "host": "n1", "pid": 7}))
    assert event_of(table) == Received("n1", 7, sent)


def as_cut(texts: Sequence[str], size: int) -> str:
    """What several ranks wrote, as a launcher mixes it that reads so many bytes at a time."""
    pieces = [[text[at : at + size] for at in range(0, len(text), size)] for text in texts]
    return "".join(piece for each in zip_longest(*pieces, fillvalue="") for piece in each)


@pytest.mark.parametrize("size", [1000, 1024, 4096])
@given(data=st.data())
def test_what_launchers_cut_and_mix_arrives(size: int, data: st.DataObject) -> None:
    """Horovod's own, srun and mpirun; and a rank begins anywhere in what they read."""
    texts, events = [], []
    for number in range(3):
        writer = EventWriter(TOKEN)
        tail = "x" * data.draw(st.integers(0, 5000))
        sent = [started(number), exited(number, code=1, tail=tail)]
        written = (f"\n{line}\n{line}\n" for each in sent for line in lines(each, writer))
        texts.append("-" * data.draw(st.integers(0, size)) + "".join(written))
        events += sent
    found = read_events(as_cut(texts, size), TOKEN)
    assert sorted(found, key=repr) == sorted(events, key=repr)


def test_lines_are_shorter_than_what_srun_cuts(capfd: pytest.CaptureFixture[str]) -> None:
    EventWriter("f" * 32).emit(to_table(Stage("allreduce", "x" * 9000)))
    written = capfd.readouterr().out
    assert max(map(len, written.splitlines())) <= 500
    (message,) = read_events(written, "f" * 32)
    assert message.event == Stage("allreduce", "x" * 9000)
    assert message.pid == os.getpid()


def test_an_event_whose_copies_are_damaged_is_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    writer, sent = EventWriter(TOKEN), [Stage("start"), Stage("allreduce")]
    for each in sent:
        writer.emit(to_table(each))
    first, *_ = writer.written
    written = capfd.readouterr().out.replace(first, first[:99] + first[:99])
    assert [each.event for each in read_events(written, TOKEN)] == sent[1:]
    writer.repeat()
    written += capfd.readouterr().out
    assert [each.event for each in read_events(written, TOKEN)] == sent


def test_what_a_rank_says_is_cleaned_after_it_was_checked() -> None:
    learn([("MY_TOKEN", "x1y2z3")])
    message = exited(0, code=1, tail="token=x1y2z3 https://me:pass@host \x1b[31mred")
    text = clean("\n".join(said(message)))
    (rank,) = collect(read_events(text, TOKEN))
    assert rank.tail == "token=*** https://***@host red"


class _Unseen(rank.Supervisor):  # type: ignore[misc, name-defined]
    """Watches over a program that ends while nobody looks: on a machine that stalls there."""

    def _start(self, *_: object) -> subprocess.Popen[bytes]:
        self.reports, self.writer = os.pipe()
        child = subprocess.Popen(["sh", "-c", "sleep 0.1; echo last"], stdout=subprocess.PIPE)
        child.poll = child.wait  # type: ignore[method-assign]
        return child


def test_the_last_words_of_a_rank_are_read_though_nobody_looks_while_it_ends() -> None:
    watch = _Unseen(EventWriter(TOKEN), 60.0, ("torch", "MPI", "host"))
    with watch.child:
        assert watch.run() == 0
    os.close(watch.reports)
    os.close(watch.writer)
    assert watch.tail.text() == "last"


def test_how_a_crash_began_is_kept_though_its_backtrace_is_long() -> None:
    tail = rank.OutputTail()
    frames = [f" {number}  /x{'y' * 250}/libpython3.so(f+0x1) [0x7f]" for number in range(4, 40)]
    tail.take("\n".join([BACKTRACE, *frames, "last", ""]).encode())
    text = tail.text()
    assert len(json.dumps(text)) <= rank.TAIL_BYTES
    assert "Caught signal 11" in text and "uct_mm_iface_init" in text and text.endswith("\nlast")


def test_good_runs() -> None:
    judgement = judge_run(run(*good(3), size=3))
    assert judgement.status == "pass"
    assert "3 ranks on n1 agree on 30 reductions" in judgement.message
    same = run(*good(), extension(0), extension(1, python="/copy/bin/python"))
    assert judge_run(same).status == "pass"
    alone = judge_run(run(*good(1), size=1)).message
    assert alone.startswith("1 rank on n1 is right about 30 reductions")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((0.1, 1.02), "; but rank 1 on n1 took 10 times as long as the others for its own work"),
        ((0.1, 0.12, 1.0, 0.11), "; but rank 2 on n1 took 9 times as long as the others"),
        ((0.1, 0.4), ""),  # twice the ranks of a busy machine's cores
        ((0.01, 0.2), ""),  # too little to matter
        ((0.1, 1.0, 1.1), ""),  # it is the first that is special
    ],
)
def test_a_slow_rank_is_named_and_fails_nothing(seconds: tuple[float, ...], said: str) -> None:
    size = len(seconds)
    events = [
        event(number, Result(30, 0, busy=busy, enabled=["MPI"]))
        for number, busy in enumerate(seconds)
    ]
    judgement = judge_run(run(*good(size), *events, size=size))
    assert judgement.status == "pass"
    assert said in judgement.message
    assert ("took" in judgement.message) == bool(said)
    notes = [record.note for record in rank_records("torch", run(*good(size), *events, size=size))]
    assert [note in judgement.message for note in notes if note] == [True] * bool(said)


KILLED = exited(1, code=-9, signal="SIGKILL", tail="last words")
STACK = "Timeout (0:00:58)!\n  File train.py, line 3 in wait"
# As faulthandler writes them, of a rank that waits in Horovod and of one that sleeps.
_STACKS = """Timeout (0:00:58)!
Thread 0x00007f8d1ffff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Thread 0x00007f8d6b2c7740 (most recent call first):
  File "{}", line 1030 in join
  File "/hvdenv/standalone/ranks/collectives.py", line 260 in call
  File "/hvdenv/standalone/ranks/rank_work.py", line 107 in <module>"""
_TORCH = "/env/lib/python3.11/site-packages/horovod/torch"
WAITS, SLEEPS = _STACKS.format(f"{_TORCH}/mpi_ops.py"), _STACKS.format(f"{_TORCH}/__init__.py")
POLLS = _STACKS.format("/hvdenv/standalone/ranks/context.py")
IN_JOIN: dict[str, Any] = {"stage": "collectives", "detail": "join: in hvd.join()"}
LATE: dict[str, Any] = {"code": -9, "signal": "SIGKILL", "ended_by": "deadline"}
CLOSED = (
    "Horovod background loop uncaught exception: pair.cc:598 Connection closed by peer\n"
    "horovod.common.exceptions.HorovodInternalError: Horovod has been shut down. This was caused"
)
BY_LAUNCHER: dict[str, Any] = {"code": -15, "signal": "SIGTERM", "ended_by": "launcher"}

BACKTRACE = """\
[n1:41   :0:41] Caught signal 11 (Segmentation fault: address not mapped to object at address 0xc)
==== backtrace (tid:     41) ====
 0  /opt/openmpi/lib/libucs.so.0(ucs_handle_error+0x294) [0x7f3b84dc1a14]
 1  /opt/openmpi/lib/libucs.so.0(+0x33bcc) [0x7f3b84dc1bcc]
 2  /lib/x86_64-linux-gnu/libc.so.6(+0x3c050) [0x7f3baee5a050]
 3  /opt/openmpi/lib/libuct.so.0(uct_mm_iface_init+0x11) [0x7f3b9365f1e1]
 4  /opt/openmpi/lib/libmpi.so.40(PMPI_Init_thread+0x55) [0x7f3b9365f1f1]"""
SRUN_SAYS = """\
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: n1: task 1: Killed
srun: error: n1: task 0: Segmentation fault"""
MPIRUN_SAYS = "\n".join(["root@n2: Permission denied (publickey).", *["* advice"] * 40])
ON_ANOTHER: dict[str, Any] = {"size": 4711, "version": "0.27.0"}


def alone(library: str) -> list[Received]:
    """Two ranks under srun of which each is the only one."""
    events = [*good(1), started(1), *reduced(0, 1, pid=101), exited(1)]
    return [*events, event(0, DataPath(mpi=library))]


ENDED = [kind(number) for number in (0, 1) for kind in (started, exited)]

# name: (run, what the message says, what the evidence shows)
FAILURES: dict[str, tuple[RankRun, str, str]] = {
    "no rank": (run(returncode=213, tail="no such host"), "started none of 2", "no such host"),
    "singletons": (
        run(*ENDED, *reduced(0, 1), *reduced(0, 1, pid=101)),
        "each reports that it is alone (size 1)", "OMPI_COMM_WORLD_RANK",
    ),
    "killed": (
        run(started(0), started(1), exited(0, **BY_LAUNCHER), KILLED, returncode=137),
        "rank 1 on n1: was ended by SIGKILL", "last words",
    ),
    "exit code": (
        run(started(0), started(1), exited(0, code=1, tail="ImportError: x"),
            exited(1, code=1, tail="ImportError: y")),
        "rank 0 on n1, rank 1 on n1: exited with code 1", "ImportError: y",
    ),
    "hang": (
        run(*good()[:4], started(1), overdue(1, STACK), exited(1, **LATE)),
        "rank 1 on n1: did not finish within 60 s; results came from rank 0 on n1", "line 3 in wait",
    ),
    "too few": (run(*good(2), size=3), "2 of 3 ranks reported; Horovod's size is 2, not 3", ""),
    "other size": (
        run(*ENDED, *reduced(0, 4), *reduced(1, 4)),
        "Horovod's size is 4, not 2", "size 4",
    ),
    "a rank twice": (
        run(*ENDED, *reduced(0), *reduced(0, pid=101)),
        "the ranks are [0, 0], not 0 to 1", "",
    ),
    "local ranks": (
        run(*good()[:4], started(1), *reduced(1, local_rank=0), exited(1)),
        "the local ranks on n1 are [0, 0], not 0 to 1", "local_rank 0",
    ),
    "local size": (
        run(*good()[:4], started(1), *reduced(1, local_size=1), exited(1)),
        "the local size on n1 is not 2", "local_size 1",
    ),
    "wrong sums": (
        run(*good()[:4], started(1), exited(1),
            *reduced(1, wrong=2, cases=["Sum int64 17: element 0 is 3, expected 5"])),
        "on rank 1 on n1: 2 of 30 reductions; Sum int64 17: element 0 is 3, expected 5",
        "rank 1 on n1: Sum int64 17: element 0 is 3, expected 5",
    ),
    "other controller": (
        run(*good()[:4], started(1), *reduced(1, enabled=["Gloo"]), exited(1)),
        "rank 1 on n1 used Gloo as its controller, not MPI", "",
    ),
    "launcher failed": (
        run(*good(), returncode=1, tail="finalize"), "but mpirun exited with code 1", "finalize",
    ),
    "nothing started, with a cause far before the end": (
        run(returncode=255, tail=MPIRUN_SAYS),
        "started none of 2 ranks (exit 255): ssh to another host is refused without a password",
        "earlier output of the launcher:\n    root@n2: Permission denied",
    ),
    "a rank that says why": (
        run(started(0), started(1), exited(1, code=1, tail="ncclInit failed: bad\nncclX"),
            exited(0, **BY_LAUNCHER)),
        "rank 1 on n1: exited with code 1: NCCL reports: bad", "ncclInit failed",
    ),
    "another environment": (
        run(*good(3), extension(0), extension(1), extension(2, **ON_ANOTHER), size=3),
        "rank 2 on n1 has a different environment from the other ranks: Horovod 0.27.0, an extension of"
        " 4711 bytes instead of Horovod 0.28.1, an extension of 100 bytes",
        "rank 0 on n1: torch 2.1.0, Horovod 0.28.1",
    ),
    "another environment explains why ranks failed": (
        run(*good()[:4], started(1), exited(1, code=-11, signal="SIGSEGV"), extension(0),
            extension(1, installed="2.2.0")),
        "has a different environment from the other ranks: torch 2.", "",
    ),
    "disk full": (
        run(started(0), started(1), exited(0, **BY_LAUNCHER),
            exited(1, code=1, tail="PMIX ERROR", full=["/scratch/tmp"])),
        "rank 1 on n1: exited with code 1: no space is left in /scratch/tmp on n1", "PMIX",
    ),
    "gave up": (
        run(started(0), started(1), exited(1), exited(0, code=1, tail=CLOSED)),
        "rank 1 on n1: exited without a result", "closed by peer",
    ),
    "all gave up": (
        run(*(kind for r in (0, 1) for kind in (started(r), exited(r, code=1, tail=CLOSED)))),
        "rank 0 on n1, rank 1 on n1: exited with code 1 (HorovodInternalError: Horovod has", "",
    ),
    "a crash, and the kill of another rank by the scheduler": (
        run(started(0), started(1), exited(0, code=-11, signal="SIGSEGV", tail=BACKTRACE), KILLED,
            tail=SRUN_SAYS, returncode=139),
        "rank 0 on n1: was ended by SIGSEGV: a process crashed in libuct.so (uct_mm_iface_init), and UCX is in its backtrace",
        "task 1: Killed",
    ),
    "a crash without a backtrace, and the kill": (
        run(started(0), started(1), exited(0, code=-7, signal="SIGBUS"), tail=SRUN_SAYS),
        "rank 0 on n1: was ended by SIGBUS", "task 1: Killed",
    ),
    "stalled": (
        run(started(0), overdue(0, STACK, stalled="missing ranks: 1: [a]"), exited(0, **LATE),
            started(1), overdue(1, STACK), exited(1, **LATE)),
        "results came from no rank; Horovod reports: missing ranks: 1: [a]", "",
    ),
    "missed by Horovod": (
        run(started(0), overdue(0, STACK, stalled="missing ranks: 1: [a]"), exited(0, **LATE),
            started(1), overdue(1, STACK), exited(1, **LATE)),
        "rank 1 on n1: did not finish within 60 s; rank 0 on n1 waited for this; results", "rank 0 on n1",
    ),
    "hung in a join of its own": (
        run(started(0), overdue(0, WAITS), exited(0, **LATE, **IN_JOIN),
            started(1), overdue(1, "x"), exited(1, **LATE, **IN_JOIN, tail=SLEEPS),
            started(2), overdue(2, POLLS), size=3),  # in a step before its join
        "rank 1 on n1: did not finish within 60 s; rank 0 on n1, rank 2 on n1 waited for this;",
        "rank 1 on n1 (process 101) hangs",
    ),
    "all wait for each other": (
        run(started(0), overdue(0, WAITS), exited(0, **LATE, **IN_JOIN),
            started(1), overdue(1, WAITS), exited(1, **LATE, **IN_JOIN)),
        "rank 0 on n1, rank 1 on n1: did not finish within 60 s; results", "",
    ),
    "never started": (
        run(started(0), overdue(0, STACK), exited(0, **LATE), hosts=("n1", "n2.site")),
        "rank 0 on n1: did not finish within 60 s; results came from no rank;"
        " only 1 of 2 ranks were started, none on n2.site", "",
    ),
    "launcher hung": (run(*good(), returncode=-9, timed_out=True), "but mpirun did not exit", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_failures(name: str) -> None:
    failed, message, evidence = FAILURES[name]
    judgement = judge_run(failed)
    assert judgement.status == "fail"
    assert message in judgement.message
    assert evidence in judgement.evidence
    assert judgement.remedy


@pytest.mark.parametrize(
    ("name", "causes"),
    [
        (
            "killed",
            ("was ended by its launcher, after rank 1 on n1 failed", "was ended by SIGKILL"),
        ),
        ("wrong sums", ("", "2 of 30 reductions are wrong")),
        (
            "exit code",
            ("exited with code 1 (ImportError: x)", "exited with code 1 (ImportError: y)"),
        ),
        ("local size", ("the local size on n1 is not 2",) * 2),
        ("missed by Horovod", ("hangs, after rank 1 on n1 failed", "hangs")),
    ],
)
def test_why_each_rank_failed(name: str, causes: tuple[str, ...]) -> None:
    assert tuple(causes_by_rank(FAILURES[name][0])) == causes
    assert causes_by_rank(run(*good())) == ["", ""]


def test_what_ranks_say_is_not_taken_for_a_cause_where_another_rank_broke_first() -> None:
    """The first to break was killed; that others then find nobody explains nothing."""
    secondary = exited(0, code=1, tail="ncclAllReduce failed: unhandled system error")
    judgement = judge_run(run(started(0), started(1), secondary, KILLED))
    assert judgement.message == "rank 1 on n1: was ended by SIGKILL"


def test_a_kill_is_explained_by_what_the_launcher_reports_of_that_rank() -> None:
    said = "srun: error: n1: task {}: Killed"
    for task, cause in (
        (1, ": a process was killed by the system (Killed): usually memory ran out"),
        (0, ""),
    ):
        judgement = judge_run(run(started(0), started(1), KILLED, tail=said.format(task)))
        assert judgement.message.startswith("rank 1 on n1: was ended by SIGKILL" + cause)
        assert ("memory" in judgement.message) == (task == 1)


def test_that_late_ranks_are_killed_is_not_taken_for_a_cause() -> None:
    late = [started(0), overdue(0, "in wait"), exited(0, **LATE)]
    said = "mpirun noticed that process rank 0 with PID 0 on node n1 exited on signal 9 (Killed)."
    judgement = judge_run(run(*late, size=1, tail=said, returncode=137, timeout=60.0))
    message = "rank 0 on n1: did not finish within 60 s; results came from no rank"
    assert judgement.message == message
    assert said in judgement.evidence


@pytest.mark.parametrize(
    ("library", "wanted"),
    [("Open MPI v5.0.11", "pmix"), ("MPICH Version: 5.0.2", "pmi2"), ("", "pmix")],
)
def test_under_srun_the_right_pmi_is_named(library: str, wanted: str) -> None:
    argv = ("srun", "-n", "2", "--mpi=none", "x")
    judgement = judge_run(run(*alone(library), launcher="srun", argv=argv))
    assert "each reports that it is alone" in judgement.message
    assert "srun was started with --mpi=none" in judgement.remedy
    assert f'launch.srun_mpi in the recipe to "{wanted}"' in judgement.remedy
    assert library in judgement.evidence


def test_hosts_may_have_different_numbers_of_ranks() -> None:
    def on(host: str, rank: int, local_rank: int, local_size: int) -> list[Received]:
        right = reduced(rank, 3, host=host, local_rank=local_rank, local_size=local_size)
        return [started(rank, host), *right, exited(rank, host=host)]

    events = [*on("n1", 0, 0, 2), *on("n1", 1, 1, 2), *on("n2", 2, 0, 1)]
    assert judge_run(run(*events, size=3, hosts=("n1", "n2"))).status == "pass"
    assert judge_run(run(*good(), hosts=("localhost",))).status == "pass"
    assert "are on n1, not n2" in judge_run(run(*good(), hosts=("n2",))).message


def test_a_rank_that_leaves_in_the_middle_of_an_exercise() -> None:
    early = run(
        *good()[:7], exited(1, stage="operations", detail="join"), exercises=("operations",)
    )
    judgement = judge_exercise(early, "operations")
    assert judgement and judgement.status == "fail"
    assert judgement.message == "rank 1 on n1: exited too early, in operations (join)"
    whole = run(*good()[:7], exited(1, stage="shutdown"), exercises=("operations",))
    assert judge_exercise(whole, "operations") is None


@pytest.mark.parametrize(
    ("enabled", "logged", "status"),
    [
        (["MPI", "Gloo"], {"controller": ["MPI"]}, "pass"),
        (["MPI"], {"controller": ["GLOO"]}, "fail"),
        (["MPI"], {}, "pass"),  # an old Horovod that does not name its controller
        (["Gloo"], {}, "fail"),
        ([], {}, "unproven"),
    ],
)
def test_which_controller_ranks_used(
    enabled: list[str], logged: dict[str, list[str]], status: str
) -> None:
    judgement = judge_run(run(*good(2, DataPath(logged=logged), enabled=enabled)))
    assert judgement.status == status
