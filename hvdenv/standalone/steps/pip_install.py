"""Install frameworks with pip, taking CPU builds where they can be had.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    pip_install.py [--cpu-index URL]... -- PIP_INSTALL_ARGUMENTS...

A CPU index that does not answer costs SECONDS, not the build: pip then goes by its
own configuration alone. What pip would download for GPUs is said before it comes.
"""

import re
import subprocess
import sys
import urllib.request

SECONDS = 3
GPU_PACKAGE = re.compile(r"^\s*Collecting ((?:nvidia-|cuda-|triton)[\w.-]*)")


def why_unreachable(url):
    """None if something answers there, else the reason."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/", timeout=SECONDS):
            return None
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def index_arguments(urls):
    arguments = []
    for url in urls:
        reason = why_unreachable(url)
        if reason is None:
            arguments += ["--extra-index-url", url]
        else:
            print(
                "hvdenv: no answer from %s (%s); pip goes by its own configuration" % (url, reason)
            )
    return arguments


def install(arguments):
    command = [sys.executable, "-m", "pip", "install"] + arguments
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = False
    for raw in pip.stdout:
        line = raw.decode("utf-8", "replace").rstrip("\n")
        gpu_package = GPU_PACKAGE.match(line)
        if gpu_package and not said:
            said = True
            print(
                "hvdenv: pip found no CPU build: it is about to download CUDA packages (%s, ...), "
                "several GB. To avoid that, interrupt and point pip at a CPU build "
                "(PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)." % gpu_package.group(1)
            )
        print(line)
        sys.stdout.flush()
    return pip.wait()


def main(arguments):
    split = arguments.index("--")
    options, rest = arguments[:split], arguments[split + 1 :]
    if options[0::2] != ["--cpu-index"] * (len(options) // 2):
        sys.exit("usage: pip_install.py [--cpu-index URL]... -- ARGUMENTS...")
    sys.exit(install(index_arguments(options[1::2]) + rest))


if __name__ == "__main__":
    main(sys.argv[1:])
