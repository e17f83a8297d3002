"""What a rank does: one process of Horovod, watched over by rank.py.

usage: python rank_work.py FRAMEWORK CONTROLLER DEVICE REPORT_FD DUMP_SECONDS [EXERCISE...]

Reports are lines of JSON to REPORT_FD: ``extension``, what extension.py says of this
rank's Horovod; ``joined``, its numbers; ``stage``, what comes next; ``result`` and ``path``,
what came of the allreduces and how their data went; and what the exercises found. DEVICE is
gpu where ranks may use NCCL, and host where they must not. Where CONTROLLER was not built in,
nothing is joined. An EXERCISE is NAME or NAME=OPTION: the function run(context, option) of
rank_NAME.py; the allreduces of rank_allreduce.py come before all of them. After DUMP_SECONDS
the stacks of all threads go to standard error. Runs on Python 3.6 and up.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(1, os.path.join(os.path.dirname(HERE), "inspect"))
import events  # noqa: E402
import extension  # noqa: E402
import rank_allreduce  # noqa: E402
import rank_gpu  # noqa: E402
import rank_path  # noqa: E402


class Context:
    """What exercises work with.

    Attributes:
        framework: ``torch`` or ``tensorflow``.
        controller: ``MPI`` or ``Gloo``.
        native: the framework's module.
        hvd: Horovod's module for it.
        version: of the framework.
        gpu: this rank's GPU as the framework calls it; empty without one.
        device: where tensor() puts its values: that GPU, or empty for the host's memory.
        waited: seconds within waiting() so far.
    """

    def __init__(self, framework, controller, descriptor):
        self.framework = framework
        self.controller = controller
        self._descriptor = descriptor
        self.native = importlib.import_module(framework)  # first: Horovod needs its libraries
        self.hvd = importlib.import_module("horovod." + framework)
        self.version = str(self.native.__version__)
        self.gpu = self.device = ""
        self.waited = 0.0
        if framework == "torch":
            self.native.set_num_threads(1)
        elif not self.native.executing_eagerly():
            self.native.compat.v1.enable_eager_execution()

    def report(self, event):
        """Report one of the events of events.py to this rank's supervisor, rank.py."""
        line = json.dumps(events.to_json(event)) + "\n"
        os.write(self._descriptor, line.encode("ascii"))

    def stage(self, name, detail=""):
        """Say what is tried next, so that a rank that ends there can be judged by it."""
        self.report(events.Stage(name, detail))

    @contextlib.contextmanager
    def waiting(self):
        """Within it, this rank depends on others, and its seconds are not its own."""
        began = time.time()
        try:
            yield
        finally:
            self.waited += time.time() - began

    def tensor(self, array):
        """The framework's tensor with an array's values, where `device` says."""
        if self.framework == "torch":
            return self.native.from_numpy(array).to(self.device or "cpu")
        with self.native.device(self.device or "/cpu:0"):
            return self.native.constant(array)

    def array(self, tensor):
        """A tensor's values as an array of numpy."""
        return tensor.cpu().numpy() if self.framework == "torch" else tensor.numpy()

    def numbers(self):
        """Where this rank is among all."""
        names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
        return {name: getattr(self.hvd, name, lambda: None)() for name in names}


def main(framework, controller, device, report_fd, dump_seconds, *wanted):
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(dump_seconds))
    exercises = [word.partition("=") for word in wanted]
    modules = {name: importlib.import_module("rank_" + name) for name, _, _ in exercises}
    del sys.path[:2]  # hvdenv's folders: their file names must not stand in for modules
    context = Context(framework, controller, int(report_fd))
    facts = events.ExtensionFacts(**extension.files(framework), **extension.imported(framework))
    context.report(facts)
    if facts.built.get(controller) == 0:
        return
    context.hvd.init()
    context.report(events.Joined(**context.numbers()))
    context.stage("allreduce")
    gpu = rank_gpu.take(context, facts.built, device)
    rank_allreduce.run(context)
    rank_path.run(context, gpu)
    for name, _, option in exercises:
        context.stage(name)
        modules[name].run(context, option)
    context.stage("shutdown")
    context.hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
