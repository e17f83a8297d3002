"""Install the pip that comes with the Python of a new environment, faster than ensurepip does.

Stand-alone: imports nothing of hvdenv. It needs a Python that has uv.

    bundled_pip.py PYTHON
"""

import os
import subprocess
import sys

from uv import find_uv_bin

# Prints the directory of the wheels, and what to install; Python before 3.12 brings setuptools too.
ASK = """
import ensurepip, glob, os, sys, sysconfig
folder = sysconfig.get_config_var("WHEEL_PKG_DIR") or os.path.join(ensurepip.__path__[0], "_bundled")
print(folder)
print("pip==" + ensurepip.version())
for path in glob.glob(os.path.join(folder, "setuptools-*.whl")) if sys.version_info < (3, 12) else ():
    print("setuptools==" + os.path.basename(path).split("-")[1])
"""


def main(python: str) -> int:
    # It may need other libraries than this one.
    libraries = os.environ.get("HVDENV_STEP_LIBRARY_PATH", os.environ.get("LD_LIBRARY_PATH", ""))
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    asked = subprocess.run([python, "-Ic", ASK], env=environment, stdout=subprocess.PIPE)
    folder, *packages = asked.stdout.decode().splitlines() or [""]
    words = ["--no-config", "--no-index", "--no-deps", "--compile-bytecode", "--python", python]
    uv = [find_uv_bin(), "pip", "install", *words, "--find-links", folder, *packages]
    if packages and subprocess.call(uv, env=environment) == 0:
        return 0
    ensurepip = [python, "-Im", "ensurepip", "--upgrade", "--default-pip"]
    return subprocess.call(ensurepip, env=environment)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
