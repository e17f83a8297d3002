"""Clone one tag of a git repository with all its submodules, and compare its commit.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    fetch_git.py URL TAG COMMIT|- FOLDER
"""

import os
import shutil
import subprocess
import sys


def git(*arguments: str) -> None:
    """Run git, which must not ask for a password."""
    environment = dict(os.environ, GIT_TERMINAL_PROMPT="0")
    if subprocess.call(("git",) + arguments, env=environment):
        sys.exit("hvdenv: git %s failed" % arguments[0])


def main(url: str, tag: str, commit: str, folder: str) -> None:
    if shutil.which("git") is None:
        sys.exit("hvdenv: git is not on PATH: load its module, or install it")
    # Not with --recurse-submodules --depth, which needs a feature that few servers allow.
    git("clone", "--depth", "1", "--branch", tag, "--", url, folder)
    head = subprocess.check_output(("git", "-C", folder, "rev-parse", "HEAD")).decode().strip()
    if commit not in ("-", head):
        sys.exit("hvdenv: %s at %s is %s, the recipe says %s" % (url, tag, head, commit))
    git("-C", folder, "submodule", "update", "--init", "--recursive", "--depth", "1")
    print("hvdenv: %s %s is %s" % (url, tag, head))


if __name__ == "__main__":
    main(*sys.argv[1:])
