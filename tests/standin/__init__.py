"""A cluster on one machine, of real parts: hosts, ssh, Slurm and modules.

It needs root, namespaces, and a few packages of Debian; docs/how-to/try-a-cluster.md says what it is
like and what it is not.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from tests.standin import config
from tests.standin.gridengine import GridEngine
from tests.standin.machine import (
    StandinError,
    check_machine,
    enter,
    make_folder,
    run,
    wait_for,
)
from tests.support.modulesystems import Installed
from tests.support.needs import SYSTEM_PATH, Missing

__all__ = ["Cluster", "StandinError"]

HERE = Path(__file__).resolve().parent
INSIDE = ("mount", "net", "uts", "ipc", "pid")
LINK = "hvsi"
# Addresses for benchmarks of networks (RFC 2544): nothing else uses them.
NETWORK = "198.18"
NETWORKS = 200
CONTROLLER, HEAD = 253, 254
# What another Slurm or module system left in the environment.
FOREIGN = ("SLURM", "MODULE", "LMOD", "_LMFILES_", "LOADEDMODULES", "__MODULES", "_ModuleTable")


class Cluster:
    """Hosts with Slurm across them, for as long as the context lasts.

    The head is this machine as it is: commands with `environ` run there. Hosts see the
    same files, but /tmp, /dev/shm and /run are their own.

    Args:
        hosts: their names.
        partitions: of Slurm, with all hosts; the first is the default.
        gpus: that each host says it has.
        shared: directories below /tmp that the hosts see too.

    Attributes:
        hosts: names of the hosts.
        partition: name of the default partition.
        folder: what the stand-in keeps; gone with it.
        modulefiles: directory in MODULEPATH, empty at first.
        interface: the network interface that joins them all, of this name everywhere.
        addresses: of the hosts, by name.
        environ: variables for commands on the head, as after a login.

    Raises:
        Missing: on entering, when the machine lacks something.
        StandinError: on entering, when a part did not come up.
    """

    def __init__(
        self,
        *,
        hosts: Sequence[str] = ("gpu32", "gpu33"),
        partitions: Sequence[str] = ("amd_a100nv_8",),
        gpus: int = 4,
        modules: Installed,
        shared: Sequence[Path] = (),
    ) -> None:
        self.hosts = tuple(hosts)
        self.partition = partitions[0]
        self.folder = Path()
        self.modulefiles = Path()
        self.interface = ""
        self.addresses: dict[str, str] = {}
        self.environ: dict[str, str] = {}
        self._partitions = tuple(partitions)
        self._gpus = gpus
        self._modules = modules
        self._shared = tuple(shared)
        self._network = 0
        self._keeper = 0
        self._pids: dict[str, int] = {}
        self._ends = ExitStack()

    def __enter__(self) -> Cluster:
        check_machine(self._modules.kind)
        with ExitStack() as ends:
            self._hold(ends)
            self._claim_network()
            self._write_files()
            self._start_hosts(ends)
            self._start_slurm()
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = {},
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the head and keep what it prints.

        Args:
            argv: the command.
            env: variables on top of `environ`.
            check: whether a status other than 0 raises.
            timeout: seconds after which it and its children are killed.

        Raises:
            StandinError: it failed, and `check` is true.
            subprocess.TimeoutExpired: it took too long.
        """
        return run(argv, env={**self.environ, **env}, check=check, timeout=timeout)

    def on(
        self,
        host: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = {},
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, in its root directory; otherwise like `run`."""
        inside = enter(self._pids[host], *INSIDE)
        seen = {**config.FOR_RANKS, **env}
        return self.run([*inside, *argv], env=seen, check=check, timeout=timeout)

    def start_grid_engine(self, queue: str = "gpu.q") -> dict[str, str]:
        """Start Grid Engine on the same hosts; returns the variables that its programs need.

        Raises:
            Missing: the machine does not have it.
        """
        engine = GridEngine(self, self._keeper, queue)
        engine.start()
        return engine.variables

    def start_scheduler(self) -> None:
        """Start slurmctld, with the jobs that it knew."""
        self._on_controller("slurmctld", "-f", self.environ["SLURM_CONF"])
        wait_for(self._answers, "slurmctld does not answer", self.logs)

    def stop_scheduler(self) -> None:
        """Stop slurmctld; the hosts and what runs on them go on."""
        self.run(["scontrol", "shutdown", "slurmctld"])
        pid_file = self.folder / "slurm/slurmctld.pid"
        wait_for(lambda: not pid_file.exists(), "slurmctld does not stop", self.logs)

    def drain(self, host: str) -> None:
        """Let no new job on a host."""
        self.run(["scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=drained"])

    def resume(self, host: str) -> None:
        """Take a drained host back."""
        self.run(["scontrol", "update", f"NodeName={host}", "State=RESUME"])

    def unplug(self, host: str) -> None:
        """Take a host off the network; what runs on it goes on."""
        self._switch(f"link set port{self.hosts.index(host)} down")

    def plug(self, host: str) -> None:
        """Give a host its network back."""
        self._switch(f"link set port{self.hosts.index(host)} up")

    def logs(self) -> str:
        """The ends of the logs of everything that runs here."""
        texts = []
        for path in sorted(self.folder.rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-10:]
            texts.append("\n".join([f"{path.relative_to(self.folder)}:", *lines]))
        return "\n".join(texts)

    def _hold(self, ends: ExitStack) -> None:
        """Make the directory and the namespaces, which end with this process."""
        self.folder = make_folder()
        self.modulefiles = self.folder / "modulefiles"
        keeper = ends.enter_context(
            subprocess.Popen(
                ["sh", str(HERE / "keeper.sh"), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        assert keeper.stdout is not None
        self._keeper = int(keeper.stdout.readline())

    def _claim_network(self) -> None:
        """Make the link to this machine, which goes with the keeper.

        Its name is taken by one stand-in only.
        """
        for self._network in range(NETWORKS):
            self.interface = f"{LINK}{self._network}"
            made = run(
                ["ip", "link", "add", self.interface, "type", "veth"],
                ["peer", "name", "head", "netns", str(self._keeper)],
                check=False,
            )
            if made.returncode == 0:
                return
            if "File exists" not in made.stderr:
                raise Missing(f"needs network links ({made.stderr.strip()})")
        raise StandinError(f"{NETWORKS} stand-ins run here already")

    def _address(self, last: int) -> str:
        return f"{NETWORK}.{self._network}.{last}"

    def _write_files(self) -> None:
        folder = self.folder
        for name in ("bin", "etc/profile.d", "gpus", "modulefiles", "munge", "slurm/state", "ssh"):
            (folder / name).mkdir(parents=True)
        for name in self.hosts:
            (folder / "hosts" / name / "spool").mkdir(parents=True)
        self.addresses = {
            name: self._address(number) for number, name in enumerate(self.hosts, start=1)
        }
        self._write_keys()
        for path, text in self._texts().items():
            (folder / path).write_text(text)
        for program in (folder / "bin").iterdir():
            program.chmod(0o755)
        for device in config.gpu_files(folder, self._gpus):
            device.symlink_to("/dev/null")
        self.environ = self._login()

    def _write_keys(self) -> None:
        for name in ("host", "user"):
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.folder}/ssh/{name}"])
        key = self.folder / "munge/key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _texts(self) -> dict[str, str]:
        """What each file holds."""
        folder = self.folder
        controller = self._address(CONTROLLER)
        head = {socket.gethostname(): self._address(HEAD), "controller": controller}
        host_key = (folder / "ssh/host.pub").read_text()
        texts = {
            "etc/hosts": config.hosts_file({**self.addresses, **head}),
            "etc/ssh_config": config.ssh_config(folder, self.addresses),
            "etc/sshd_config": config.sshd_config(folder),
            "bin/task-prolog": config.task_prolog(),
            "ssh/known_hosts": config.known_hosts(host_key, self.addresses),
            "slurm/slurm.conf": config.slurm_conf(
                folder,
                controller,
                self.addresses,
                self._partitions,
                self._gpus,
                # A home that several stand-ins share keeps jobs by their numbers.
                first_job=1 + 10_000 * self._network,
            ),
            "slurm/gres.conf": config.gres_conf(folder, self._gpus),
            "slurm/mpi.conf": config.mpi_conf(),
            "etc/profile.d/modules.sh": config.profile(self._modules.init, self.modulefiles),
        }
        for name in ("ssh", "scp", "sftp"):
            program = shutil.which(name, path=SYSTEM_PATH)
            texts[f"bin/{name}"] = config.wrapper(str(program), folder / "etc/ssh_config")
        return texts

    def _login(self) -> dict[str, str]:
        """The environment that somebody has who comes to this cluster."""
        path = f"{self.folder}/bin:{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
        before = {
            **{name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)},
            "PATH": path,
            "SLURM_CONF": f"{self.folder}/slurm/slurm.conf",
        }
        script = f". {self.folder}/etc/profile.d/modules.sh && exec env -0"
        shown = run(["bash", "-c", script], env=before).stdout
        return dict(line.split("=", 1) for line in shown.split("\0") if line)

    def _start_hosts(self, ends: ExitStack) -> None:
        run(
            ["ip", "-batch", "-"],
            stdin=f"link set {self.interface} addrgenmode none\n"
            f"address add {self._address(HEAD)}/24 dev {self.interface}\n"
            f"link set {self.interface} up\n",
        )
        self._switch(
            "link add switch type bridge",
            f"address add {self._address(CONTROLLER)}/24 dev switch",
            "link set lo up",
            "link set switch up",
            "link set head master switch up",
        )
        for name in self.hosts:
            self._start_host(name, ends)
        for number, name in enumerate(self.hosts):
            self._connect_host(number, name)
        for name in self.hosts:
            wait_for(partial(self._listens, name), f"{name} has no sshd", self.logs)

    def _switch(self, *commands: str) -> None:
        """Run commands of ``ip`` where the hosts are joined; process ids are the machine's."""
        run(enter(self._keeper, "net"), ["ip", "-batch", "-"], stdin="\n".join([*commands, ""]))

    def _start_host(self, name: str, ends: ExitStack) -> None:
        seen = (self.folder, self._modules.root, *self._shared)
        below = sorted({path.resolve() for path in seen if path.resolve().is_relative_to("/tmp")})
        with (self.folder / "hosts" / name / "start.log").open("w") as log:
            process = subprocess.Popen(
                [
                    *enter(self._keeper, "mount", "net", "uts", "pid"),
                    "unshare",
                    "--net",
                    "--uts",
                    "--mount",
                    "--ipc",
                    "--pid",
                    "--fork",
                    "sh",
                    str(HERE / "host.sh"),
                    name,
                    self.addresses[name],
                    self.interface,
                    str(self.folder),
                    *map(str, below),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**self.environ, "PATH": SYSTEM_PATH},
            )
        ends.callback(process.wait)
        ends.callback(process.kill)

    def _connect_host(self, number: int, name: str) -> None:
        pid_file = self.folder / "hosts" / name / "pid"
        wait_for(pid_file.exists, f"{name} does not start", self.logs)
        self._pids[name] = int(pid_file.read_text())
        self._switch(
            f"link add port{number} type veth peer name {self.interface} netns {self._pids[name]}",
            f"link set port{number} master switch up",
        )

    def _listens(self, name: str) -> bool:
        try:
            socket.create_connection((self.addresses[name], 22), timeout=1).close()
        except OSError:
            return False
        return True

    def _on_controller(self, *argv: str) -> None:
        inside = enter(self._keeper, "mount", "net", "uts", "pid")
        run(inside, argv, env={**self.environ, "PATH": SYSTEM_PATH})

    def _start_slurm(self) -> None:
        munge = self.folder / "munge"
        self._on_controller(
            "munged",
            "--force",
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--log-file={munge}/munged.log",
            f"--pid-file={munge}/pid",
            f"--seed-file={munge}/seed",
        )
        self.start_scheduler()
        for name in self.hosts:
            slurmd = ["slurmd", "-N", name, "-f", self.environ["SLURM_CONF"]]
            self.on(name, slurmd, env={"PATH": SYSTEM_PATH})
        wait_for(self._all_idle, "not all hosts are idle in Slurm", self.logs)

    def _answers(self) -> bool:
        return "is UP" in self.run(["scontrol", "ping"], check=False).stdout

    def _all_idle(self) -> bool:
        shown = self.run(["sinfo", "-h", "-N", "-o", "%N %t"], check=False).stdout
        return {*shown.splitlines()} == {f"{name} idle" for name in self.hosts}
