"""Arguments of horovodrun that a recipe may add: those of Horovod 0.28.1 that start no other program.

Source: horovod/runner/launch.py of v0.28.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hvdenv.schema import nearest

_FLAGS = frozenset({
    "--verbose", "--prefix-output-with-timestamp", "--hierarchical-allreduce",
    "--no-hierarchical-allreduce", "--hierarchical-allgather", "--no-hierarchical-allgather",
    "--torus-allreduce", "--no-torus-allreduce", "--autotune", "--no-autotune",
    "--timeline-mark-cycles", "--no-timeline-mark-cycles", "--stall-check", "--no-stall-check",
    "--mpi-threads-disable", "--no-mpi-threads-disable", "--tcp", "--log-with-timestamp",
    "--log-without-timestamp",
})  # fmt: skip
_WITH_VALUE = frozenset({
    "--start-timeout", "--output-filename", "--ssh-port", "--ssh-identity-file",
    "--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--autotune-log-file",
    "--autotune-warmup-samples", "--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples",
    "--autotune-gaussian-process-noise", "--timeline-filename",
    "--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds",
    "--num-nccl-streams", "--thread-affinity", "--gloo-timeout-seconds", "--log-level",
})  # fmt: skip
# hvdenv sets these from other keys and options.
_OWN = {
    "--np": "-n",
    "--num-proc": "-n",
    "--hosts": "--hosts",
    "--hostfile": "--hostfile",
    "--network-interface": "network.use",
    "--network-interfaces": "network.use",
    "--mpi-args": "launch.mca",
    "--gloo": "launch.launcher",
    "--mpi": "launch.launcher",
}


def problems(arguments: Iterable[str]) -> Iterator[tuple[int, str]]:
    """What is wrong with arguments, by their place in the list."""
    for number, argument in enumerate(arguments):
        name, equals, _ = argument.partition("=")
        if name in _OWN:
            yield number, f"hvdenv sets {name} itself: use {_OWN[name]}"
        elif name not in _FLAGS | _WITH_VALUE:
            yield number, f"unknown argument of horovodrun{nearest(name, _FLAGS | _WITH_VALUE)}"
        elif bool(equals) != (name in _WITH_VALUE):
            yield number, f"{name} {'has no value' if equals else f'needs a value: {name}=VALUE'}"
