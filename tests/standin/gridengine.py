"""Grid Engine across the hosts of a stand-in: a queue and a parallel environment ``mpi``."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, NamedTuple

from tests.standin.config import CPUS
from tests.standin.machine import enter, run, wait_for
from tests.support.needs import SYSTEM_PATH, need

if TYPE_CHECKING:
    from tests.standin import Cluster

# Where Debian and Ubuntu have its parts.
ROOT, LIBRARY = Path("/var/lib/gridengine"), Path("/usr/lib/gridengine")
SHARE = Path("/usr/share/gridengine")
PACKAGES = ("gridengine-client", "gridengine-exec", "gridengine-master")
CLIENTS = ("qacct", "qconf", "qdel", "qrsh", "qstat", "qsub")

PARALLEL_ENVIRONMENT = """\
pe_name            mpi
slots              99
user_lists         NONE
xuser_lists        NONE
start_proc_args    NONE
stop_proc_args     NONE
allocation_rule    $round_robin
control_slaves     TRUE
job_is_first_task  FALSE
urgency_slots      min
accounting_summary TRUE
qsort_args         NONE
"""
# Root starts jobs, and what happens is reported at once.
CONFIGURATION = {
    "min_uid": "0",
    "min_gid": "0",
    "load_report_time": "00:00:01",
    "reporting_params": "accounting=true reporting=false flush_time=00:00:01"
    " accounting_flush_time=00:00:00 joblog=false sharelog=00:00:00",
}
SCHEDULER = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
    "schedd_job_info": "true",
}


class GridEngine(NamedTuple):
    """Grid Engine on the hosts of a stand-in.

    Attributes:
        controller: process whose namespaces the master and the clients on the head run in.
    """

    cluster: Cluster
    controller: int
    queue: str

    @property
    def root(self) -> Path:
        return self.cluster.folder / "sge"

    @property
    def variables(self) -> dict[str, str]:
        """What its programs find it by."""
        return {
            "SGE_ROOT": str(self.root),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": "6444",
            "SGE_EXECD_PORT": "6445",
        }

    def start(self) -> None:
        """Start it.

        Raises:
            Missing: the machine has no Grid Engine.
        """
        need(*PACKAGES)
        self._write_files()
        # The head's own /etc/hosts does not have the hosts.
        self._call("mount", "--bind", f"{self.cluster.folder}/etc/hosts", "/etc/hosts")
        self._spool()
        self._call("sge_qmaster")
        # It returns before it listens.
        wait_for(self._answers, "sge_qmaster does not answer", self._messages)
        self._configure()
        for host in self.cluster.hosts:
            self.cluster.on(host, ["sge_execd"], env={**self.variables, "PATH": SYSTEM_PATH})

    def _write_files(self) -> None:
        for name in ("default/common", "spool/qmaster/job_scripts", "execd"):
            (self.root / name).mkdir(parents=True)
        for path in ROOT.iterdir():
            if path.name != "default":
                (self.root / path.name).symlink_to(path)
        common = self.root / "default/common"
        (common / "bootstrap").write_text(
            "admin_user none\ndefault_domain none\nignore_fqdn false\nspooling_method classic\n"
            f"spooling_lib libspoolc\nspooling_params {self._spooled}\n"
            f"binary_path {ROOT}/bin\nqmaster_spool_dir {self.root}/spool/qmaster\n"
            "security_mode none\nlistener_threads 1\nworker_threads 1\nscheduler_threads 1\n"
        )
        (common / "act_qmaster").write_text("controller\n")
        inside = " ".join(enter(self.controller, "net", "uts")[:-1])
        for name in CLIENTS:
            program = self.cluster.folder / "bin" / name
            # On hosts, where a job may have the head's PATH, it is the program itself.
            program.write_text(
                f'#!/bin/sh\n[ "$(hostname)" = {socket.gethostname()} ] || exec /usr/bin/{name} "$@"\n'
                f'exec {inside} --mount --wd="$PWD" -- /usr/bin/{name} "$@"\n'
            )
            program.chmod(0o755)

    @property
    def _spooled(self) -> str:
        return f"{self.root}/default/common;{self.root}/spool/qmaster"

    def _spool(self) -> None:
        given = {**CONFIGURATION, "execd_spool_dir": f"{self.root}/execd"}
        configuration = self._file("conf", (SHARE / "default-configuration").read_text(), given)
        resources = SHARE / "util/resources"
        self._call(f"{LIBRARY}/spoolinit", "classic", "libspoolc", self._spooled, "init")
        for words in (
            ("configuration", configuration),
            ("complexes", f"{resources}/centry"),
            ("usersets", f"{resources}/usersets"),
            ("managers", "root"),
        ):
            self._call(f"{LIBRARY}/spooldefaults", *words)

    def _configure(self) -> None:
        hosts = ",".join(self.cluster.hosts)
        queue = {
            "qname": self.queue,
            "hostlist": " ".join(self.cluster.hosts),
            "slots": str(CPUS),
            "pe_list": "mpi",
            "load_thresholds": "NONE",
            "shell_start_mode": "unix_behavior",
        }
        self._call("qconf", "-ah", hosts)
        self._call("qconf", "-as", f"controller,{hosts}")
        self._call("qconf", "-Ap", self._file("pe", PARALLEL_ENVIRONMENT, {}))
        self._call("qconf", "-Aq", self._file("queue", self._call("qconf", "-sq"), queue))
        shown = self._call("qconf", "-ssconf")
        self._call("qconf", "-Msconf", self._file("scheduler", shown, SCHEDULER))

    def _file(self, name: str, text: str, values: Mapping[str, str]) -> str:
        """A file of its configuration with other values."""
        for key, value in values.items():
            text = re.sub(rf"(?m)^{key}\s.*$", f"{key} {value}", text)
        path = self.root / name
        path.write_text(text)
        return str(path)

    def _answers(self) -> bool:
        return self._run("qconf", "-sconf", check=False).returncode == 0

    def _messages(self) -> str:
        return (self.root / "spool/qmaster/messages").read_text()

    def _call(self, *argv: str) -> str:
        return self._run(*argv).stdout

    def _run(self, *argv: str, check: bool = True) -> CompletedProcess[str]:
        inside = enter(self.controller, "mount", "net", "uts", "pid")
        return run(inside, argv, env={**self.variables, "PATH": SYSTEM_PATH}, check=check)
