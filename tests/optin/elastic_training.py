"""An elastic training that loses a rank and a host, and gains a host.

usage: elastic_training.py PLAN

PLAN is the path of a JSON file with ``steps`` (of each world), ``then`` (what follows each world
but the last), ``hosts`` (the file that the discovery script prints), ``worlds`` (the file to report
to) and ``patience`` (how long to wait for the driver, in seconds). A world is the set of ranks between two changes. What
follows it is ["kill", HOST], ["hosts", TEXT] or ["wait", ""]: a rank of a host kills itself, the
discovery script prints something else, or Horovod takes a host back by itself.

Each step adds a known number to the gradient, whatever the number of ranks, so that the parameter
after N steps is known exactly. It is committed after each step, except for the last step before a
rank is killed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

PAUSE = 0.1
SPOILED = 1e6


class Job:
    """The training of one process, which may be part of several worlds."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        model = torch.nn.Linear(1, 1, bias=False).double()
        self.parameter = model.weight
        self.parameter.data.zero_()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
            named_parameters=model.named_parameters(),
            op=hvd.Sum,
        )
        own = {"model": model, "optimizer": self.optimizer, "step": 0, "world": 0}
        self.state = hvd.elastic.TorchState(**own)

    def live(self, state: Any) -> None:
        """Train in one world after the other, until the last one ends."""
        while self.in_world(state):
            pass

    def in_world(self, state: Any) -> bool:
        """Train in one world until it changes, which raises an exception; False at the end."""
        number = self.look()
        state.world = number + 1  # of the next one
        state.save()
        for _ in range(self.plan["steps"]):
            self.step()
            state.commit()
        if number >= len(self.plan["then"]):
            self.look()
            return False
        what, argument = self.plan["then"][number]
        if what == "kill":
            self.lose_a_rank(argument)
        if what == "hosts" and hvd.rank() == 0:
            new = Path(self.plan["hosts"] + ".new")
            new.write_text(argument)
            new.rename(self.plan["hosts"])
        for _ in range(int(self.plan["patience"] / PAUSE)):
            time.sleep(PAUSE)
            state.commit()
        raise RuntimeError("horovodrun announced no change of hosts")

    def look(self) -> int:
        """Report what the rank finds in this world; returns its number, as rank 0 knows it."""
        rank, size, state = hvd.rank(), hvd.size(), self.state
        numbers = torch.tensor([rank + 1, state.world if rank == 0 else 0])
        total, number = hvd.allreduce(numbers, op=hvd.Sum, name="look").tolist()
        world = [number, rank, size, state.step, self.parameter.item(), total]
        with open(self.plan["worlds"], "a") as stream:
            stream.write(f"{json.dumps(world)}\n")
        return int(number)

    def step(self) -> None:
        """Train; the ranks' gradients add up to the number of the step."""
        rank, size = hvd.rank(), hvd.size()
        self.state.step += 1
        share = rank if rank else self.state.step - size * (size - 1) // 2
        self.optimizer.zero_grad()
        (self.parameter.sum() * share).backward()
        self.optimizer.step()

    def lose_a_rank(self, host: str) -> None:
        """End the rank of a host, after a step that nobody commits.

        Raises:
            HorovodInternalError: on the other ranks, and the state is spoiled by then.
        """
        self.step()
        if os.environ["HOROVOD_HOSTNAME"] == host:
            os.kill(os.getpid(), signal.SIGKILL)
        self.parameter.data.fill_(SPOILED)
        while True:
            self.step()


def main(plan: str) -> None:
    hvd.init()
    job = Job(json.loads(Path(plan).read_text()))
    hvd.elastic.run(job.live)(job.state)


if __name__ == "__main__":
    main(sys.argv[1])
