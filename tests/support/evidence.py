"""What verify found out about an installation, as its checks get it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from hvdenv.base.command import Command, Outcome
from hvdenv.verification.evidence import Evidence, known
from hvdenv.verification.inspection import Extension


def failed(error: Exception) -> Future[Any]:
    """What could not be found out."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


_NOTHING = failed(LookupError("this test has no such evidence"))


def evidence(**values: Any) -> Evidence:
    """Evidence with these values; everything else was not found out."""
    required = Evidence._fields[: -len(Evidence._field_defaults)]
    fields: dict[str, Any] = {**dict.fromkeys(required, _NOTHING), "extensions": {}}
    for name, value in values.items():
        several = name in ("extensions", "runs", "benchmarks")
        fields[name] = {k: known(v) for k, v in value.items()} if several else known(value)
    return Evidence(**fields)


def outcome(output: str = "", returncode: int = 0, *, timed_out: bool = False) -> Outcome:
    return Outcome(Command(("x",), timeout=60.0), returncode, output, 1.0, timed_out)


def by_framework(*extensions: Extension) -> dict[str, Extension]:
    return {each.framework: each for each in extensions}
