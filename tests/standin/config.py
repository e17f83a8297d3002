"""What the parts of a stand-in read: text, nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

# What ranks find in their environment on every host, however they were started: Open MPI without
# UCX, which has no network here to use. And with ranks that yield while they wait, since all hosts
# share the cores of one machine, which Open MPI cannot know.
FOR_RANKS = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


# That each host says it has, whatever the machine has.
CPUS = 4


def slurm_conf(
    folder: Path,
    controller: str,
    addresses: Mapping[str, str],
    partitions: Sequence[str],
    gpus: int,
    first_job: int,
) -> str:
    """The file that SLURM_CONF names."""
    lines = [
        "ClusterName=standin",
        f"SlurmctldHost=controller({controller})",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/socket",
        f"StateSaveLocation={folder}/slurm/state",
        f"SlurmctldPidFile={folder}/slurm/slurmctld.pid",
        f"SlurmctldLogFile={folder}/slurm/slurmctld.log",
        f"SlurmdSpoolDir={folder}/hosts/%n/spool",
        f"SlurmdPidFile={folder}/hosts/%n/slurmd.pid",
        f"SlurmdLogFile={folder}/hosts/%n/slurmd.log",
        # A host may say that it has more than the machine: what is not there is shared.
        "SlurmdParameters=config_overrides",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        # Nothing in the machine's control groups that could stay behind.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        f"TaskProlog={folder}/bin/task-prolog",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "KillWait=2",
        f"FirstJobId={first_job}",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1",
    ]
    if gpus:
        lines.append("GresTypes=gpu")
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    lines += [
        f"NodeName={name} NodeAddr={address} CPUs={CPUS} RealMemory=4000{gres}"
        for name, address in addresses.items()
    ]
    lines += [
        f"PartitionName={name} Nodes={','.join(addresses)}"
        f" Default={'NO' if number else 'YES'} MaxTime=INFINITE State=UP"
        for number, name in enumerate(partitions)
    ]
    return "\n".join([*lines, ""])


def mpi_conf() -> str:
    """The file beside slurm.conf: PMIx fences go around a ring.

    With Slurm's default, about one start of Open MPI in a hundred crashes in MPI_Init; with the
    ring, none in hundreds did (docs/how-to/try-a-cluster.md).
    """
    return "PMIxCollFence=ring\n"


def task_prolog() -> str:
    """The program whose output Slurm adds to the environment of each task."""
    lines = [f"echo 'export {name}={value}'" for name, value in FOR_RANKS.items()]
    return "\n".join(["#!/bin/sh", *lines, ""])


def gres_conf(folder: Path, gpus: int) -> str:
    """GPUs with a device each, so that jobs get CUDA_VISIBLE_DEVICES."""
    files = gpu_files(folder, gpus)
    return "".join(f"Name=gpu File={file} Flags=nvidia_gpu_env\n" for file in files)


def gpu_files(folder: Path, gpus: int) -> list[Path]:
    """Where the devices are: Slurm looks at their kind, and nobody opens them."""
    return [folder / f"gpus/nvidia{number}" for number in range(gpus)]


def hosts_file(names: Mapping[str, str]) -> str:
    """/etc/hosts of every host, from addresses by name."""
    lines = [f"{address} {name}" for name, address in names.items()]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def sshd_config(folder: Path) -> str:
    """A daemon for root, by key only, whose sessions find Slurm."""
    variables = {"SLURM_CONF": f"{folder}/slurm/slurm.conf", **FOR_RANKS}
    return f"""Port 22
HostKey {folder}/ssh/host
AuthorizedKeysFile {folder}/ssh/user.pub
# Everyone may write to /tmp, where the key lies.
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
Subsystem sftp internal-sftp
SetEnv {" ".join(f"{name}={value}" for name, value in variables.items())}
"""


def ssh_config(folder: Path, addresses: Mapping[str, str]) -> str:
    """A client that knows the hosts by name, also where /etc/hosts does not."""
    hosts = [f"Host {name}\n  HostName {address}" for name, address in addresses.items()]
    everyone = f"""Host {" ".join([*addresses, *addresses.values()])}
  User root
  IdentityFile {folder}/ssh/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/ssh/known_hosts
  StrictHostKeyChecking yes
  CheckHostIP no
"""
    return "\n".join([*hosts, everyone])


def known_hosts(key: str, addresses: Mapping[str, str]) -> str:
    """The key of all hosts, by name and by address."""
    return f"{','.join([*addresses, *addresses.values()])} {key}"


def profile(init: Path, modulefiles: Path) -> str:
    """What a login shell reads to have ``module``."""
    return f"export LMOD_ALLOW_ROOT_USE=yes\n. {init}\nmodule use {modulefiles}\n"


def wrapper(program: str, config: Path) -> str:
    """An ssh program that reads another configuration than the user's."""
    return f'#!/bin/sh\nexec {program} -F {config} "$@"\n'
