"""Run by an environment's Python: the bounds of the training hold, and are narrow.

usage: python rounding.py FOLDER_OF_PROGRAMS

For a training with and without Keras, and several numbers of ranks, this computes in float32 what
correct ranks compute, and what ranks compute whose gradients are 2 % too large. It prints how
many trainings it tried.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy  # the environment has it

sys.path.insert(0, sys.argv[1])
training = importlib.import_module("training")
one = numpy.float32

SIZES = (1, 2, 3, 7, 64)


class Ranks:
    """Ranks that compute in float32."""

    def __init__(self, plan: Any, factor: float) -> None:
        self.plan, self.factor = plan, one(factor)
        self.velocity = plan.velocity

    def parameters(self) -> Any:
        """Those at the end."""
        weights = self.plan.starts.copy()
        for rows in self.plan.steps:
            gradients = []
            for rank, samples in enumerate(rows):
                x, y = (array[samples] for array in self.plan.data)
                share = one(2 / y.size) * (x.T @ (x @ weights[rank] - y))
                gradients.append(share)
            weights[:] = weights[0] - one(training.RATE) * self.update(gradients)
        return weights[0]

    def update(self, gradients: list[Any]) -> Any:
        mean = self.factor * sum(gradients) / one(len(gradients))
        self.velocity = one(training.MOMENTUM) * self.velocity + mean
        return self.velocity


def main() -> None:
    tried = 0
    for keras in (False, True):
        for size in SIZES:
            plan = training.make_plan(numpy, size, keras)
            right = training.compare(numpy, plan, 0, Ranks(plan, 1.0).parameters())
            assert right["difference"] <= right["bound"] / 2, (keras, size, right)
            found = training.compare(numpy, plan, 0, Ranks(plan, 1.02).parameters())
            assert found["difference"] > found["bound"], (keras, size, found)
            tried += 1
    print(tried)


main()
