"""Make a folder that NCCL can be linked from: the one that torch's own packages bring.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer, inside the
environment. The package has no libnccl.so, which linkers look for, only libnccl.so.2.

    nccl_of_torch.py FOLDER
"""

import importlib.util
import os
import sys

LIBRARY = "libnccl.so.2"


def main(folder):
    nvidia = importlib.util.find_spec("nvidia")
    places = list(nvidia.submodule_search_locations) if nvidia else []
    packages = [os.path.join(place, "nccl") for place in places]
    found = [each for each in packages if os.path.exists(os.path.join(each, "lib", LIBRARY))]
    if not found:
        sys.exit(
            "nccl_of_torch: no package has nvidia/nccl/lib/%s: this torch is for CPUs, or takes NCCL"
            " from elsewhere\nwhat to do: take a build for CUDA from the package index, or name"
            " NCCL's folder in horovod.gpu.nccl_home" % LIBRARY
        )
    os.makedirs(os.path.join(folder, "lib"))
    os.symlink(os.path.join(found[0], "include"), os.path.join(folder, "include"))
    os.symlink(os.path.join(found[0], "lib", LIBRARY), os.path.join(folder, "lib", "libnccl.so"))
    print(found[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
