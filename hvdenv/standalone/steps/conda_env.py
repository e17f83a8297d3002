"""Make a conda environment, with py-rattler or with a conda program.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    conda_env.py SPEC.json PREFIX [--report REPORT.json]
    conda_env.py --solve-only SPEC.json REPORT.json
    conda_env.py --fetch-only SPEC.json DIR
    conda_env.py --clone SOURCE PREFIX

SPEC.json::

    {"channels": ["conda-forge"], "specs": ["python 3.10.*", "numpy >=1.21"],
     "platform": "linux-64", "virtual": {"__cuda": "11.4", "__glibc": "2.17"},
     "prefer": [{"name": "numpy", "version": "1.22.0", "build": "py310h45f3432_1"}]}

``virtual`` describes the machine that runs the environment; the machine that makes it is not
examined. Optional: packages to keep where they fit. Without
py-rattler the first of $CONDA_EXE, micromamba, mamba and conda solves and installs.

REPORT.json gets the packages. They, or those of a lock, can replace the specs::

    {"platform": "linux-64", "explicit": [
      {"name": "numpy", "version": "1.22.0", "sha256": "6ab9...", "depends": ["..."],
       "url": "https://conda.example.org/linux-64/numpy-1.22.0-0.conda"}]}

Packages are kept in $RATTLER_CACHE_DIR. The sha256 of each is compared before it is unpacked, and
nothing that was unpacked before is used. With $CONDA_OFFLINE, packages that are missing or damaged
there are an error instead of downloaded. --fetch-only puts the packages into a directory that can be
$RATTLER_CACHE_DIR on another machine, which then needs no network.

--clone copies an environment with `conda create --clone`.
Temporary files are in PREFIX.unfinished. After a kill, remove PREFIX before the next run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Callable, Dict, Iterable, List, Mapping, Optional, Union

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from archives import sha256_of
from conda_spec import (
    Failure,
    Files,
    Record,
    Spec,
    channel_of,
    check_record,
    file_name,
    read_records,
    read_spec,
    requested,
    say,
    virtual_packages,
    write_json,
)

if TYPE_CHECKING:
    from conda_rattler import Rattler

REPORTED = ("name", "version", "build", "url", "sha256")
# Keys of records that name temporary files.
TEMPORARY = ("extracted_package_dir", "package_tarball_full_path", "link")
CACHE = os.environ.get("RATTLER_CACHE_DIR", "")
Download = Callable[[Files], None]


# A record, and its values where the program has none.
EMPTY: Record = {
    "name": "",
    "version": "",
    "build": "",
    "url": "",
    "sha256": "",
    "md5": "",
    "size": 0,
    "depends": [],
    "constrains": [],
}


def find_program(
    environ: Mapping[str, str], names: Iterable[str] = ("micromamba", "mamba", "conda")
) -> Optional[str]:
    """The conda program of this machine: $CONDA_EXE, or the first of these; None if there is none."""
    for name in (environ.get("CONDA_EXE"), *names):
        found = shutil.which(name, path=environ.get("PATH", os.defpath)) if name else None
        if found:
            return found
    return None


def clone(source: str, prefix: str) -> None:
    """Copy an environment, with what people added to it, and the new path in its files.

    py-rattler has no such function, and micromamba has neither.
    """
    program = find_program(os.environ, ["conda"])
    if not program:
        raise Failure(
            "a copy of %s needs conda, and there is none on PATH\n"
            "Load the module of this site that has conda" % source
        )
    command = [program, "create", "--yes", "--clone", source, "--prefix", prefix]
    # Links into the program's cache would share files with other environments.
    status = subprocess.call(command, env=dict(os.environ, CONDA_ALWAYS_COPY="true"))
    if status:
        raise Failure("%s create --clone failed with exit status %d" % (program, status))


class Program:
    """Solves and installs.

    Args:
        program: its path: conda, mamba or micromamba.
        spec: the request.
        work: directory for temporary files.
    """

    def __init__(self, program: str, spec: Spec, work: str) -> None:
        self.program, self.spec, self.work = program, spec, work

    def solve(self) -> List[Record]:
        """The packages that meet the request."""
        if self.spec.get("prefer"):
            say("%s keeps no versions: more packages may change than need to" % self.program)
        channels = [word for name in self.spec["channels"] for word in ("--channel", name)]
        printed = self.create(
            os.path.join(self.work, "solved"),
            "--dry-run",
            "--json",
            "--override-channels",
            *channels,
            *self.spec["specs"],
        )
        try:
            # All of them: there are none in the directory for packages.
            found = json.loads(printed)["actions"]["FETCH"]
            packages = [{key: each.get(key) or EMPTY[key] for key in EMPTY} for each in found]
        except (ValueError, LookupError):
            raise Failure("%s create does not print what it chose" % self.program) from None
        for each in packages:
            check_record(each)
        return packages

    def download(self, files: Files) -> None:
        for record, path in files:
            try:
                with urllib.request.urlopen(record["url"]) as answer, open(path, "wb") as stream:
                    shutil.copyfileobj(answer, stream)
            except urllib.error.URLError as error:
                raise Failure("%s cannot be downloaded: %s" % (record["url"], error)) from None

    def install(self, packages: List[Record], paths: List[str], prefix: str) -> None:
        """Install verified files, and nothing else."""
        explicit = os.path.join(self.work, "explicit.txt")
        with open(explicit, "w", encoding="utf-8") as stream:
            stream.write("@EXPLICIT\n")
            stream.writelines("file://%s\n" % urllib.request.pathname2url(p) for p in paths)
        say("by " + self.program)
        say(self.create(prefix, "--file", explicit, "--offline").strip())

    def create(self, prefix: str, *words: str) -> str:
        """What `conda create` prints."""
        command = [self.program, "create", "--yes", "--prefix", prefix, *words]
        # The program trusts what is unpacked: nothing is yet.
        environment = dict(
            os.environ, **variables_of(self.spec, os.path.join(self.work, "unpacked"))
        )
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, universal_newlines=True
        )
        if done.returncode:
            reason = "%s create failed with exit status %d" % (self.program, done.returncode)
            raise Failure(
                "\n".join([reason, done.stdout.strip(), "Requested:"] + requested(self.spec))
            )
        return done.stdout


def variables_of(spec: Spec, packages: str) -> Dict[str, str]:
    """Variables that describe the target machine, and forbid links into the program's cache."""
    virtual = virtual_packages(spec)
    machine = {name[2:].upper(): version for name, version, _ in virtual[:-1]}
    machine["ARCHSPEC"] = virtual[-1][2]
    machine.setdefault("CUDA", "")  # empty: none
    variables = {"CONDA_OVERRIDE_" + name: value for name, value in machine.items()}
    variables.update(CONDA_SUBDIR=spec["platform"], CONDA_PKGS_DIRS=packages)
    for family in ("CONDA_", "MAMBA_"):
        variables[family + "ALWAYS_COPY"] = "true"
        variables[family + "CHANNEL_PRIORITY"] = "strict"
    return variables


def installer(spec: Spec, work: str) -> Union[Program, "Rattler"]:
    """py-rattler, or the conda program of this machine."""
    try:
        from conda_rattler import Rattler
    except ImportError:
        program = find_program(os.environ)
    else:
        return Rattler(spec, CACHE)
    if not program:
        raise Failure(
            "cannot install conda packages: %s has no py-rattler, and there is no micromamba, mamba "
            "or conda on PATH\nInstall one: %s -m pip install 'py-rattler<1,>=0.28', on Python 3.10 "
            "and newer, or load the module of this site that has conda"
            % (sys.executable, sys.executable)
        )
    return Program(program, spec, work)


def collect(records: List[Record], folder: str, download: Download) -> List[str]:
    """The paths of packages in a directory, each compared with its hash; what it lacks is downloaded."""
    files = [
        (each, os.path.join(folder, "packages", each["sha256"], file_name(each)))
        for each in records
    ]
    missing = [each for each in files if not is_intact(*each)]
    if missing and os.environ.get("CONDA_OFFLINE"):
        lines = ["without a network, %s must have these packages:" % folder]
        raise Failure("\n  ".join(lines + [file_name(record) for record, _ in missing]))
    if missing:
        get(missing, download)
    return [path for _, path in files]


def get(missing: Files, download: Download) -> None:
    """Get packages; each appears at its path once it is verified."""
    size = sum(record.get("size") or 0 for record, _ in missing) // 1000**2
    say("%d packages to get%s" % (len(missing), ", %d MB" % size if size else ""))
    arriving = [(record, "%s.%d" % (path, os.getpid())) for record, path in missing]
    remote = []
    for record, path in arriving:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        url = urllib.parse.urlparse(record["url"])
        if url.scheme == "file":
            shutil.copyfile(urllib.request.url2pathname(url.path), path)
        else:
            remote.append((record, path))
    download(remote)
    for record, path in arriving:
        verify(record, path)
        os.replace(path, os.path.splitext(path)[0])


def is_intact(record: Record, path: str) -> bool:
    if not os.path.exists(path):
        return False
    if sha256_of(path) == record["sha256"]:
        return True
    say("damaged, and not used: %s" % path)
    return False


def verify(record: Record, path: str) -> None:
    """Compare a package that has arrived with its hash, before anything of it is used."""
    found = sha256_of(path)
    if found == record["sha256"]:
        return
    with open(path, "rb") as stream:
        html = stream.read(512).lstrip().startswith(b"<")
    os.unlink(path)
    lines = [
        "%s is not the package that was asked for: its sha256 is %s instead of %s"
        % (record["url"], found, record["sha256"]),
        "The file is damaged or was replaced, or the index of its channel is out of date",
    ]
    if html:
        lines.append("It is an HTML page, which proxies and login pages send")
    raise Failure("\n".join(lines))


def make(spec: Spec, prefix: str, work: str) -> None:
    """Install the packages of a lock, or those that a solve finds."""
    backend = installer(spec, work)
    packages = spec["explicit"] if "explicit" in spec else backend.solve()
    paths = collect(packages, CACHE or work, backend.download)
    backend.install(packages, paths, prefix)
    # Records name the files; they should name where these come from.
    origins = {each["name"]: each["url"] for each in packages}
    for path, record in read_records(prefix):
        url = origins[record["name"]]
        record.update(url=url, channel=channel_of(url) + "/")
        write_json(path, {k: v for k, v in record.items() if k not in TEMPORARY})


def solve(spec: Spec, target: str, work: str) -> None:
    found = installer(spec, work).solve()
    write_json(target, sorted(found, key=lambda each: str(each["name"])))


def fetch(spec: Spec, target: str) -> None:
    """Put the packages of a lock into a directory, from the cache where it has them."""
    packages, download = spec["explicit"], installer(spec, target).download

    def copy(files: Files) -> None:
        for (_, path), kept in zip(files, collect([r for r, _ in files], CACHE, download)):
            shutil.copyfile(kept, path)

    collect(packages, target, copy if CACHE else download)


def create(options: argparse.Namespace, spec: Spec, target: str, work: str) -> None:
    """Make an environment, or leave nothing of it."""
    try:
        if options.clone:
            # It can contain a $NAME that a module sets.
            clone(os.path.expandvars(options.source), target)
        else:
            make(spec, target, work)
        packages = [{key: r.get(key) or "" for key in REPORTED} for _, r in read_records(target)]
        if not packages:
            raise Failure("no environment was made in %s" % target)
        if options.report:
            write_json(options.report, packages)
    except Exception:
        shutil.rmtree(target, ignore_errors=True)
        raise
    say("%d packages in %s" % (len(packages), target))


def run(options: argparse.Namespace, spec: Spec, target: str) -> None:
    if options.fetch_only:
        fetch(spec, target)
        return
    if not options.solve_only and os.path.lexists(target):
        raise Failure("%s exists already; remove it or name another directory" % target)
    work = target + ".unfinished"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    os.makedirs(work, mode=0o700)
    try:
        if options.solve_only:
            solve(spec, target, work)
        else:
            create(options, spec, target, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # threads of rattler may still write there


def main(arguments: List[str]) -> None:
    parser = argparse.ArgumentParser(description="Make a conda environment.")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--clone", action="store_true", help="SOURCE is an environment to copy")
    modes.add_argument("--solve-only", action="store_true", help="write the packages to TARGET")
    modes.add_argument("--fetch-only", action="store_true", help="put the packages into TARGET")
    parser.add_argument("source", metavar="SOURCE", help="SPEC.json, or with --clone a directory")
    parser.add_argument("target", metavar="TARGET", help="the environment to make")
    parser.add_argument("--report", metavar="FILE", help="write the list of packages there")
    options = parser.parse_args(arguments)
    target = os.path.abspath(options.target)
    spec = {} if options.clone else read_spec(options.source)
    for line in requested(spec) if spec else ():
        say(line)
    run(options, spec, target)


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
