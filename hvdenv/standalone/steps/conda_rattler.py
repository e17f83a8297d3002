"""Conda environments by py-rattler, which runs on Python 3.10 and newer.

Stand-alone: imports nothing of hvdenv.
"""

import asyncio
import os
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import rattler
from conda_spec import (
    Failure,
    Record,
    Spec,
    channel_of,
    channels_of,
    check_record,
    file_name,
    preferred,
    requested,
    say,
    virtual_packages,
)
from index_page import other_page
from rattler import exceptions as problems
from rattler.install import InstallerReporter
from rattler.package_streaming import download_to_path

DOWNLOADS_AT_ONCE = 8


class Rattler:
    """Solves, downloads and installs as rattler's configuration says: mirrors, proxies, credentials.

    Args:
        spec: the request.
        cache: keeps the indexes of channels; may be empty.
        work: folder for temporary files.
    """

    def __init__(self, spec: Spec, cache: str, work: str) -> None:
        self.spec, self.cache, self.work = spec, cache, work
        self.config = _parsed(rattler.Config.load_from_default_locations, "rattler")

    def solve(self) -> List[Record]:
        """The packages that meet the request."""
        packages = [_record(each) for each in asyncio.run(self._solve())]
        for each in packages:
            check_record(each, self.spec["platform"])
        return packages

    async def _solve(self) -> List[Any]:
        folder = Path(self.cache, "repodata") if self.cache else None
        gateway = rattler.Gateway.from_config(self.config, cache_dir=folder)
        channels = [_parsed(rattler.Channel, name) for name in channels_of(self.spec)]
        platforms = [self.spec["platform"], "noarch"]
        try:
            return await rattler.solve(
                channels,
                [_parsed(_match_spec, text) for text in self.spec["specs"]],
                gateway=gateway,
                platforms=platforms,
                locked_packages=await _available(
                    gateway, channels, platforms, preferred(self.spec)
                ),
                virtual_packages=[_virtual(*each) for each in virtual_packages(self.spec)],
            )
        except problems.SolverError as error:
            raise Failure(_unsolvable(self.spec, str(error))) from None
        except problems.GatewayError as error:
            raise Failure(_unreadable(channels, error)) from None

    def download(self, records: List[Record], folder: str) -> None:
        asyncio.run(self._download(records, folder))

    async def _download(self, records: List[Record], folder: str) -> None:
        client = rattler.Client.from_config(self.config)
        slots = asyncio.Semaphore(DOWNLOADS_AT_ONCE)

        async def download(record: Record) -> None:
            async with slots:
                path = Path(folder, file_name(record))
                try:
                    await download_to_path(client, record["url"], path)
                except RuntimeError as error:
                    raise Failure(_undownloaded(record, error)) from None
                say("downloaded " + file_name(record))

        await asyncio.gather(*map(download, records))

    def install(self, packages: List[Record], paths: List[str], prefix: str) -> None:
        """Unpack and link packages whose files were verified."""
        asyncio.run(self._install(packages, paths, prefix))
        _let_others_read_records(prefix)
        scripts = _post_link_scripts(prefix)
        if scripts:
            say("not run, as it could do anything: the post-link script of " + ", ".join(scripts))

    async def _install(self, packages: List[Record], paths: List[str], prefix: str) -> None:
        records = [await _from_archive(*each) for each in zip(packages, paths)]
        # Nothing else uses what is unpacked for this environment: hard links are safe.
        own = rattler.Config.from_toml("allow-hard-links = true")
        try:
            await rattler.install(
                records,
                prefix,
                cache_dir=Path(self.work, "unpacked"),
                config=self.config.merge(own),
                reporter=_Progress(len(records)),  # type: ignore[abstract]
                show_progress=False,
            )
        except (problems.InstallerError, problems.TransactionError) as error:
            raise Failure("a package cannot be installed\n%s" % error) from None


def _unreadable(channels: List[Any], error: Exception) -> str:
    lines = ["a channel cannot be read", str(error)]
    for channel in channels:
        url = channel.base_url.rstrip("/")
        title = other_page(url + "/noarch/repodata.json") if url.startswith("http") else None
        if title is not None:
            lines.append("%s answers with a page that is no package index%s" % (url, title))
            lines.append("Log in if the network requires it, or name a mirror")
    lines.append("Check its name and the network: a login node may reach what compute nodes do not")
    return "\n".join(lines)


async def _available(
    gateway: Any, channels: List[Any], platforms: Any, packages: List[Tuple[str, str, str]]
) -> List[Any]:
    """The channels' records of packages, without those that were withdrawn."""
    if not packages:
        return []
    names = [name for name, _, _ in packages]
    answer = await gateway.query(channels, platforms, names, recursive=False)
    records = {_identity(record): record for part in answer for record in part}
    gone = [" ".join(each) for each in packages if each not in records]
    if gone:
        say("no longer in the channels: " + ", ".join(gone))
    return [records[each] for each in packages if each in records]


def _identity(record: Any) -> Tuple[str, str, str]:
    return record.name.normalized, str(record.version), str(record.build)


def _record(record: Any) -> Record:
    """A record of rattler as plain data."""
    name, version, build = _identity(record)
    noarch = "python" if record.noarch.python else "generic" if record.noarch.generic else ""
    return {
        "name": name, "version": version, "build": build, "build_number": record.build_number,
        "subdir": record.subdir, "noarch": noarch, "url": record.url,
        "channel": channel_of(record.url),
        "sha256": record.sha256.hex() if record.sha256 else "",
        "md5": record.md5.hex() if record.md5 else "",
        "size": record.size or 0, "depends": record.depends, "constrains": record.constrains,
        "license": record.license or "",
        "timestamp": int(record.timestamp.timestamp() * 1000) if record.timestamp else 0,
    }  # fmt: skip


async def _from_archive(record: Record, path: str) -> Any:
    """rattler's record of a package: from its file, with what the request says of it."""
    try:
        found = await rattler.RepoDataRecord.from_package_archive(path)
    except Exception as error:  # its exceptions have no common base
        raise Failure("%s is no conda package: %s" % (path, error)) from None
    if _identity(found)[:2] != (record["name"], record["version"]):
        raise Failure(
            "%s is %s %s, not %s %s"
            % ((path,) + _identity(found)[:2] + (record["name"], record["version"]))
        )
    # Channels correct these after a package was made.
    for name in ("depends", "constrains"):
        if name in record:
            setattr(found, name, record[name])
    if record.get("md5"):
        found.md5 = bytes.fromhex(record["md5"])
    return found


def _undownloaded(record: Record, error: Exception) -> str:
    lines = ["%s cannot be downloaded: %s" % (record["url"], error)]
    if "404" in str(error) or "410" in str(error):
        lines.append("Its channel may have withdrawn it: solve again to get another one")
    return "\n".join(lines)


def _parsed(kind: Callable[..., Any], text: str) -> Any:
    """An object of rattler made from a text."""
    try:
        return kind(text)
    except Exception as error:  # its exceptions have no common base
        raise Failure("%s: %s" % (text, error)) from None


def _match_spec(text: str) -> Any:
    return rattler.MatchSpec(text, strict=False)


def _virtual(name: str, version: str, build: str) -> Any:
    return rattler.GenericVirtualPackage(
        _parsed(rattler.PackageName, name),
        _parsed(rattler.Version, version),
        _parsed(getattr(rattler, "BuildString", str), build),  # plain text before 0.28
    )


def _unsolvable(spec: Spec, explanation: str) -> str:
    lines = ["the channels have no packages that fit together", explanation.strip()]
    lines += ["Requested:"] + requested(spec)
    if re.search(r"(^|\W)__[a-z]", explanation):
        lines.append(
            "A package asks more of the machine (__cuda, __glibc, ...) than the machine is said to "
            "have: choose another version or build of that package, or correct the machine's facts"
        )
    return "\n".join(lines)


class _Progress(InstallerReporter):
    """Prints a line for each installed package."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.names: Dict[int, str] = {}
        self.done = 0

    def on_link_start(self, operation: int, package_name: str) -> int:
        self.names[operation] = package_name
        return operation

    def on_link_complete(self, index: int) -> None:
        self.done += 1
        say("[%d/%d] %s" % (self.done, self.total, self.names[index]))


def _let_others_read_records(prefix: str) -> None:
    """Give records the modes of the umask: rattler writes them for the owner only."""
    umask = os.umask(0)
    os.umask(umask)
    folder = os.path.join(prefix, "conda-meta")
    for name in os.listdir(folder):
        os.chmod(os.path.join(folder, name), 0o666 & ~umask)


def _post_link_scripts(prefix: str) -> List[str]:
    """Packages with a script to run after installation."""
    folder = os.path.join(prefix, "bin")
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [re.match(r"\.(.+)-post-link\.sh$", name) for name in names]
    return sorted(each.group(1) for each in found if each)
