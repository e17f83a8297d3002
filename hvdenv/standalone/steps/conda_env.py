"""Make a conda environment, with py-rattler or with a conda program.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    conda_env.py SPEC.json PREFIX [--report REPORT.json] [--cache DIR]
    conda_env.py --solve-only SPEC.json REPORT.json [--cache DIR]
    conda_env.py --fetch-only SPEC.json DIR [--cache DIR]
    conda_env.py --clone SOURCE PREFIX [--report REPORT.json]

SPEC.json::

    {"channels": ["conda-forge"], "specs": ["python 3.10.*", "numpy >=1.21"],
     "platform": "linux-64", "virtual": {"__cuda": "11.4", "__glibc": "2.17"},
     "prefer": [{"name": "numpy", "version": "1.22.0", "build": "py310h45f3432_1"}],
     "free": ["scipy"], "program": "/sw/conda/bin/conda"}

``virtual`` describes the machine that runs the environment; the machine that makes it is not
examined. ``prefer`` (optional) lists packages to keep where they fit, except those named in
``free``. ``program`` (optional) is a conda program to use instead of py-rattler. Without
py-rattler the first of $CONDA_EXE, micromamba, mamba and conda is used.

--solve-only installs nothing: REPORT.json gets the channels' records of the packages. Such
records, or those of a lock, can replace the specs; then nothing is solved::

    {"platform": "linux-64", "files": "/project/offline", "explicit": [
      {"name": "numpy", "version": "1.22.0", "sha256": "6ab9...", "md5": "05a1...",
       "url": "https://conda.example.org/linux-64/numpy-1.22.0-0.conda", "depends": ["..."]}]}

``files`` or $HVDENV_FILES (optional) is a folder with all packages; then no network is used.
--fetch-only puts the packages into such a folder. The sha256 of every package is compared
before it is unpacked, and nothing that was unpacked before is used.

--clone copies an environment, which may be read-only, and replaces its path in the copied
files. REPORT.json lists the conda packages of the result: name, version, build, channel, url
and sha256.

Downloads are kept in --cache or $RATTLER_CACHE_DIR. While PREFIX is incomplete, there is a
folder PREFIX.unfinished beside it; the next run then starts from the beginning.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Dict, List, Union

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this folder
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from conda_clone import clone
from conda_files import collect, move
from conda_program import Program, find_program
from conda_spec import (
    Failure,
    Record,
    Spec,
    channel_of,
    read_records,
    read_spec,
    requested,
    say,
    write_whole,
)

if TYPE_CHECKING:
    from conda_rattler import Rattler

REPORTED = ("name", "version", "build", "url", "sha256")
# Keys of records that name temporary files.
TEMPORARY = ("extracted_package_dir", "package_tarball_full_path", "link")


def backend_of(spec: Spec, cache: str, work: str) -> Union[Program, "Rattler"]:
    """py-rattler, or the requested conda program, or that of this machine."""
    if spec.get("program"):
        return Program(spec["program"], spec, cache, work)
    try:
        import conda_rattler
    except ImportError as error:
        program = find_program(os.environ)
        if not program:
            raise Failure(
                "cannot install conda packages: %s has no py-rattler (%s), and there is no "
                "micromamba, mamba or conda on PATH\nInstall one: %s -m pip install 'py-rattler<1,>=0.28', "
                "on Python 3.10 and newer, or load the module of this site that has conda"
                % (sys.executable, error, sys.executable)
            ) from None
        return Program(program, spec, cache, work)
    return conda_rattler.Rattler(spec, cache, work)


def make(spec: Spec, prefix: str, cache: str, work: str) -> None:
    """Install the packages of a lock, or those that a solve finds."""
    backend = backend_of(spec, cache, work)
    if isinstance(backend, Program) and "explicit" not in spec:
        backend.install_specs(prefix)
        return
    packages: List[Record] = spec["explicit"] if "explicit" in spec else backend.solve()
    paths = collect(packages, spec.get("files", ""), cache, work, backend.download)
    backend.install(packages, paths, prefix)
    restore_origins(prefix, {each["name"]: each["url"] for each in packages})


def restore_origins(prefix: str, origins: Dict[str, str]) -> None:
    """Replace temporary paths in records by the URLs that packages come from."""
    for name, record in read_records(prefix):
        url = origins[record["name"]]
        record.update(url=url, channel=channel_of(url) + "/")
        for key in TEMPORARY:
            record.pop(key, None)
        write_whole(os.path.join(prefix, "conda-meta", name), json.dumps(record, indent=2))


def fetch(spec: Spec, target: str, cache: str, work: str) -> None:
    """Put the packages of a lock into a folder from which they can be installed."""
    download = backend_of(spec, cache, work).download
    for path in collect(spec["explicit"], spec.get("files", ""), cache, work, download):
        copy = os.path.join(work, os.path.basename(path))
        shutil.copyfile(path, copy)
        move(copy, os.path.join(target, os.path.basename(path)))
    say("%d packages in %s" % (len(spec["explicit"]), target))


def solve(spec: Spec, target: str, cache: str, work: str) -> None:
    """Write the records of the packages that meet the request."""
    records = sorted(backend_of(spec, cache, work).solve(), key=lambda each: str(each["name"]))
    write_whole(target, json.dumps(records, indent=1, sort_keys=True))
    say("%d packages" % len(records))


def begin(prefix: str) -> str:
    """Mark the environment as unfinished, and remove the result of an interrupted run.

    Returns:
        The mark: a folder for temporary files, removed at the end.
    """
    mark = prefix + ".unfinished"
    if os.path.exists(mark):
        say("an earlier run did not finish %s: starting from the beginning" % prefix)
        shutil.rmtree(prefix, ignore_errors=True)
        shutil.rmtree(mark)
    if os.path.lexists(prefix) and not (os.path.isdir(prefix) and not os.listdir(prefix)):
        raise Failure("%s exists already; remove it or name another folder" % prefix)
    os.makedirs(mark, mode=0o700)
    return mark


def undo(prefix: str, mark: str) -> None:
    """Remove an environment that could not be completed."""
    shutil.rmtree(prefix, ignore_errors=True)
    if os.path.lexists(prefix):
        return
    absent = 0
    for _ in range(50):  # threads of rattler may still be writing there, and make it again
        shutil.rmtree(mark, ignore_errors=True)
        absent = 0 if os.path.lexists(mark) else absent + 1
        if absent > 3:
            return
        time.sleep(0.1)


def report(prefix: str) -> List[Dict[str, str]]:
    """The installed packages, in the same form for every installer."""
    found = []
    for _, record in read_records(prefix):
        package = {name: record.get(name) or "" for name in REPORTED}
        # Some programs write the folder of the architecture into the channel.
        found.append(dict(package, channel=channel_of(package["url"])))
    return found


def options_of(arguments: List[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a conda environment.")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--clone", action="store_true", help="SOURCE is an environment to copy")
    modes.add_argument("--solve-only", action="store_true", help="write the records to TARGET")
    modes.add_argument("--fetch-only", action="store_true", help="put the packages into TARGET")
    parser.add_argument("source", metavar="SOURCE", help="SPEC.json, or with --clone a folder")
    parser.add_argument("target", metavar="TARGET", help="the environment to make")
    parser.add_argument("--report", metavar="FILE", help="write the list of packages there")
    parser.add_argument("--cache", metavar="DIR", help="keep downloads there")
    return parser.parse_args(arguments)


def main(arguments: List[str]) -> None:
    options = options_of(arguments)
    target = os.path.abspath(options.target)
    cache = options.cache or os.environ.get("RATTLER_CACHE_DIR")
    cache = os.path.abspath(cache) if cache else ""
    spec = {} if options.clone else read_spec(options.source)
    for line in requested(spec) if spec else ():
        say(line.strip())
    if options.solve_only or options.fetch_only:
        prepare(spec, target, cache, options.fetch_only)
        return
    mark = begin(target)
    try:
        if options.clone:
            # It can contain a $NAME that a module sets.
            clone(os.path.expandvars(options.source), target)
        else:
            make(spec, target, cache, mark)
        packages = report(target)
        if options.report:
            write_whole(options.report, json.dumps(packages, indent=1))
    except Exception:
        # Not for a KeyboardInterrupt: rattler's threads write until this process ends. The
        # mark makes the next run start from the beginning.
        undo(target, mark)
        raise
    shutil.rmtree(mark)
    say("%d packages in %s" % (len(packages), target))


def prepare(spec: Spec, target: str, cache: str, fetching: bool) -> None:
    """Solve, or fetch the packages of a lock; install nothing."""
    if fetching:
        os.makedirs(target, exist_ok=True)
    work = tempfile.mkdtemp(prefix=".conda_env.", dir=target if fetching else None)
    try:
        (fetch if fetching else solve)(spec, target, cache, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # threads may still write there


if __name__ == "__main__":
    STATUS = 1
    try:
        main(sys.argv[1:])
        STATUS = 0
    except Failure as problem:
        say("conda_env: %s" % problem)
    except OSError as problem:
        # A full disk has no file name.
        say("conda_env: %s" % ": ".join(filter(None, (problem.filename, problem.strerror))))
    except KeyboardInterrupt:
        say("conda_env: interrupted")
        STATUS = 130
    sys.stdout.flush()
    # The interpreter can crash at its exit after rattler has installed something.
    os._exit(STATUS)
