"""Run the commands of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hvdenv.base.command import Command, Outcome, spelled_out
from hvdenv.base.errors import NetworkError, StepError
from hvdenv.base.places import make_folder, reporting
from hvdenv.base.runner import Runner
from hvdenv.knowledge.diagnosis import explain
from hvdenv.plans.step import Progress, Step
from hvdenv.sites import module_shell

# Signatures of failures that another way to resolve the packages would repeat.
NETWORK = ("host-unknown", "connect-failed", "index-proxy", "tls-failed")


def perform(steps: Sequence[Step], runner: Runner, progress: Progress) -> str:
    """Run the steps of a Resolution; returns the output of the last one.

    Raises:
        StepError: a step failed.
    """
    outcome = Outcome(Command(()), 0, "", 0.0)
    for number, step in enumerate(steps, 1):
        started = time.monotonic()
        progress.step_started(number, step)
        if step.modules:
            loaded = module_shell.load(step.modules, "build", runner)
            runner = runner.changed(loaded.set, loaded.unset)
        outcome = attempt(step, runner, progress)
        if not outcome:
            raise failure(step, outcome, "the packages of the lock")
        progress.step_done(number, step, "", time.monotonic() - started)
    return outcome.output


def attempt(step: Step, runner: Runner, progress: Progress, log: Path | None = None) -> Outcome:
    """Write the files of a step and run its commands, up to the first that fails.

    Returns its outcome, or that of the last command with the output of all.
    """
    for file in step.files:
        make_folder(file.path.parent)
        with reporting(file.path, inside=True):
            file.path.write_text(file.text, encoding="utf-8", errors="surrogateescape")
    done = Outcome(Command(()), 0, "", 0.0)
    for command in step.commands:
        if log:
            with reporting(log, inside=True), log.open("a", encoding="utf-8") as stream:
                stream.write(f"$ {spelled_out(command)}\n")
        outcome = runner.run(command, log=log, on_line=progress.step_line)
        if not outcome:
            return outcome
        done = outcome._replace(output=done.output + outcome.output)
    return done


def failure(step: Step, outcome: Outcome, where: str) -> StepError:
    """The error if a command of a step has failed."""
    known = explain(outcome.output)
    kind = NetworkError if known and known.id in NETWORK else StepError
    return kind(
        f"{step.name} failed" + (f": {known.cause}" if known else ""),
        where=where,
        detail=outcome.tail(15),
        remedy=known.remedy if known else "",
    )
