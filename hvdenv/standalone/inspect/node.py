"""Tell what one node has of what running an image there takes.

usage: python3 node.py QUESTION

QUESTION and the answer are JSON in base64, so that no shell changes them. Asked are
    path: folders to look for programs in, before this process's own
    image: file or folder of the image; hashed if it is there
    peers: hosts to reach by ssh without a password
The answer is one line, `@hvdenv-node PAYLOAD`. Runs on Python 3.6 and up.
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

SECONDS = 20
TOOLS = ("apptainer", "singularity", "ch-run")
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


def said(path, *words):
    """What a program prints, as one line, and its exit code; None where it does not run or end."""
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


def folder(path):
    """Size and sha256 of what is listed in a folder: names, kinds and sizes, no contents."""
    found = hashlib.sha256()
    size = 0
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


def image(path):
    """Size and sha256 of an image; the reason where it cannot be read."""
    if os.path.isdir(path):
        return folder(path)
    found = hashlib.sha256()
    size = 0
    try:
        with open(path, "rb") as stream:
            while True:
                block = stream.read(1 << 22)
                if not block:
                    break
                found.update(block)
                size += len(block)
    except OSError as error:
        return {"problem": error.strerror or str(error)}
    return {"size": size, "sha256": found.hexdigest()}


def driver():
    """Version of the NVIDIA kernel driver; empty without one."""
    try:
        with open("/proc/driver/nvidia/version") as stream:
            found = re.search(r"Kernel Module\D{0,200}?\s(\d+\.[\d.]+)", stream.read())
    except OSError:
        return ""
    return found.group(1) if found else "unknown"


def resolves(name):
    """Whether a name means an address."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def main(question):
    path = os.pathsep.join([*question["path"], os.environ.get("PATH", os.defpath)])
    tools = {name: said(path, name, "--version")[0] for name in TOOLS}
    peers = {}
    for peer in question["peers"]:
        text, code = said(path, *SSH, peer, "true")
        peers[peer] = "" if code == 0 else text[-300:] or "there is no ssh"
    answer = {
        "name": os.uname().nodename,
        "resolves": resolves(os.uname().nodename),
        "tools": tools,
        "image": image(question["image"]),
        "mpirun": said(path, "mpirun", "--version")[0],
        "driver": driver(),
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
        "rocm": os.path.exists("/dev/kfd"),
        "peers": peers,
    }
    payload = base64.b64encode(json.dumps(answer).encode("ascii")).decode("ascii")
    print("\n@hvdenv-node " + payload)


if __name__ == "__main__":
    main(json.loads(base64.b64decode(sys.argv[1]).decode("ascii")))
