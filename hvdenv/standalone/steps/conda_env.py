"""Make a conda environment, without a conda program where py-rattler is installed.

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

``virtual`` is what the machine has that runs the environment; the one that makes it is
not looked at. ``prefer`` may be left out: packages that are taken again where they fit,
except those of ``free`` that are named beside it. ``program`` may be left out; it says
which conda program to use in the place of py-rattler. Without py-rattler the first of
$CONDA_EXE, micromamba, mamba and conda is taken.

--solve-only installs nothing: REPORT.json gets the records of the packages, as the
channels have them. Such records, or as much of them as a lock holds, can be asked for in
the place of specs; then nothing is solved::

    {"platform": "linux-64", "files": "/project/offline", "explicit": [
      {"name": "numpy", "version": "1.22.0", "sha256": "6ab9...", "md5": "05a1...",
       "url": "https://conda.example.org/linux-64/numpy-1.22.0-0.conda", "depends": ["..."]}]}

``files``, or $HVDENV_FILES, may be left out; with it the packages are taken from that
folder, and nothing else is reached. --fetch-only puts the packages into such a folder. Every package is
compared with its sha256 before it is unpacked, wherever it comes from, and nothing
that was unpacked before is used.

--clone copies an environment that may be read only and writes the new path into its
files. REPORT.json lists the conda packages of what was made: name, version, build,
channel, url, sha256.

Downloads are kept in --cache or $RATTLER_CACHE_DIR, if one is given. While PREFIX is not
complete there is a folder PREFIX.unfinished beside it; the next run then begins anew.
"""

import argparse
import hashlib
import json
import mmap
import os
import posixpath
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

from digest import sha256_of
from index_page import other_page

ARCHSPEC = {"linux-64": "x86_64", "linux-aarch64": "aarch64", "linux-ppc64le": "ppc64le"}
# Of a machine that nothing is said of: as little as RHEL 7 has.
OLDEST = {"__unix": "0", "__linux": "3.10", "__glibc": "2.17"}
# conda knows several channels by this one name.
SEVERAL = {"defaults": ("https://repo.anaconda.com/pkgs/main", "https://repo.anaconda.com/pkgs/r")}
PROGRAMS = ("micromamba", "mamba", "conda")
REPORTED = ("name", "version", "build", "url", "sha256")
SECONDS_BETWEEN_LINES = 10
DOWNLOADS_AT_ONCE = 8
# What says of a package only where it lay for a while.
PASSING = ("extracted_package_dir", "package_tarball_full_path", "link")
ARCHIVE = re.compile(
    r"(?P<name>[\w.-]+)-(?P<version>[^-/]+)-(?P<build>[^-/]+)(\.conda|\.tar\.bz2)\Z"
)
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
MB = 1000 * 1000

# Kernels before Linux 5.1 cut a first line that is longer.
SHEBANG_LIMIT = 127
# What a root environment holds beside itself.
NOT_CLONED = {"pkgs", "envs", "conda-bld"}


class Failure(Exception):
    """What is wrong and what to do about it, in lines for people."""


def say(line):
    # Solvers draw trees, and not every terminal or log has the characters.
    plain = line.translate({0x2514: "`", 0x251C: "|", 0x2502: "|", 0x2500: "-"})
    encoding = sys.stdout.encoding or "ascii"
    print(plain.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def read_json(path):
    with open(path, encoding="utf-8") as stream:
        try:
            return json.load(stream)
        except ValueError as error:
            raise Failure("%s is not JSON: %s" % (path, error)) from None


def write_whole(path, text):
    """Write a file so that nobody ever sees a part of it."""
    unfinished = "%s.%d" % (path, os.getpid())
    with open(unfinished, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(unfinished, path)


def read_records(prefix):
    """(file name, document) of every conda package that is installed."""
    folder = os.path.join(prefix, "conda-meta")
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [
        (name, read_json(os.path.join(folder, name))) for name in names if name.endswith(".json")
    ]


# What is asked for


def read_spec(path):
    """The document, every field there and of its type."""
    spec = read_json(path)
    wanted = {"channels": list, "specs": list, "platform": str, "virtual": dict}
    if "explicit" in spec:
        wanted = {"explicit": list, "platform": str}
        if os.environ.get("HVDENV_FILES"):
            spec.setdefault("files", os.environ["HVDENV_FILES"])
        spec = dict({"channels": [], "specs": [], "virtual": {}}, **spec)
    wrong = [name for name, kind in wanted.items() if not isinstance(spec.get(name), kind)]
    if wrong:
        raise Failure("%s: wrong or missing: %s" % (path, ", ".join(wrong)))
    # conda programs would take them for options.
    texts = spec["channels"] + spec["specs"]
    options = [text for text in texts if not isinstance(text, str) or text.startswith("-")]
    if options:
        raise Failure("%s: not a channel or package: %s" % (path, options[0]))
    if spec["platform"] not in ARCHSPEC:
        known = ", ".join(sorted(ARCHSPEC))
        raise Failure("platform %s: known are %s" % (spec["platform"], known))
    for record in spec.get("explicit", ()):
        check_record(record, spec["platform"])
    return spec


def check_record(record, platform):
    """Refuse what is no package, what nothing can verify, and what is for other machines."""
    kinds = {"name": str, "version": str, "url": str}
    if not isinstance(record, dict) or any(
        not isinstance(record.get(name), kind) for name, kind in kinds.items()
    ):
        raise Failure("not a package with name, version and url: %.200s" % json.dumps(record))
    if not SHA256.match(record.get("sha256") or ""):
        raise Failure("%(url)s: there is no sha256 for it, nothing can verify it" % record)
    found = ARCHIVE.match(file_name(record))
    if not found or found.group("name", "version") != (record["name"], record["version"]):
        raise Failure("%(url)s is not named like %(name)s %(version)s" % record)
    subdir = urllib.parse.urlparse(record["url"]).path.split("/")[-2]
    if subdir not in (platform, "noarch"):
        raise Failure("%s is for %s, not for %s" % (record["url"], subdir, platform))


def file_name(record):
    """What a package's file is called; check_record() has seen that it is no path."""
    return urllib.parse.unquote(posixpath.basename(urllib.parse.urlparse(record["url"]).path))


def virtual_packages(spec):
    """(name, version, build) of everything that the target machine is said to have."""
    given = dict(OLDEST, **spec["virtual"])
    architecture = given.pop("__archspec", ARCHSPEC[spec["platform"]])
    found = [(name, version, "0") for name, version in sorted(given.items())]
    return found + [("__archspec", "1", architecture)]


def channels_of(spec):
    """Channels, or their URLs where one name stands for several."""
    return [each for name in spec["channels"] for each in SEVERAL.get(name, (name,))]


def requested(spec):
    """What the channels were asked for, for messages."""
    machine = ["%s %s" % (name, version) for name, version, _ in virtual_packages(spec)]
    if "explicit" in spec:
        return ["  %d packages of a lock" % len(spec["explicit"]), "  for: " + spec["platform"]]
    return [
        "  packages: " + ", ".join(spec["specs"]),
        "  channels: " + ", ".join(spec["channels"]),
        "  for: %s with %s" % (spec["platform"], ", ".join(machine[:-1])),
    ]


# The files of packages


def collect(records, folder, cache, work, download):
    """Bring the files of packages here, and compare each with its hash.

    Args:
        records: what is wanted.
        folder: where all of them lie; none is downloaded then.
        cache: keeps what was downloaded, and is asked first; none if empty.
        work: a folder for what is downloaded otherwise.
        download: called with records and a folder, which it puts their files into.

    Returns:
        The path of each package.
    """
    store = os.path.join(cache or work, "packages")
    folder = os.path.abspath(folder) if folder else ""
    paths = [
        os.path.join(folder, file_name(record)) if folder
        else local_path(record["url"]) or os.path.join(store, record["sha256"], file_name(record))
        for record in records
    ]  # fmt: skip
    missing = []
    for record, path in zip(records, paths):
        if not path.startswith(store + os.sep):
            verify_file(path, record)
        elif not is_intact(path, record):
            missing.append((record, path))
    if missing:
        bring(missing, os.path.join(work, "arrived"), download)
    return paths


def bring(missing, folder, download):
    """Download packages, and put each into its place once it was verified.

    Args:
        missing: records, each with the path that its file is to have.
        folder: where they arrive.
        download: as for collect().
    """
    size = sum(record.get("size") or 0 for record, _ in missing) / MB
    say("%d packages to download%s" % (len(missing), ", %d MB" % size if size else ""))
    os.makedirs(folder)
    download([record for record, _ in missing], folder)
    for record, path in missing:
        arrived = os.path.join(folder, file_name(record))
        verify_file(arrived, record)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        put(arrived, path)


def local_path(url):
    """The path that a file:// URL names; nothing for any other."""
    parts = urllib.parse.urlparse(url)
    return urllib.request.url2pathname(parts.path) if parts.scheme == "file" else ""


def put(source, target):
    """Move a file so that nobody ever sees a part of it."""
    unfinished = "%s.%d" % (target, os.getpid())
    shutil.move(source, unfinished)
    os.replace(unfinished, target)


def is_intact(path, record):
    if not os.path.exists(path):
        return False
    if sha256_of(path) == record["sha256"]:
        os.utime(os.path.dirname(path))  # `hvdenv cache prune` goes by it
        return True
    say("damaged in the cache, to be downloaded again: %s" % path)
    return False


def verify_file(path, record):
    """Compare a package with its hash before anything of it is used."""
    if not os.path.exists(path):
        raise Failure(
            "%s does not exist: the index of its channel, or the lock, is out of date, or the "
            "channel withdrew the package" % path
        )
    found = sha256_of(path)
    if found != record["sha256"]:
        lines = [
            "%s is not the package that was asked for: its sha256 is %s, expected was %s"
            % (path, found, record["sha256"]),
            "It should be %s" % record["url"],
            "The file is damaged or was replaced, or the index of its channel is out of date",
        ]
        if begins_like_html(path):
            lines.append("It is an HTML page, such as a proxy or a login page sends")
        raise Failure("\n".join(lines))


def begins_like_html(path):
    with open(path, "rb") as stream:
        return stream.read(512).lstrip().startswith(b"<")


def fetch(spec, target, cache, work):
    """Put the packages of a lock into a folder that they can be installed from."""
    paths = collect(spec["explicit"], spec.get("files"), cache, work, downloader(spec, work))
    for path in paths:
        copy = os.path.join(work, os.path.basename(path))
        shutil.copyfile(path, copy)
        put(copy, os.path.join(target, os.path.basename(path)))


# By py-rattler


def configured(rattler):
    return understood(rattler.Config.load_from_default_locations, "rattler")


def solve(rattler, spec, cache):
    """The packages that fit together, as plain data."""
    import asyncio

    packages = [described(record) for record in asyncio.run(solved(rattler, spec, cache))]
    for each in packages:
        check_record(each, spec["platform"])
    return packages


async def solved(rattler, spec, cache):
    from rattler import exceptions as problems

    folder = os.path.join(cache, "repodata") if cache else None
    gateway = rattler.Gateway.from_config(configured(rattler), cache_dir=folder)
    channels = [understood(rattler.Channel, name) for name in channels_of(spec)]
    platforms = [spec["platform"], "noarch"]
    try:
        return await rattler.solve(
            channels,
            [understood(lambda text: rattler.MatchSpec(text, strict=False), text)
             for text in spec["specs"]],
            gateway=gateway,
            platforms=platforms,
            locked_packages=await still_there(gateway, channels, platforms, kept(spec)),
            virtual_packages=[virtual(rattler, *each) for each in virtual_packages(spec)],
        )  # fmt: skip
    except problems.SolverError as error:
        raise Failure(unsolvable(spec, str(error))) from None
    except problems.GatewayError as error:
        raise Failure(unread(channels, error)) from None


def unread(channels, error):
    lines = ["a channel cannot be read", str(error)]
    for channel in channels:
        url = channel.base_url.rstrip("/")
        title = other_page(url + "/noarch/repodata.json") if url.startswith("http") else None
        if title is not None:
            lines.append("%s answers with a page that is no package index%s" % (url, title))
            lines.append("Log in where the network asks for it, or name a mirror")
    lines.append("Check its name and the network: a login node may reach what compute nodes do not")
    return "\n".join(lines)


def kept(spec):
    """Packages that are to be taken again, as name, version and build."""
    free = set(spec.get("free", ()))
    return [
        (each["name"], each["version"], each["build"])
        for each in spec.get("prefer", ())
        if each["name"] not in free
    ]


async def still_there(gateway, channels, platforms, packages):
    """The channels' records of packages; those that were withdrawn are said."""
    if not packages:
        return []
    names = [name for name, _, _ in packages]
    answer = await gateway.query(channels, platforms, names, recursive=False)
    records = {identity(record): record for part in answer for record in part}
    gone = [" ".join(each) for each in packages if each not in records]
    if gone:
        say("no longer in the channels: " + ", ".join(gone))
    return [records[each] for each in packages if each in records]


def identity(record):
    return record.name.normalized, str(record.version), str(record.build)


def described(record):
    """A record of rattler as plain data."""
    name, version, build = identity(record)
    noarch = "python" if record.noarch.python else "generic" if record.noarch.generic else ""
    return {
        "name": name, "version": version, "build": build, "build_number": record.build_number,
        "subdir": record.subdir, "noarch": noarch, "url": record.url,
        "channel": record.url.rsplit("/", 2)[0],
        "sha256": record.sha256.hex() if record.sha256 else "",
        "md5": record.md5.hex() if record.md5 else "",
        "size": record.size or 0, "depends": record.depends, "constrains": record.constrains,
        "license": record.license or "",
        "timestamp": int(record.timestamp.timestamp() * 1000) if record.timestamp else 0,
    }  # fmt: skip


async def from_archive(rattler, record, path):
    """A record for rattler: what is not told of a package is in the package."""
    try:
        found = await rattler.RepoDataRecord.from_package_archive(path)
    except Exception as error:  # one for each way to be damaged, and nothing above them
        raise Failure("%s is no conda package: %s" % (path, error)) from None
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


def rattler_downloader(rattler):
    """Downloads as rattler's configuration says: mirrors, proxies, credentials."""
    import asyncio

    from rattler.package_streaming import download_to_path

    async def download_all(records, folder):
        client = rattler.Client.from_config(configured(rattler))
        places = asyncio.Semaphore(DOWNLOADS_AT_ONCE)

        async def download(record):
            async with places:
                try:
                    await download_to_path(
                        client, record["url"], os.path.join(folder, file_name(record))
                    )
                except RuntimeError as error:
                    raise Failure(undownloaded(record, error)) from None
                say("downloaded " + file_name(record))

        await asyncio.gather(*map(download, records))

    return lambda records, folder: asyncio.run(download_all(records, folder))


def undownloaded(record, error):
    lines = ["%s cannot be downloaded: %s" % (record["url"], error)]
    if "404" in str(error) or "410" in str(error):
        lines.append("Its channel may have withdrawn it: solve again to take another")
    return "\n".join(lines)


def install(rattler, packages, paths, prefix, work):
    """Unpack and link packages whose files were verified.

    Args:
        packages: as described() gives them, or a lock.
        paths: of their files.
        work: packages are unpacked there; it is not needed afterwards.
    """
    import asyncio

    async def whole():
        records = [await from_archive(rattler, *each) for each in zip(packages, paths)]
        await link(rattler, records, prefix, os.path.join(work, "unpacked"))

    asyncio.run(whole())
    tidy_records(prefix)
    left = unrun_scripts(prefix)
    if left:
        say("not run, as it could do anything: the post-link script of " + ", ".join(left))


async def link(rattler, records, prefix, unpacked):
    from rattler import exceptions as problems

    # Nothing else ever uses what is unpacked there, so a hard link is as good as a copy.
    own = rattler.Config.from_toml("allow-hard-links = true")
    try:
        await rattler.install(
            records, prefix, cache_dir=unpacked, config=configured(rattler).merge(own),
            reporter=progress(len(records)), show_progress=False,
        )  # fmt: skip
    except (problems.InstallerError, problems.TransactionError) as error:
        raise Failure("a package cannot be installed\n%s" % error) from None


def understood(kind, text):
    """What a text is to rattler."""
    try:
        return kind(text)
    except Exception as error:  # one for each kind of text, and nothing above them
        raise Failure("%s: %s" % (text, error)) from None


def virtual(rattler, name, version, build):
    # Plain text before py-rattler 0.28.
    build_string = getattr(rattler, "BuildString", str)
    return rattler.GenericVirtualPackage(
        understood(rattler.PackageName, name),
        understood(rattler.Version, version),
        understood(build_string, build),
    )


def unsolvable(spec, explanation):
    lines = ["the channels have no packages that fit together", explanation.strip()]
    lines += ["Asked for was"] + requested(spec)
    if re.search(r"(^|\W)__[a-z]", explanation):
        lines.append(
            "A package asks more of the machine (__cuda, __glibc, ...) than it is said to have: "
            "take another version or build of that package, or correct what is said of the machine"
        )
    return "\n".join(lines)


def progress(total):
    """What rattler tells while it installs, as one line for each package."""
    from rattler.install import InstallerReporter

    class Progress(InstallerReporter):
        def __init__(self):
            self.names = {}
            self.done = 0

        def on_link_start(self, operation, package_name):
            self.names[operation] = package_name
            return operation

        def on_link_complete(self, index):
            self.done += 1
            say("[%d/%d] %s" % (self.done, total, self.names[index]))

    return Progress()


def tidy_records(prefix):
    """Let everyone read them whom the umask lets: rattler writes them for the owner only."""
    umask = os.umask(0)
    os.umask(umask)
    folder = os.path.join(prefix, "conda-meta")
    for name in os.listdir(folder):
        os.chmod(os.path.join(folder, name), 0o666 & ~umask)


def unrun_scripts(prefix):
    """Packages that bring a script to run after installation."""
    folder = os.path.join(prefix, "bin")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [re.match(r"\.(.+)-post-link\.sh$", name) for name in names]
    return sorted(each.group(1) for each in found if each)


# By a conda program


def find_program(environ):
    """The conda program of this machine; None if there is none."""
    for name in (environ.get("CONDA_EXE"),) + PROGRAMS:
        found = shutil.which(name, path=environ.get("PATH", os.defpath)) if name else None
        if found:
            return found
    return None


def program_command(program, spec, prefix):
    """The command line that makes the environment."""
    channels = [word for name in spec["channels"] for word in ("--channel", name)]
    options = ["create", "--yes", "--prefix", prefix, "--override-channels"]
    return [program] + options + channels + spec["specs"]


def program_variables(spec, cache):
    """What it has to see: another machine than this one, and no links into its cache."""
    machine = {name[2:].upper(): version for name, version, _ in virtual_packages(spec)[:-1]}
    machine["ARCHSPEC"] = virtual_packages(spec)[-1][2]
    machine.setdefault("CUDA", "")  # empty: that there is none
    variables = {"CONDA_OVERRIDE_" + name: value for name, value in machine.items()}
    variables["CONDA_SUBDIR"] = spec["platform"]
    for family in ("CONDA_", "MAMBA_"):
        variables[family + "ALWAYS_COPY"] = "true"
        variables[family + "CHANNEL_PRIORITY"] = "strict"
    if cache:
        variables["CONDA_PKGS_DIRS"] = os.path.join(cache, "pkgs")
    return variables


def install_by_program(program, spec, prefix, cache):
    run_program(program_command(program, spec, prefix), spec, cache)
    if not read_records(prefix):
        raise Failure("%s made no environment in %s" % (program, prefix))


def run_program(command, spec, cache):
    say("by " + command[0])
    status = subprocess.call(command, env=dict(os.environ, **program_variables(spec, cache)))
    if status:
        lines = ["%s create failed with exit status %d; above is why" % (command[0], status)]
        raise Failure("\n".join(lines + ["Asked for was"] + requested(spec)))


def solve_by_program(program, spec, work):
    """The records of the packages that a program would install."""
    asked = dict(spec, specs=spec["specs"] + ["=".join(each) for each in kept(spec)])
    command = program_command(program, asked, os.path.join(work, "none")) + ["--dry-run", "--json"]
    say("by " + program)
    # Of what is in its cache already it would tell less.
    variables = program_variables(spec, os.path.join(work, "empty"))
    process = subprocess.Popen(
        command, env=dict(os.environ, **variables), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    output = process.communicate()[0].decode(errors="replace")
    try:
        answer = json.loads(output)
    except ValueError:
        raise Failure("%s did not answer in JSON: %.2000s" % (program, output)) from None
    if process.returncode or "actions" not in answer:
        said = answer.get("message") or answer.get("error") or answer
        lines = ["%s finds no packages: %s" % (program, said), "Asked for was"]
        raise Failure("\n".join(lines + requested(spec)))
    fetched = {each["name"]: each for each in answer["actions"].get("FETCH", ())}
    linked = [each["name"] for each in answer["actions"].get("LINK", ())]
    packages = [told(fetched.get(name, {"name": name})) for name in linked if name[:2] != "__"]
    for each in packages:
        check_record(each, spec["platform"])
    return packages


def told(record):
    """A record of a program as described() gives those of rattler."""
    url = record.get("url")
    if not url:
        raise Failure("the program does not tell where %(name)s comes from" % record)
    texts = ("name", "version", "noarch", "url", "sha256", "md5", "license")
    numbers = ("build_number", "size", "timestamp")
    return dict(
        {key: record.get(key) or "" for key in texts},
        build=record.get("build") or record.get("build_string") or "",
        subdir=url.split("/")[-2], channel=url.rsplit("/", 2)[0],
        depends=record.get("depends") or [], constrains=record.get("constrains") or [],
        **{key: record.get(key) or 0 for key in numbers}
    )  # fmt: skip


def program_downloader(program, spec, work):
    """Downloads as the configuration of a conda program says."""

    def download(records, folder):
        explicit = write_explicit(work, [(each["url"], each) for each in records])
        command = [program, "create", "--yes", "--prefix", os.path.join(work, "none")]
        packages = os.path.join(work, "downloads")
        run_program(command + ["--download-only", "--file", explicit], spec, packages)
        for record in records:
            arrived = os.path.join(packages, "pkgs", file_name(record))
            if os.path.exists(arrived):
                shutil.move(arrived, os.path.join(folder, file_name(record)))

    return download


def install_files_by_program(program, spec, paths, prefix, work):
    """Let it install packages whose files were verified, from these and from nothing else."""
    urls = ["file://" + urllib.request.pathname2url(path) for path in paths]
    explicit = write_explicit(work, list(zip(urls, spec["explicit"])))
    command = [program, "create", "--yes", "--prefix", prefix, "--file", explicit, "--offline"]
    run_program(command, spec, os.path.join(work, "unpacked"))
    if not read_records(prefix):
        raise Failure("%s made no environment in %s" % (program, prefix))


def write_explicit(work, packages):
    """A list of URLs as every conda program reads it."""
    lines = [url + ("#" + each["md5"] if each.get("md5") else "") for url, each in packages]
    path = os.path.join(work, "explicit.txt")
    write_whole(path, "\n".join(["@EXPLICIT"] + lines) + "\n")
    return path


# By one or the other


def solver(spec):
    """py-rattler and no program, or a program that was named or is there in its place."""
    program = spec.get("program")
    if program:
        return None, program
    try:
        import rattler
    except ImportError as error:
        program = find_program(os.environ)
        if not program:
            raise Failure(
                "no means to install conda packages: %s has no py-rattler (%s), and there is no "
                "micromamba, mamba or conda on PATH\nInstall one: %s -m pip install py-rattler, "
                "on Python 3.10 and newer, or load the module of this site that has conda"
                % (sys.executable, error, sys.executable)
            ) from None
        return None, program
    return rattler, None


def downloader(spec, work):
    rattler, program = solver(spec)
    return rattler_downloader(rattler) if rattler else program_downloader(program, spec, work)


def make(spec, prefix, cache, work):
    """Install what was asked for: what a lock names, or what a solve finds."""
    rattler, program = solver(spec)
    if program and "explicit" not in spec:
        install_by_program(program, spec, prefix, cache)
        return
    packages = spec["explicit"] if "explicit" in spec else solve(rattler, spec, cache)
    paths = collect(packages, spec.get("files"), cache, work, downloader(spec, work))
    if program:
        install_files_by_program(program, spec, paths, prefix, work)
    else:
        install(rattler, packages, paths, prefix, work)
    restore_origins(prefix, {each["name"]: each["url"] for each in packages})


def restore_origins(prefix, origins):
    """Write where packages come from, in the place of where they lay for a while."""
    for name, record in read_records(prefix):
        url = origins[record["name"]]
        record.update(url=url, channel=url.rsplit("/", 2)[0] + "/")
        for key in PASSING:
            record.pop(key, None)
        write_whole(os.path.join(prefix, "conda-meta", name), json.dumps(record, indent=2))


# A copy of an environment


def clone(source, prefix):
    """Copy an environment, with the new path in its files in the place of the old one."""
    records = read_records(source)
    if not records:
        raise Failure("%s is not a conda environment: it has no conda-meta/*.json" % source)
    inside = os.path.realpath(prefix) + os.sep
    if inside.startswith(os.path.realpath(source) + os.sep):
        raise Failure("%s lies in %s, which is to be copied" % (prefix, source))
    recorded = {path["_path"]: path for _, record in records for path in paths_of(record)}
    copier = Copier(source, prefix, recorded)
    copier.check_room()
    copier.copy_all()
    write_records(prefix, records, copier.digests)
    if copier.unchanged:
        say("these still name %s, as they have no room for the new path:" % source)
        for path in copier.unchanged[:10] + ["..."] * (len(copier.unchanged) > 10):
            say("  " + path)


def paths_of(record):
    """What a record says of each file; nothing before conda 4.3."""
    return (record.get("paths_data") or {}).get("paths", ())


def write_records(prefix, records, digests):
    """The records with the hashes of the files that were rewritten."""
    folder = os.path.join(prefix, "conda-meta")
    for name, record in records:
        for path in paths_of(record):
            if path["_path"] in digests:
                path["sha256_in_prefix"] = digests[path["_path"]]
        write_whole(os.path.join(folder, name), json.dumps(record, indent=2))
    # Its existence makes a folder an environment to conda.
    with open(os.path.join(folder, "history"), "a"):
        pass


def spellings(folder):
    """How files may name a folder: as it was given, and without links."""
    found = {os.path.abspath(folder), os.path.realpath(folder)}
    return [os.fsencode(each) for each in sorted(found, key=len, reverse=True)]


def naming(prefixes):
    """A pattern for these prefixes, but not for folders that only begin like them."""
    alternatives = b"|".join(re.escape(each) for each in prefixes)
    return re.compile(b"(?:" + alternatives + rb")(?![\w-]|\.\w)")


def in_text(data, pattern, new):
    """Text with the new prefix; a first line that no kernel takes finds its program by PATH."""
    data = pattern.sub(lambda found: new, data)
    first, end, rest = data.partition(b"\n")
    program = re.match(b"#!" + re.escape(new) + rb"/(?:\S*/)?(\S+)(.*)", first)
    if program and (len(first) > SHEBANG_LIMIT or b" " in new):
        first = b"#!/usr/bin/env " + program.group(1) + program.group(2)
    return first + end + rest


def in_binary(data, pattern, new, room):
    """Binary data with the new prefix, as long as it was; None if that has no room.

    Args:
        room: bytes that were set aside for each prefix; where it is shorter, the rest
            are zeros at the end of its string. None: just its own length.
    """
    short = []

    def replaced(found):
        text = found.group(1)
        names = pattern.findall(text)
        spare = sum(room - len(name) for name in names) if room else 0
        text = pattern.sub(lambda _: new, text)
        if len(found.group(2)) < spare or len(text) > len(found.group(1)) + spare:
            short.append(found.start())
        return text.ljust(len(found.group()), b"\0")

    strings = re.compile(b"(" + pattern.pattern + rb"[^\0]*)(\0*)")
    data = strings.sub(replaced, data)
    return None if short else data


class Copier:
    """Copies the files of an environment.

    Attributes:
        digests: sha256 of the files that were rewritten, by their path in the environment.
        unchanged: files that still name the old place.
    """

    def __init__(self, source, prefix, recorded):
        self.source = source
        self.prefix = prefix
        self.recorded = recorded
        self.spellings = spellings(source)
        self.pattern = naming(self.spellings)
        self.new = os.fsencode(prefix)
        self.digests = {}
        self.unchanged = []
        self.copied = 0
        self.said = time.time()

    def check_room(self):
        """Refuse a prefix that is longer than what the packages set aside for it."""
        for path, entry in sorted(self.recorded.items()):
            room = self.room(entry)
            if room is not None and len(self.new) > room:
                raise Failure(
                    "%s has %d characters, and %s of the environment %s has room for %d\n"
                    "Name a folder with a shorter path"
                    % (self.prefix, len(self.new), path, self.source, room)
                )

    @staticmethod
    def room(entry):
        """Bytes set aside for the prefix in a binary file; None for other files."""
        if entry.get("file_mode") == "binary" and entry.get("prefix_placeholder"):
            return len(os.fsencode(entry["prefix_placeholder"]))
        return None

    def copy_all(self):
        for folder, folders, files in os.walk(self.source, onerror=unreadable):
            relative = os.path.relpath(folder, self.source)
            target = os.path.normpath(os.path.join(self.prefix, relative))
            if relative == "." and os.path.isdir(os.path.join(folder, "condabin")):
                folders[:] = [name for name in folders if name not in NOT_CLONED]
            os.makedirs(target, exist_ok=True)
            for name in files + [each for each in folders if is_link(folder, each)]:
                path = os.path.normpath(os.path.join(relative, name))
                self.copy(os.path.join(folder, name), os.path.join(target, name), path)
        named = any(entry.get("prefix_placeholder") for entry in self.recorded.values())
        if named and not self.digests:
            raise Failure(
                "no file of %s names it: it was made at another path, and which cannot be told\n"
                "Name the environment by the path that it was made at" % self.source
            )
        say("%d files and links, %d rewritten" % (self.copied, len(self.digests)))

    def copy(self, source, target, path):
        kind = os.lstat(source).st_mode
        if stat.S_ISLNK(kind):
            link = self.pattern.sub(lambda found: self.new, os.fsencode(os.readlink(source)))
            os.symlink(os.fsdecode(link), target)
        elif stat.S_ISREG(kind):
            data = self.rewritten(source, path)
            if data is None:
                shutil.copy2(source, target)
            else:
                # With a time of its own: bytecode made from the old text is not taken for it.
                with open(target, "wb") as stream:
                    stream.write(data)
                self.digests[path] = hashlib.sha256(data).hexdigest()
            # What others may only read, its new owner may change.
            os.chmod(target, stat.S_IMODE(kind) & 0o777 | 0o600)
        else:
            say("not copied, as it is neither a file nor a link: " + path)
            return
        self.copied += 1
        if time.time() - self.said > SECONDS_BETWEEN_LINES:
            self.said = time.time()
            say("copied %d files" % self.copied)

    def rewritten(self, source, path):
        """What a file holds in the copy; None if that is what it holds now."""
        # Bytecode names its source only in tracebacks, and Python mends that.
        if path.endswith(".pyc") or not self.names_source(source):
            return None
        with open(source, "rb") as stream:
            data = stream.read()
        entry = self.recorded.get(path, {})
        if entry.get("file_mode") == "text" or b"\0" not in data:
            changed = in_text(data, self.pattern, self.new)
        # How else to change a binary file is not known without a record of it.
        elif "prefix_placeholder" in entry or data.startswith(b"\x7fELF"):
            changed = in_binary(data, self.pattern, self.new, self.room(entry))
        else:
            changed = None
        if changed is None:
            self.unchanged.append(path)
        return None if changed == data else changed

    def names_source(self, path):
        if not os.path.getsize(path):
            return False
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return any(data.find(spelling) >= 0 for spelling in self.spellings)


def is_link(folder, name):
    return os.path.islink(os.path.join(folder, name))


def unreadable(error):
    raise error


# The whole


def begin(prefix):
    """Mark the environment as unfinished, and remove what an earlier run left of it.

    Returns:
        The mark, a folder for what is needed on the way, to be removed at the end.
    """
    mark = prefix + ".unfinished"
    if os.path.exists(mark):
        say("an earlier run did not finish %s: it is made anew" % prefix)
        shutil.rmtree(prefix, ignore_errors=True)
        shutil.rmtree(mark)
    if os.path.lexists(prefix) and not (os.path.isdir(prefix) and not os.listdir(prefix)):
        raise Failure("%s exists already; remove it or name another folder" % prefix)
    os.makedirs(mark, mode=0o700)
    return mark


def undo(prefix, mark):
    """Leave nothing of an environment that could not be made."""
    shutil.rmtree(prefix, ignore_errors=True)
    if not os.path.lexists(prefix):
        shutil.rmtree(mark)


def report(prefix):
    """What was installed, in the same words whatever installed it."""
    found = []
    for _, record in read_records(prefix):
        package = {name: record.get(name) or "" for name in REPORTED}
        # Some programs write the folder of the architecture into the channel.
        found.append(dict(package, channel=package["url"].rsplit("/", 2)[0]))
    return found


def options_of(arguments):
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


def main(arguments):
    options = options_of(arguments)
    target = os.path.abspath(options.target)
    cache = options.cache or os.environ.get("RATTLER_CACHE_DIR")
    cache = os.path.abspath(cache) if cache else ""
    spec = None if options.clone else read_spec(options.source)
    if options.solve_only or options.fetch_only:
        prepare(spec, target, cache, options.fetch_only)
        return
    mark = begin(target)
    try:
        if spec is None:
            # $NAME is what a module has set.
            clone(os.path.expandvars(options.source), target)
        else:
            for line in requested(spec):
                say(line.strip())
            make(spec, target, cache, mark)
        packages = report(target)
        if options.report:
            write_whole(options.report, json.dumps(packages, indent=1))
    except Exception:
        # Not where somebody interrupts: rattler's threads go on writing until the end of
        # this process, and the mark makes the next run begin anew.
        undo(target, mark)
        raise
    shutil.rmtree(mark)
    say("%d packages in %s" % (len(packages), target))


def prepare(spec, target, cache, fetching):
    """Solve, or fetch what a lock names; install nothing."""
    for line in requested(spec):
        say(line.strip())
    if fetching:
        os.makedirs(target, exist_ok=True)
    work = tempfile.mkdtemp(prefix=".conda_env.", dir=target if fetching else None)
    try:
        if fetching:
            fetch(spec, target, cache, work)
            say("%d packages in %s" % (len(spec["explicit"]), target))
        else:
            rattler, program = solver(spec)
            records = (
                solve_by_program(program, spec, work) if program else solve(rattler, spec, cache)
            )
            records.sort(key=lambda each: each["name"])
            write_whole(target, json.dumps(records, indent=1, sort_keys=True))
            say("%d packages" % len(records))
    finally:
        shutil.rmtree(work, ignore_errors=True)  # threads may be writing there still


if __name__ == "__main__":
    STATUS = 1
    try:
        main(sys.argv[1:])
        STATUS = 0
    except Failure as problem:
        say("conda_env: %s" % problem)
    except OSError as problem:
        # A full disk has no name.
        say("conda_env: %s" % ": ".join(filter(None, (problem.filename, problem.strerror))))
    except KeyboardInterrupt:
        say("conda_env: interrupted")
        STATUS = 130
    sys.stdout.flush()
    # The interpreter can crash on its way out after rattler has installed something.
    os._exit(STATUS)
