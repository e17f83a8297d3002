"""Download files of packages, each identified by its hash.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    get_files.py [SOURCE...] FILES.json FOLDER

FILES.json: [{"name": "tqdm", "file": "tqdm-4.66-py3-none-any.whl", "sha256": "...", "url": "..."}].
Files are looked for by pip's configuration, then at their addresses. What the directory has
already is not downloaded again; damaged files are.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, Iterator, List

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from archives import sha256_of
from pip_sources import FAILURES, Sources, file_name, parser_of_sources, without_password

File = Dict[str, str]
DOWNLOADS_AT_ONCE = 8
BLOCK = 1 << 20


def addresses(file: File, sources: Sources) -> Iterator[str]:
    """Where a file may be."""
    for url in sources.files(file["name"]):
        if file_name(url) == file["file"]:
            yield url
    if file["url"] and sources.indexes:
        yield file["url"]


def get(file: File, folder: str, sources: Sources) -> List[str]:
    """Download a file; returns why it failed, a line for each place."""
    path, problems = os.path.join(folder, file["file"]), []
    arriving = "%s.%d" % (path, os.getpid())
    for url in addresses(file, sources):
        shown = without_password(url.partition("#")[0])
        try:
            with sources.open(url) as answer, open(arriving, "wb") as stream:
                for block in iter(lambda: answer.read(BLOCK), b""):
                    stream.write(block)
            found = sha256_of(arriving)
            if found == file["sha256"]:
                os.replace(arriving, path)
                return []
            problems.append("%s has sha256 %s, expected %s" % (shown, found, file["sha256"]))
        except FAILURES as error:
            problems.append("%s: %s" % (shown, error))
        finally:
            if os.path.exists(arriving):
                os.unlink(arriving)
    return problems or ["no index has exactly %(file)s" % file]


def main(arguments: List[str]) -> int:
    parser = parser_of_sources()
    parser.add_argument("listed")
    parser.add_argument("folder")
    options = parser.parse_args(arguments)
    with open(options.listed, encoding="utf-8") as stream:
        files = json.load(stream)

    def is_here(file: File) -> bool:
        path = os.path.join(options.folder, file["file"])
        return os.path.isfile(path) and sha256_of(path) == file["sha256"]

    missing = [each for each in files if not is_here(each)]
    print("%d of %d files are there" % (len(files) - len(missing), len(files)))
    sys.stdout.flush()
    if not missing:
        return 0
    os.makedirs(options.folder, exist_ok=True)
    sources = Sources(options)
    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:
        found = pool.map(lambda each: get(each, options.folder, sources), missing)
    problems = [line for lines in found for line in lines]
    for line in problems:
        print("hvdenv: " + line)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
