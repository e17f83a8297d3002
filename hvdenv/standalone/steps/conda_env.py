"""Make a conda environment with py-rattler.

Stand-alone: imports nothing of hvdenv. It needs Python 3.10 or newer with py-rattler. Without
py-rattler, a conda on PATH makes an environment from specs, but no lock of it.

    conda_env.py SPEC.json PREFIX [--report REPORT.json]
    conda_env.py --solve-only SPEC.json REPORT.json
    conda_env.py --fetch-only SPEC.json DIR

SPEC.json::

    {"channels": ["conda-forge"], "specs": ["python 3.10.*", "numpy >=1.21"],
     "platform": "linux-64", "virtual": {"__cuda": "11.4", "__glibc": "2.17"},
     "prefer": [{"name": "numpy", "version": "1.22.0", "build": "py310h45f3432_1"}]}

``virtual`` describes the machine that runs the environment; the machine that makes it is not
examined. Optional: packages to keep where they fit.

REPORT.json gets the packages. They, or those of a lock, can replace the specs::

    {"platform": "linux-64", "explicit": [
      {"name": "numpy", "version": "1.22.0", "sha256": "6ab9...", "depends": ["..."],
       "url": "https://conda.example.org/linux-64/numpy-1.22.0-0.conda"}]}

Packages are kept in $RATTLER_CACHE_DIR. The sha256 of each is compared before it is unpacked, and
nothing that was unpacked before is used. With $CONDA_OFFLINE, packages that are missing or damaged
there are an error instead of downloaded. --fetch-only puts the packages into a directory that can be
$RATTLER_CACHE_DIR on another machine, which then needs no network.

Temporary files are in PREFIX.unfinished. After a kill, remove PREFIX before the next run.
"""

import argparse
import asyncio
import glob
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from archives import sha256_of
from pip_sources import other_page

try:
    import rattler
    from rattler import exceptions as problems
    from rattler.package_streaming import download_to_path
except ImportError:
    rattler = None  # type: ignore[assignment]

Spec = Dict[str, Any]
# A package as a lock or a channel describes it, or a file of conda-meta.
Record = Dict[str, Any]

ARCHSPEC = {"linux-64": "x86_64", "linux-aarch64": "aarch64", "linux-ppc64le": "ppc64le"}
# Virtual packages of a machine of which nothing is known: those of RHEL 7.
OLDEST = {"__unix": "0", "__linux": "3.10", "__glibc": "2.17"}
# conda has this one name for several channels.
SEVERAL = {"defaults": ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")}
ARCHIVE = re.compile(r"([\w.-]+)-([^-/]+)-[^-/]+(\.conda|\.tar\.bz2)\Z")
REPORTED = ("name", "version", "build", "url", "sha256")
# Keys of records that name temporary files.
TEMPORARY = ("extracted_package_dir", "package_tarball_full_path", "link")
CACHE = os.environ.get("RATTLER_CACHE_DIR", "")
DOWNLOADS_AT_ONCE = 8
WITHOUT_RATTLER = (
    "cannot install conda packages: {0} has no py-rattler, and a conda on PATH replaces it only"
    " without a lock\nInstall it, on Python 3.10 or newer: {0} -m pip install 'py-rattler<1,>=0.28'"
).format(sys.executable)


class Failure(Exception):
    """A message that says what is wrong and what to do."""


def say(line: str) -> None:
    print(line, flush=True)


# The request


def read_json(path: str) -> Any:
    with open(path, encoding="utf-8") as stream:
        try:
            return json.load(stream)
        except ValueError as error:
            raise Failure("%s is not JSON: %s" % (path, error)) from None


def write_json(path: str, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1, sort_keys=True)


def read_spec(path: str) -> Spec:
    spec: Spec = dict({"channels": [], "specs": [], "virtual": {}, "prefer": ()}, **read_json(path))
    if spec["platform"] not in ARCHSPEC:
        known = ", ".join(sorted(ARCHSPEC))
        raise Failure("platform %s: known are %s" % (spec["platform"], known))
    for record in spec.get("explicit", ()):
        check_record(record)
    return spec


def check_record(record: Record) -> None:
    """Refuse a package that has no hash, or whose file has another name, or a path in it."""
    if not record["sha256"]:
        raise Failure("%(url)s has no sha256 and cannot be verified" % record)
    found = ARCHIVE.match(file_name(record))
    if not found or found.group(1, 2) != (record["name"], record["version"]):
        raise Failure("%(url)s is not named like %(name)s %(version)s" % record)


def file_name(record: Record) -> str:
    """The name of a package's file."""
    return urllib.parse.unquote(posixpath.basename(urllib.parse.urlparse(record["url"]).path))


def virtual_packages(spec: Spec) -> List[Tuple[str, str, str]]:
    """Name, version and build of each virtual package of the target machine."""
    given = dict(OLDEST, **spec["virtual"])
    architecture = given.pop("__archspec", ARCHSPEC[spec["platform"]])
    found = [(name, version, "0") for name, version in sorted(given.items())]
    return found + [("__archspec", "1", architecture)]


def requested(spec: Spec) -> List[str]:
    """Lines for messages that describe the request."""
    if "explicit" in spec:
        return ["%d packages of a lock, for %s" % (len(spec["explicit"]), spec["platform"])]
    machine = ["%s %s" % (name, version) for name, version, _ in virtual_packages(spec)[:-1]]
    return [
        "packages: " + ", ".join(spec["specs"]),
        "channels: " + ", ".join(spec["channels"]),
        "for: %s with %s" % (spec["platform"], ", ".join(machine)),
    ]


# Solving


def solve(spec: Spec) -> List[Record]:
    """The packages that meet the request."""
    packages = [plain(each) for each in asyncio.run(solution(spec))]
    for each in packages:
        check_record(each)
    return packages


async def solution(spec: Spec) -> List[Any]:
    folder = Path(CACHE, "repodata") if CACHE else None
    gateway = rattler.Gateway.from_config(configuration(), cache_dir=folder)
    urls = [each for name in spec["channels"] for each in SEVERAL.get(name, (name,))]
    channels = [parsed(rattler.Channel, name) for name in urls]
    platforms: Any = [spec["platform"], "noarch"]
    specs = [parsed(match_spec, text) for text in spec["specs"]]
    machine = [virtual(*each) for each in virtual_packages(spec)]
    try:
        names = [each["name"] for each in spec["prefer"]]
        answer = await gateway.query(channels, platforms, names, recursive=False)
        return await rattler.solve(
            channels,
            specs,
            gateway=gateway,
            platforms=platforms,
            locked_packages=still_there(spec, [each for part in answer for each in part]),
            virtual_packages=machine,
        )
    except problems.SolverError as error:
        raise Failure(unsolvable(spec, str(error))) from None
    except problems.GatewayError as error:
        raise Failure(unreadable(channels, error)) from None


def configuration() -> Any:
    """The user's configuration of rattler: mirrors, proxies, credentials."""
    return parsed(rattler.Config.load_from_default_locations, "rattler")


def still_there(spec: Spec, found: List[Any]) -> List[Any]:
    """The channels' records of preferred packages, without those that were withdrawn."""
    records = {identity(each): each for each in found}
    preferred = [(each["name"], each["version"], each["build"]) for each in spec["prefer"]]
    gone = [" ".join(each) for each in preferred if each not in records]
    if gone:
        say("no longer in the channels: " + ", ".join(gone))
    return [records[each] for each in preferred if each in records]


def identity(record: Any) -> Tuple[str, str, str]:
    return record.name.normalized, str(record.version), str(record.build)


def plain(record: Any) -> Record:
    """A record of rattler as plain data."""
    name, version, build = identity(record)
    return {
        "name": name,
        "version": version,
        "build": build,
        "url": record.url,
        "sha256": record.sha256.hex() if record.sha256 else "",
        "md5": record.md5.hex() if record.md5 else "",
        "size": record.size or 0,
        "depends": record.depends,
        "constrains": record.constrains,
    }


def parsed(kind: Callable[..., Any], text: str) -> Any:
    """An object of rattler made from a text."""
    try:
        return kind(text)
    except Exception as error:  # its exceptions have no common base
        raise Failure("%s: %s" % (text, error)) from None


def match_spec(text: str) -> Any:
    return rattler.MatchSpec(text, strict=False)


def virtual(name: str, version: str, build: str) -> Any:
    return rattler.GenericVirtualPackage(
        parsed(rattler.PackageName, name),
        parsed(rattler.Version, version),
        parsed(rattler.BuildString, build),
    )


def unreadable(channels: List[Any], error: Exception) -> str:
    lines = ["a channel cannot be read", str(error)]
    for channel in channels:
        url = channel.base_url.rstrip("/")
        title = other_page(url + "/noarch/repodata.json") if url.startswith("http") else None
        if title is not None:
            lines.append("%s answers with a page that is no package index%s" % (url, title))
            lines.append("Log in if the network requires it, or name a mirror")
    lines.append("Check its name and the network: a login node may reach what compute nodes do not")
    return "\n".join(lines)


def unsolvable(spec: Spec, explanation: str) -> str:
    lines = ["the channels have no packages that fit together", explanation.strip()]
    lines += ["Requested:"] + requested(spec)
    if re.search(r"(^|\W)__[a-z]", explanation):
        lines.append(
            "A package asks more of the machine (__cuda, __glibc, ...) than the machine is said to "
            "have: choose another version or build of that package, or correct the machine's facts"
        )
    return "\n".join(lines)


# Files of packages


def path_in(folder: str, record: Record) -> str:
    """Where a directory of packages has a package."""
    return os.path.join(folder, "packages", record["sha256"], file_name(record))


def is_intact(record: Record, path: str) -> bool:
    if not os.path.exists(path):
        return False
    if sha256_of(path) == record["sha256"]:
        return True
    say("damaged, and not used: %s" % path)
    return False


def collect(records: List[Record], folder: str) -> List[str]:
    """The paths of packages in a directory, each compared with its hash; what it lacks is downloaded."""
    paths = [path_in(folder, each) for each in records]
    missing = [each for each in zip(records, paths) if not is_intact(*each)]
    if missing and os.environ.get("CONDA_OFFLINE"):
        lines = ["without a network, %s must have these packages:" % folder]
        raise Failure("\n  ".join(lines + [file_name(record) for record, _ in missing]))
    if missing:
        size = sum(record.get("size") or 0 for record, _ in missing) // 1000**2
        say("%d packages to get%s" % (len(missing), ", %d MB" % size if size else ""))
        asyncio.run(get(missing))
    return paths


async def get(files: List[Tuple[Record, str]]) -> None:
    """Get packages; each appears at its path once it is verified."""
    client = rattler.Client.from_config(configuration())
    slots = asyncio.Semaphore(DOWNLOADS_AT_ONCE)

    async def get_one(record: Record, path: str) -> None:
        arriving = "%s.%d" % (path, os.getpid())
        os.makedirs(os.path.dirname(path), exist_ok=True)
        url = urllib.parse.urlparse(record["url"])
        if url.scheme == "file":
            shutil.copyfile(urllib.request.url2pathname(url.path), arriving)
        else:
            async with slots:
                try:
                    await download_to_path(client, record["url"], Path(arriving))
                except RuntimeError as error:
                    raise Failure(undownloaded(record, error)) from None
            say("downloaded " + file_name(record))
        verify(record, arriving)
        os.replace(arriving, path)

    await asyncio.gather(*(get_one(*each) for each in files))


def undownloaded(record: Record, error: Exception) -> str:
    text = "%s cannot be downloaded: %s" % (record["url"], error)
    if "404" in str(error) or "410" in str(error):
        text += "\nIts channel may have withdrawn it: solve again to get another one"
    return text


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


def fetch(spec: Spec, target: str) -> None:
    """Put the packages of a lock into a directory, from the cache where it has them."""
    missing = [each for each in spec["explicit"] if not is_intact(each, path_in(target, each))]
    for record, path in zip(missing, collect(missing, CACHE or target)):
        kept = path_in(target, record)
        if path != kept:
            os.makedirs(os.path.dirname(kept), exist_ok=True)
            arriving = "%s.%d" % (kept, os.getpid())
            shutil.copyfile(path, arriving)
            os.replace(arriving, kept)


# Installing


def make(spec: Spec, prefix: str, work: str, report: str) -> None:
    """Install the packages of a lock, or those that a solve finds."""
    if rattler is None:
        make_with_conda(spec, prefix, work)
        finish(prefix, {}, report)
        return
    packages = spec["explicit"] if "explicit" in spec else solve(spec)
    asyncio.run(install(packages, collect(packages, CACHE or work), prefix, work))
    # rattler writes records for the owner only.
    umask = os.umask(0)
    os.umask(umask)
    for path in glob.glob(os.path.join(glob.escape(prefix), "conda-meta", "*")):
        os.chmod(path, 0o666 & ~umask)
    for path in glob.glob(os.path.join(glob.escape(prefix), "bin", ".*-post-link.sh")):
        say("not run, as it could do anything: the script %s" % path)
    finish(prefix, {each["name"]: each["url"] for each in packages}, report)


def make_with_conda(spec: Spec, prefix: str, work: str) -> None:
    """Let conda solve and install.

    For systems that have no wheel of py-rattler, such as RHEL 7 on Power9.
    """
    program = shutil.which(os.environ.get("CONDA_EXE") or "conda")
    if "explicit" in spec or not program:
        raise Failure(WITHOUT_RATTLER)
    *facts, (_, _, architecture) = virtual_packages(spec)
    machine = {name[2:].upper(): version for name, version, _ in facts}
    machine = dict({"CUDA": ""}, **machine, ARCHSPEC=architecture)
    variables = {"CONDA_OVERRIDE_" + name: value for name, value in machine.items()}
    variables.update(
        CONDA_SUBDIR=spec["platform"],
        CONDA_CHANNEL_PRIORITY="strict",
        # Nothing that was unpacked before is trusted, and no files are shared.
        CONDA_PKGS_DIRS=os.path.join(work, "unpacked"),
        CONDA_ALWAYS_COPY="true",
    )
    say("by %s, since %s has no py-rattler" % (program, sys.executable))
    channels = [word for name in spec["channels"] for word in ("--channel", name)]
    words = ["--yes", "--prefix", prefix, "--override-channels"] + channels + spec["specs"]
    status = subprocess.call([program, "create"] + words, env=dict(os.environ, **variables))
    if status:
        raise Failure("%s create failed with exit status %d" % (program, status))


def finish(prefix: str, origins: Dict[str, str], report: str) -> None:
    """Report what was installed; records that name files name where these come from instead."""
    installed = []
    for path in sorted(glob.glob(os.path.join(glob.escape(prefix), "conda-meta", "*.json"))):
        record = read_json(path)
        if origins:
            url = origins[record["name"]]
            record.update(url=url, channel=url.rsplit("/", 2)[0] + "/")
            write_json(path, {k: v for k, v in record.items() if k not in TEMPORARY})
        installed.append({key: record.get(key) or "" for key in REPORTED})
    if not installed:
        raise Failure("no environment was made in %s" % prefix)
    if report:
        write_json(report, installed)
    say("%d packages in %s" % (len(installed), prefix))


async def install(packages: List[Record], paths: List[str], prefix: str, work: str) -> None:
    """Unpack and link packages whose files were verified."""
    records = [await from_archive(*each) for each in zip(packages, paths)]
    say("installing %d packages" % len(records))
    # Nothing else uses what is unpacked for this environment: hard links are safe.
    own = rattler.Config.from_toml("allow-hard-links = true")
    try:
        await rattler.install(
            records,
            prefix,
            cache_dir=Path(work, "unpacked"),
            config=configuration().merge(own),
            show_progress=False,
        )
    except (problems.InstallerError, problems.TransactionError) as error:
        raise Failure("a package cannot be installed\n%s" % error) from None


async def from_archive(record: Record, path: str) -> Any:
    """rattler's record of a package: from its file, with what the request says of it."""
    try:
        found = await rattler.RepoDataRecord.from_package_archive(path)
    except Exception as error:  # its exceptions have no common base
        raise Failure("%s is no conda package: %s" % (file_name(record), error)) from None
    if identity(found)[:2] != (record["name"], record["version"]):
        raise Failure(
            "%s is %s %s, not %s %s"
            % ((path,) + identity(found)[:2] + (record["name"], record["version"]))
        )
    # Channels correct these after a package was made.
    for name in ("depends", "constrains"):
        if name in record:
            setattr(found, name, record[name])
    if record.get("md5"):
        found.md5 = bytes.fromhex(record["md5"])
    return found


def create(spec: Spec, target: str, report: str) -> None:
    """Make an environment, or leave nothing of it."""
    work = target + ".unfinished"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    os.makedirs(work, mode=0o700)
    try:
        make(spec, target, work, report)
    except Exception:
        shutil.rmtree(target, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)  # threads of rattler may still write there


def main(arguments: List[str]) -> None:
    parser = argparse.ArgumentParser(description="Make a conda environment.")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--solve-only", action="store_true", help="write the packages to TARGET")
    modes.add_argument("--fetch-only", action="store_true", help="put the packages into TARGET")
    parser.add_argument("source", metavar="SPEC.json", help="the request")
    parser.add_argument("target", metavar="TARGET", help="the environment to make")
    parser.add_argument("--report", metavar="FILE", default="", help="write the packages there")
    options = parser.parse_args(arguments)
    target, spec = os.path.abspath(options.target), read_spec(options.source)
    for line in requested(spec):
        say(line)
    makes = not (options.solve_only or options.fetch_only)
    if makes and os.path.lexists(target):
        raise Failure("%s exists already; remove it or name another directory" % target)
    if rattler is None and not makes:
        raise Failure(WITHOUT_RATTLER)
    if options.fetch_only:
        fetch(spec, target)
    elif options.solve_only:
        write_json(target, sorted(solve(spec), key=lambda each: str(each["name"])))
    else:
        create(spec, target, options.report)


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
