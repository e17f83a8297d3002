"""Report whether a node has what it needs to run an image.

usage: python3 node.py REQUEST

REQUEST and the answer are JSON in base64, which no shell changes. Keys of the request:
    path: folders to search for programs before PATH
    image: file or folder of the image, which is hashed
    peers: hosts to reach by ssh without a password
The answer is one line, `@hvdenv-node PAYLOAD`. Runs on Python 3.6 and newer.
"""

import base64
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from typing import Any, Dict, Optional, Tuple, Union

SECONDS = 20
TOOLS = ("apptainer", "singularity", "ch-run")
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


def output_of(path: str, *words: str) -> Tuple[str, Optional[int]]:
    """The output of a program in one line, and its exit code; None if it cannot run or hangs."""
    program = shutil.which(words[0], path=path)
    if program is None:
        return "", None
    try:
        done = subprocess.run(
            (program,) + words[1:],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            env=dict(os.environ, PATH=path),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), None
    text = done.stdout.decode("utf-8", "replace")[-2000:]
    return re.sub(r"[\x00-\x20\x7f]+", " ", text).strip(), done.returncode


def folder(path: str) -> Dict[str, Union[int, str]]:
    """Size of a folder, and sha256 of its listing: names, kinds and sizes, no contents."""
    found, size = hashlib.sha256(), 0
    for parent, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(folders + files):
            entry = os.path.join(parent, name)
            state = os.lstat(entry)
            length = state.st_size if stat.S_ISREG(state.st_mode) else 0
            kind = stat.S_IFMT(state.st_mode)
            line = "{} {:o} {}\n".format(os.path.relpath(entry, path), kind, length)
            found.update(line.encode("utf-8", "surrogateescape"))
            size += length
    return {"size": size, "sha256": found.hexdigest()}


def image(path: str) -> Dict[str, Union[int, str]]:
    """Size and sha256 of an image, or why it cannot be read."""
    if os.path.isdir(path):
        return folder(path)
    found, size = hashlib.sha256(), 0
    try:
        with open(path, "rb") as stream:
            for block in iter(lambda: stream.read(1 << 22), b""):
                found.update(block)
                size += len(block)
    except OSError as error:
        return {"problem": error.strerror or str(error)}
    return {"size": size, "sha256": found.hexdigest()}


def driver() -> str:
    """Version of NVIDIA's kernel driver; empty without one."""
    try:
        with open("/proc/driver/nvidia/version") as stream:
            found = re.search(r"Kernel Module\D{0,200}?\s(\d+\.[\d.]+)", stream.read())
    except OSError:
        return ""
    return found.group(1) if found else "unknown"


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def main(request: Dict[str, Any]) -> None:
    path = os.pathsep.join([*request["path"], os.environ.get("PATH", os.defpath)])
    tools = {name: output_of(path, name, "--version")[0] for name in TOOLS}
    peers = {}
    for peer in request["peers"]:
        text, code = output_of(path, *SSH, peer, "true")
        peers[peer] = "" if code == 0 else text[-300:] or "ssh is not on PATH"
    answer = {
        "name": os.uname().nodename,
        "resolves": resolves(os.uname().nodename),
        "tools": tools,
        "image": image(request["image"]),
        "mpirun": output_of(path, "mpirun", "--version")[0],
        "srun": output_of(path, "srun", "--mpi=list")[0],
        "driver": driver(),
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
        "rocm": os.path.exists("/dev/kfd"),
        "peers": peers,
    }
    payload = base64.b64encode(json.dumps(answer).encode("ascii")).decode("ascii")
    print("\n@hvdenv-node " + payload)


if __name__ == "__main__":
    main(json.loads(base64.b64decode(sys.argv[1]).decode("ascii")))
