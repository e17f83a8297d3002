"""Install packages with pip, also from indexes of CPU builds where these answer.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    pip_install.py [SOURCE...] -- ARGUMENTS...
"""

import os
import subprocess
import sys
from typing import List

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from pip_sources import Sources, parser_of_sources


def main(arguments: List[str]) -> int:
    split = arguments.index("--")
    options = parser_of_sources().parse_args(arguments[:split])
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    for url in options.extra_index_url + Sources(options).cpu_indexes:
        command += ["--extra-index-url", url]
    for place in options.find_links:
        command += ["--find-links", place]
    command += ["--no-index"] if options.no_index else []
    return subprocess.call(command + arguments[split + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
