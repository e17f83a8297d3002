"""The exercise ``rounds=N``: all of Horovod's operations N times, with new numbers each time.

sweep.py starts it. Messages beyond the limits of transports are part of every tenth round, since
they take most of the time. A rank reports one events.Operation for each operation, which counts
all rounds together.
"""

from __future__ import annotations

import re
from typing import Any

import collective_cases  # these two are beside rank_work.py
import collectives

BULK_EVERY = 10


def in_round(case: Any, number: int) -> Any:
    """A case with the numbers of a round. Its name stays, so that Horovod uses its cache."""
    name = case.name or re.sub(r"\W+", "_", f"{case.kind} {case.title}")
    return case._replace(label=f"{case.label} round {number}".strip(), name=name)


def is_bulky(case: Any) -> bool:
    """Whether a case is as large as those of collective_cases.bulky()."""
    width = collective_cases.WIDTHS.get(case.dtype, 1)
    most = max(map(collective_cases.elements, case.shapes), default=0) * width
    return case.rows == "large rows" or most >= collective_cases.BULK_BYTES


def add(total: Any, tally: Any) -> None:
    """Count the results of one round."""
    total.right += tally.right
    total.wrong += tally.wrong
    total.unproven, total.ended = tally.unproven, tally.ended
    total.skipped.update(tally.skipped)


def run(context: Any, option: str) -> None:
    """Try all operations `option` times, and report each at the end."""
    caller = collectives.Caller(context)
    totals: dict[str, Any] = {}
    for number in range(int(option)):
        for name, batches in collective_cases.operations(caller.size):
            total = totals.setdefault(name, collectives.Tally(name))
            chosen = [
                [
                    in_round(case, number)
                    for case in batch
                    if number % BULK_EVERY == 0 or not is_bulky(case)
                ]
                for batch in batches
            ]
            try:
                add(total, caller.try_all(name, [batch for batch in chosen if batch]))
            except collectives.Ended as error:
                add(total, error.args[0])
        if any(total.ended for total in totals.values()):
            break
    for total in totals.values():
        context.report(total.event())
