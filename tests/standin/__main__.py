"""``make standin``: a cluster to try things on."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.standin import Cluster, StandinError
from tests.support.modulesystems import KINDS, install
from tests.support.needs import INSTALL, Missing

ROOT = Path(__file__).resolve().parents[2]
FIRST = 32


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make standin ARGS=…", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="how many (default: 2)")
    parser.add_argument(
        "--gpus", type=int, default=4, metavar="N", help="of each host (default: 4)"
    )
    kind = parser.add_mutually_exclusive_group()
    for name in KINDS:
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name)
    parser.add_argument(
        "--share",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a directory below /tmp that the hosts see too (repeatable)",
    )
    parser.set_defaults(kind="lmod")
    return parser.parse_args()


def description(cluster: Cluster) -> str:
    hosts = ", ".join(f"{name} ({address})" for name, address in cluster.addresses.items())
    return f"""hosts        {hosts}; ssh NAME
Slurm        partition {cluster.partition}; sinfo, srun, sbatch, squeue
modules      {cluster.modulefiles} (put modulefiles there)
network      {cluster.interface}, on the hosts and here
logs         {cluster.folder}/hosts, {cluster.folder}/slurm
elsewhere    export SLURM_CONF={cluster.environ["SLURM_CONF"]} PATH={cluster.folder}/bin:$PATH
"""


def use(cluster: Cluster) -> None:
    """A shell if somebody is there; otherwise until Ctrl-C."""
    if sys.stdin.isatty():
        print("exit or Ctrl-D ends the shell and the stand-in\n")
        variables = {**cluster.environ, "PS1": r"stand-in:\w$ "}
        subprocess.run(["bash", "--norc", "--noprofile", "-i"], env=variables, check=False)
    else:
        print("Ctrl-C ends it", flush=True)
        signal.pause()


def main() -> None:
    chosen = options()
    names = [f"gpu{number}" for number in range(FIRST, FIRST + chosen.hosts)]
    started = time.monotonic()
    try:
        modules = install(chosen.kind, ROOT / ".venv/modulesystems")
        with Cluster(
            hosts=names, gpus=chosen.gpus, modules=modules, shared=[ROOT, *chosen.share]
        ) as cluster:
            print(f"up in {time.monotonic() - started:.1f} s\n{description(cluster)}", flush=True)
            use(cluster)
    except Missing as missing:
        sys.exit(f"a stand-in of a cluster {missing}. As root on Debian or Ubuntu: {INSTALL}")
    except StandinError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
