"""An elastic job: training that loses a rank and a host, and gains a host.

The option is the path of a JSON file with ``steps`` (of each world), ``then`` (what follows each
world but the last), ``hosts`` (the file that the discovery script prints) and ``patience`` (how
long to wait for the driver, in seconds). A world is the set of ranks between two changes. What
follows it is ["kill", HOST], ["hosts", TEXT] or ["wait", ""]: a rank of a host kills itself, the
discovery script prints something else, or Horovod takes a host back by itself.

Each step adds a known number to the gradient, whatever the number of ranks, so that the parameter
after N steps is known exactly. It is committed after each step, except for the last step before a
rank is killed. Needs torch. Runs on Python 3.6 and newer.
"""

import importlib
import json
import os
import signal
import time
from typing import Any, Dict

import events
from context import Context

STAGE = "elastic"
PAUSE = 0.1
SPOILED = 1e6


class Job:
    """The training of one process, which may be part of several worlds."""

    def __init__(self, context: Context, plan: Dict[str, Any]) -> None:
        self.context, self.hvd, self.plan = context, context.hvd, plan
        self.host = os.environ.get("HOROVOD_HOSTNAME", "")
        torch = context.native
        model = torch.nn.Linear(1, 1, bias=False).double()
        self.parameter = model.weight
        self.parameter.data.zero_()
        self.optimizer = self.hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
            named_parameters=model.named_parameters(),
            op=self.hvd.Sum,
        )
        own = {"model": model, "optimizer": self.optimizer, "step": 0, "world": 0}
        self.state = self.hvd.elastic.TorchState(**own)

    def stage(self, detail: str) -> None:
        self.context.stage(STAGE, detail)

    def live(self, state: Any) -> None:
        """Train in one world after the other, until the last one ends."""
        changes: Any = importlib.import_module("horovod.common.exceptions")
        try:
            while self.in_world(state):
                pass
        except (changes.HorovodInternalError, changes.HostsUpdatedInterrupt) as error:
            self.stage("meeting the other ranks after {}".format(type(error).__name__))
            raise

    def in_world(self, state: Any) -> bool:
        """Train in one world until it changes, which raises an exception; False at the end."""
        number = self.look()
        state.world = number + 1  # of the next one
        state.save()
        self.stage("training in world {}".format(number))
        for _ in range(self.plan["steps"]):
            self.step()
            state.commit()
        if number >= len(self.plan["then"]):
            state.world = number + 1
            self.look()
            return False
        what, argument = self.plan["then"][number]
        if what == "kill":
            self.lose_a_rank(argument)
        if what == "hosts" and self.hvd.rank() == 0:
            with open(self.plan["hosts"] + ".new", "w") as stream:
                stream.write(argument)
            os.rename(stream.name, self.plan["hosts"])
        self.stage("waiting for a change of hosts in world {}".format(number))
        for _ in range(int(self.plan["patience"] / PAUSE)):
            time.sleep(PAUSE)
            state.commit()
        late = "horovodrun announced no change of hosts within {:g} s"
        raise RuntimeError(late.format(self.plan["patience"]))

    def look(self) -> int:
        """Report what the rank finds in this world; returns its number, as rank 0 knows it."""
        torch, hvd, state = self.context.native, self.hvd, self.state
        self.stage("the first allreduce in world {}".format(state.world))
        numbers = torch.tensor([hvd.rank() + 1, state.world if hvd.rank() == 0 else 0])
        total, number = hvd.allreduce(numbers, op=hvd.Sum, name="elastic.look").tolist()
        self.context.report(self.context.numbers())
        self.context.report(
            events.World(
                number=number,
                rank=hvd.rank(),
                size=hvd.size(),
                step=state.step,
                value=self.parameter.item(),
                total=total,
            )
        )
        return int(number)

    def step(self) -> None:
        """Train; the ranks' gradients add up to the number of the step."""
        rank, size = self.hvd.rank(), self.hvd.size()
        self.state.step += 1
        share = rank if rank else self.state.step - size * (size - 1) // 2
        self.optimizer.zero_grad()
        (self.parameter.sum() * share).backward()
        self.optimizer.step()

    def lose_a_rank(self, host: str) -> None:
        """End the first rank of a host, after a step that nobody commits.

        Raises:
            HorovodInternalError: on the other ranks, and the state is spoiled by then.
        """
        self.stage("ranks of {} are killed".format(host))
        self.step()
        if self.host == host:
            os.kill(os.getpid(), signal.SIGKILL)
        self.parameter.data.fill_(SPOILED)
        while True:
            self.step()


def run(context: Context, option: str) -> None:
    with open(option) as stream:
        plan = json.load(stream)
    context.stage(STAGE, "meeting the other ranks")
    context.hvd.init()
    context.report(context.numbers())
    job = Job(context, plan)
    context.hvd.elastic.run(job.live)(job.state)
