from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hvdenv.base.command import Command
from hvdenv.base.errors import InterruptedRunError, StepError
from hvdenv.base.runner import (
    ENDING,
    LINE_LIMIT,
    TOKEN_VARIABLE,
    Runner,
    _lines,
    clean,
    end_marked,
    handled,
    interrupts,
    undisturbed,
)
from tests.support.files import write
from tests.support.waiting import runs, wait_until


def sh(script: str, **options: float) -> Command:
    return Command(("sh", "-c", script), timeout=options.get("timeout"))


def python(program: str) -> Command:
    return Command((sys.executable, "-c", program))


def test_output_and_exit_codes() -> None:
    outcome = Runner().run(sh("echo out; echo err >&2; exit 3"))
    assert (outcome.output, outcome.returncode, bool(outcome)) == ("out\nerr", 3, False)
    assert not outcome.timed_out
    assert Runner().run(sh("exit 0"))
    assert Runner().run(sh("kill -9 $$")).returncode == -signal.SIGKILL


def test_the_environment_is_cleaned_then_set() -> None:
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": "/x", "CFLAGS": "-g", "KEPT": "1"}
    outcome = Runner(given, "t").run(Command(("env",), (("CFLAGS", "-O2"), ("B", "2"))))
    seen = dict(line.split("=", 1) for line in outcome.output.splitlines())
    assert seen.pop("PATH")
    own = {"PYTHONNOUSERSITE": "1", "PIP_USER": "0", "LC_ALL": "C.UTF-8", TOKEN_VARIABLE: "t"}
    assert seen == {"KEPT": "1", "CFLAGS": "-O2", "B": "2", **own}


def test_paths_of_pip_are_those_of_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {"PIP_INDEX_URL": "simple", "PIP_CONFIG_FILE": "my dir", "REQUESTS_CA_BUNDLE": "ca.pem"}
    for name in (*paths.values(), "wheels"):
        write(tmp_path / name, "")
    monkeypatch.chdir(tmp_path)
    links, device = "wheels https://x/wheels ~/none", {"PIP_CERT": os.devnull}
    found = clean({**paths, **device, "PIP_FIND_LINKS": links})
    absolute = {name: f"{tmp_path}/{path}" for name, path in paths.items()}
    expected = {**absolute, **device, "PIP_FIND_LINKS": f"{tmp_path}/{links}"}
    assert expected.items() <= found.items()


def test_a_branch_sees_what_it_is_given() -> None:
    given = {"PATH": os.environ["PATH"], "KEPT": "1", "LD_PRELOAD": "x.so"}
    runner = Runner(given, "t")
    assert runner.branch().environment(Command(("x",)))["KEPT"] == "1"
    assert "LD_PRELOAD" not in runner.branch().environment(Command(("x",)))
    assert runner.changed({"A": "1"}).branch().given == given
    branch = runner.branch({"PATH": os.environ["PATH"], "LD_PRELOAD": "x.so"})
    assert branch.token.startswith("t.")
    seen = branch.environment(Command(("x",)))
    assert (seen["LD_PRELOAD"], seen["LC_ALL"], "KEPT" in seen) == ("x.so", "C.UTF-8", False)
    runner.stop()
    with pytest.raises(InterruptedRunError):
        branch.run(sh("true"))


def test_the_folder_and_standard_input(tmp_path: Path) -> None:
    assert Runner().run(Command(("pwd",), cwd=str(tmp_path))).output == str(tmp_path)
    assert Runner().run(Command(("cat",))).output == ""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (Command(("/none/program",)), "cannot start /none/program: No such file or directory"),
        (Command(("no-such-program",)), "cannot start no-such-program: No such file or directory"),
        (Command(("/etc/passwd",)), "cannot start /etc/passwd: Permission denied"),
        (Command(("true",), cwd="/none"), "cannot start true: No such file or directory"),
        (Command(("none",), cwd="/"), "cannot start none: No such file or directory"),
    ],
)
def test_what_cannot_be_started(command: Command, said: str) -> None:
    with pytest.raises(StepError) as caught:
        Runner().run(command)
    assert caught.value.message == said
    assert caught.value.where in ("", "/none")
    assert caught.value.remedy


def test_lines_as_they_come(tmp_path: Path) -> None:
    log, lines = tmp_path / "log", list[str]()
    printed = sh(r"printf 'a\r\nb\rc\n\n\377last'")
    outcome = Runner().run(printed, log=log, on_line=lines.append)
    assert lines == ["a", "b", "c", "", "\N{REPLACEMENT CHARACTER}last"]
    assert outcome.output == "\n".join(lines)
    assert log.read_text() == f"{outcome.output}\n"
    assert outcome.tail(2) == "\n\N{REPLACEMENT CHARACTER}last"


def test_a_line_comes_before_the_process_ends(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    waits = sh(f"echo now; until test -e {seen}; do sleep 0.05; done", timeout=60)
    assert Runner().run(waits, on_line=lambda _: seen.touch())


def test_a_log_that_cannot_be_written_is_an_error_that_names_it() -> None:
    with pytest.raises(StepError, match="/dev/full: cannot write the log: No space left"):
        Runner().run(sh("echo x"), log=Path("/dev/full"))


def test_log_and_output_are_masked(tmp_path: Path) -> None:
    log, lines = write(tmp_path / "log", "before\n"), list[str]()
    print_it = sh(r"echo https://u:secret@host/; printf '\033[31mit is %s\033[0m\n' $A_TOKEN")
    runner = Runner({"A_TOKEN": "x1y2z3", "PATH": os.defpath})
    outcome = runner.run(print_it, log=log, on_line=lines.append)
    assert lines == ["https://***@host/", "it is ***"]
    assert log.read_text() == "before\nhttps://***@host/\nit is ***\n"
    assert outcome.output == "https://***@host/\nit is ***"


@pytest.mark.parametrize("before", [65_530, 65_536, 131_060])
def test_a_secret_in_a_long_line_is_masked_although_it_comes_in_pieces(before: int) -> None:
    """Also if the program writes it in two parts."""
    secret = "x1y2z3" * 5
    program = f"import os; print('.' * {before}, end=os.environ['A_TOKEN'][:9], flush=True)\n"
    program += "print(os.environ['A_TOKEN'][9:] + '.' * 70000)"
    runner = Runner({"A_TOKEN": secret, "PATH": os.defpath})
    output = runner.run(Command((sys.executable, "-c", program))).output
    assert output.count("***") == 1
    assert set(output.replace("***", "")) == {".", "\n"}


@pytest.mark.parametrize(
    ("width", "count"), [(79, 11_250), (0, 40_000), (300_000, 3), (5 << 20, 0)]
)
def test_a_huge_output_is_bounded(
    width: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of empty lines, one whose lines are very long, and one without an end of line."""
    monkeypatch.setattr("hvdenv.base.runner.OUTPUT_LIMIT", 20_000)
    log, line = tmp_path / "log", f"'x' * {width}"
    program = f"print(({line} + '\\n') * {count} + 'last')" if count else f"print({line}, end='')"
    outcome = Runner().run(python(program), log=log)
    assert outcome.output.endswith("last" if count else "x")
    assert len(outcome.output) <= 20_000 + 3 * LINE_LIMIT
    assert max(map(len, outcome.output.split("\n"))) <= 3 * LINE_LIMIT
    assert log.stat().st_size >= (count * (width + 1) or width)


# A grandchild that has left the session, ignores SIGTERM and closed the pipe.
STUBBORN = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(sys.argv[1], "w").write(str(os.getpid()))
    devnull = os.open("/dev/null", os.O_RDWR)
    os.dup2(devnull, 1), os.dup2(devnull, 2)
    time.sleep(600)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_timeout_ends_the_whole_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    # The minute is over once both processes run.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 60 * len(passed))
    monkeypatch.setattr("hvdenv.base.runner.time", clock)
    command = Command((sys.executable, "-c", STUBBORN, str(tmp_path / "pid")), timeout=60.0)
    outcome = Runner().run(command, on_line=passed.append)
    assert outcome.timed_out
    assert not outcome
    assert outcome.returncode == -signal.SIGKILL
    assert outcome.output == "ready"
    wait_until(lambda: not runs(int((tmp_path / "pid").read_text())))
    assert outcome.seconds < 120


@pytest.mark.parametrize(
    "script", ["trap '' TERM; while :; do sleep 0.1; done", "while :; do echo x; done"]
)
def test_a_timeout_ends_what_ignores_it_and_what_prints(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdenv.base.runner.GRACE_SECONDS", 0.2)
    outcome = Runner().run(sh(script, timeout=0.3))
    assert outcome.timed_out
    assert outcome.seconds < 60


def test_stop_from_another_thread(tmp_path: Path) -> None:
    runner, pid = Runner(), tmp_path / "pid"
    command = Command((sys.executable, "-c", STUBBORN, str(pid)))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(runner.run, command)
        wait_until(lambda: pid.exists() and pid.read_text() != "")
        runner.stop()
        with pytest.raises(InterruptedRunError):
            running.result(60)
    wait_until(lambda: not runs(int(pid.read_text())))
    with pytest.raises(InterruptedRunError):
        runner.run(sh("true"))


def test_an_error_of_who_reads_the_lines_ends_the_process(tmp_path: Path) -> None:
    def fail(line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="^[0-9]+$") as caught:
        Runner().run(sh("echo $$; sleep 600"), on_line=fail)
    wait_until(lambda: not runs(int(str(caught.value))))


def test_last_words_are_read_though_nobody_looks_while_a_process_ends() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 0.3; echo last"], stdout=subprocess.PIPE) as process:
        process.poll = process.wait  # type: ignore[method-assign]  # a machine that stalls there
        assert [line for line in _lines(process) if line is not None] == ["last"]


@pytest.mark.parametrize("orphan", ["sleep 600", "while :; do echo x; sleep 0.01; done"])
def test_an_orphan_that_keeps_the_pipe_does_not_hold_us(orphan: str) -> None:
    runner = Runner()
    started = time.monotonic()
    outcome = runner.run(sh(f"({orphan}) & echo done"))
    assert outcome
    assert "done" in outcome.output.splitlines()
    assert time.monotonic() - started < 60
    end_marked(runner.token)  # what writes has ended by itself: nobody reads


def test_only_what_carries_the_token_is_ended() -> None:
    def carrying(token: str) -> list[int]:
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get(TOKEN_VARIABLE) == token:
                    found.append(process.pid)
        return found

    mine, other = Runner(), Runner()
    with ThreadPoolExecutor() as pool:
        outcomes = [pool.submit(each.run, sh("echo up; sleep 600")) for each in (mine, other)]
        wait_until(lambda: len(carrying(mine.token)) == len(carrying(other.token)) == 2)
        assert len(end_marked(mine.token)) == 2
        assert outcomes[0].result(60).returncode == -signal.SIGKILL
        assert len(carrying(other.token)) == 2
        end_marked(other.token)


def test_a_short_command_costs_no_waiting() -> None:
    runner = Runner()
    runner.run(sh("true"))
    # A busy machine has a better moment; who waits a tenth of a second always does.
    wait_until(lambda: runner.run(sh("true")).seconds < 0.05)


def test_variables_made_from_others_of_the_process() -> None:
    runner = Runner({"PATH": "/usr/bin"}).changed({"EBROOTNCCL": "/sw/nccl"})
    derived = {"PATH": "/env/bin:$PATH", "NCCL": "$EBROOTNCCL/lib", "TWO": "$HERE:$HERE"}
    command = Command(("true",), (("HERE", "/h"),), derived=tuple(derived.items()))
    expected = {"PATH": "/env/bin:/usr/bin", "NCCL": "/sw/nccl/lib", "TWO": "/h:/h"}
    assert expected.items() <= runner.environment(command).items()
    with pytest.raises(StepError, match=r"NCCL .* no module sets EBROOTNCCL"):
        Runner({"PATH": "/usr/bin"}).environment(command)


def test_signals_are_put_off_and_not_lost() -> None:
    heard: list[str] = []
    with handled(ENDING, lambda number, _: heard.append(signal.Signals(number).name)):
        with undisturbed():
            signal.raise_signal(signal.SIGTERM)
            with undisturbed():
                signal.raise_signal(signal.SIGINT)
            assert heard == []
        assert heard == ["SIGTERM"]  # one is enough
        with suppress(ValueError), undisturbed():
            signal.raise_signal(signal.SIGHUP)
            raise ValueError
        assert heard == ["SIGTERM", "SIGHUP"]
        thread = threading.Thread(target=lambda: undisturbed().__enter__())
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted(program: str) -> str:
    """Run a program that interrupts itself; returns what it prints."""
    return subprocess.run(
        [sys.executable, "-c", program], text=True, capture_output=True, check=True, timeout=120
    ).stdout


@pytest.mark.parametrize("number", ENDING, ids=lambda each: each.name)
def test_no_interrupt_is_lost_in_a_destructor(number: signal.Signals) -> None:
    class Owner:
        def __del__(self) -> None:
            signal.raise_signal(number)
            ended.append("never")  # the exception ended this method, and was ignored

    def work() -> None:
        with interrupts():
            Owner()
            time.sleep(10)

    ended: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        work()
    assert not ended
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_signals_in_quick_succession_do_not_wait_for_each_other() -> None:
    said = interrupted("""
import signal
from hvdenv.base.runner import Runner
runner = Runner()
signal.signal(signal.SIGALRM, lambda number, frame: runner.stop())
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
for _ in range(50_000):
    runner.stop()
signal.setitimer(signal.ITIMER_REAL, 0)
print(runner.stopped)
""")
    assert said == "True\n"


def test_an_interrupt_at_any_moment_of_a_start_leaves_nothing() -> None:
    said = interrupted("""
import random, signal
from hvdenv.base.command import Command
from hvdenv.base.runner import Runner, end_marked
runner = Runner()
for each in range(40):
    # The signal comes while the process is started, or soon after.
    signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + each * 0.0002)
        runner.run(Command(("sleep", "100"), timeout=60))
    except KeyboardInterrupt:
        pass
print(end_marked(runner.token))
""")
    assert said == "[]\n"
