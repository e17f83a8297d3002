"""Make a directory from which the NCCL of torch's own packages can be linked.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer, inside the
environment. Linkers look for libnccl.so; the package only has libnccl.so.2.

    nccl_of_torch.py FOLDER
"""

import importlib.util
import os
import sys

LIBRARY = "libnccl.so.2"


def main(folder: str) -> None:
    nvidia = importlib.util.find_spec("nvidia")
    packages = [
        os.path.join(parent, "nccl")
        for parent in (nvidia and nvidia.submodule_search_locations) or ()
    ]
    found = [each for each in packages if os.path.exists(os.path.join(each, "lib", LIBRARY))]
    if not found:
        sys.exit(
            "nccl_of_torch: no package has nvidia/nccl/lib/%s: this torch is for CPUs, or uses NCCL"
            " from elsewhere\nwhat to do: install a build for CUDA from the package index, or set"
            " horovod.gpu.nccl_home to NCCL's directory" % LIBRARY
        )
    os.makedirs(os.path.join(folder, "lib"))
    os.symlink(os.path.join(found[0], "include"), os.path.join(folder, "include"))
    os.symlink(os.path.join(found[0], "lib", LIBRARY), os.path.join(folder, "lib", "libnccl.so"))
    print(found[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
