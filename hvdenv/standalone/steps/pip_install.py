"""Install frameworks with pip, from indexes of CPU builds where these answer.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    pip_install.py [--cpu-index URL]... -- PIP_INSTALL_ARGUMENTS...

A CPU index that does not answer within SECONDS is left out, and pip uses its own
configuration only. A warning is printed before pip downloads packages for GPUs.
"""

import re
import subprocess
import sys
import urllib.request
from typing import List, Optional

SECONDS = 3
GPU_PACKAGE = re.compile(r"^\s*Collecting ((?:nvidia-|cuda-|triton)[\w.-]*)")


def why_unreachable(url: str) -> Optional[str]:
    """Why there is no answer from a URL; None if there is one."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/", timeout=SECONDS):
            return None
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def index_arguments(urls: List[str]) -> List[str]:
    arguments = []
    for url in urls:
        reason = why_unreachable(url)
        if reason is None:
            arguments += ["--extra-index-url", url]
        else:
            print("hvdenv: no answer from %s (%s); pip uses its own configuration" % (url, reason))
    return arguments


def install(arguments: List[str]) -> int:
    command = [sys.executable, "-m", "pip", "install"] + arguments
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert pip.stdout
    warned = False
    for raw in pip.stdout:
        line = raw.decode("utf-8", "replace").rstrip("\n")
        gpu_package = GPU_PACKAGE.match(line)
        if gpu_package and not warned:
            warned = True
            print(
                "hvdenv: pip found no CPU build: it is about to download CUDA packages (%s, ...), "
                "several GB. To avoid that, interrupt and point pip at a CPU build "
                "(PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)." % gpu_package.group(1)
            )
        print(line)
        sys.stdout.flush()
    return pip.wait()


def main(arguments: List[str]) -> None:
    split = arguments.index("--")
    options, rest = arguments[:split], arguments[split + 1 :]
    if options[0::2] != ["--cpu-index"] * (len(options) // 2):
        sys.exit("usage: pip_install.py [--cpu-index URL]... -- ARGUMENTS...")
    sys.exit(install(index_arguments(options[1::2]) + rest))


if __name__ == "__main__":
    main(sys.argv[1:])
