"""Conda environments by py-rattler, which runs on Python 3.10 and newer.

Stand-alone: imports nothing of hvdenv.
"""

import asyncio
import glob
import os
import re
from pathlib import Path
from typing import Any, Callable, List, Tuple

import rattler
from conda_spec import (
    Failure,
    Files,
    Record,
    Spec,
    channels_of,
    check_record,
    file_name,
    requested,
    say,
    virtual_packages,
)
from pip_sources import other_page
from rattler import exceptions as problems
from rattler.package_streaming import download_to_path

DOWNLOADS_AT_ONCE = 8


class Rattler:
    """Solves, downloads and installs as rattler's configuration says: mirrors, proxies, credentials.

    Args:
        spec: the request.
        cache: keeps the indexes of channels; may be empty.
    """

    def __init__(self, spec: Spec, cache: str) -> None:
        self.spec, self.cache = spec, cache
        self.config = _parsed(rattler.Config.load_from_default_locations, "rattler")

    def solve(self) -> List[Record]:
        """The packages that meet the request."""
        packages = [_plain(each) for each in asyncio.run(self._solve())]
        for each in packages:
            check_record(each)
        return packages

    async def _solve(self) -> List[Any]:
        folder = Path(self.cache, "repodata") if self.cache else None
        gateway = rattler.Gateway.from_config(self.config, cache_dir=folder)
        channels = [_parsed(rattler.Channel, name) for name in channels_of(self.spec)]
        platforms: Any = [self.spec["platform"], "noarch"]
        specs = [_parsed(_match_spec, text) for text in self.spec["specs"]]
        machine = [_virtual(*each) for each in virtual_packages(self.spec)]
        try:
            names = [each["name"] for each in self.spec.get("prefer", ())]
            answer = await gateway.query(channels, platforms, names, recursive=False)
            return await rattler.solve(
                channels,
                specs,
                gateway=gateway,
                platforms=platforms,
                locked_packages=self._still_there([each for part in answer for each in part]),
                virtual_packages=machine,
            )
        except problems.SolverError as error:
            raise Failure(_unsolvable(self.spec, str(error))) from None
        except problems.GatewayError as error:
            raise Failure(_unreadable(channels, error)) from None

    def _still_there(self, found: List[Any]) -> List[Any]:
        """The channels' records of preferred packages, without those that were withdrawn."""
        records = {_identity(each): each for each in found}
        preferred = [
            (each["name"], each["version"], each["build"]) for each in self.spec.get("prefer", ())
        ]
        gone = [" ".join(each) for each in preferred if each not in records]
        if gone:
            say("no longer in the channels: " + ", ".join(gone))
        return [records[each] for each in preferred if each in records]

    def download(self, files: Files) -> None:
        asyncio.run(self._download(files))

    async def _download(self, files: Files) -> None:
        client = rattler.Client.from_config(self.config)
        slots = asyncio.Semaphore(DOWNLOADS_AT_ONCE)

        async def download(record: Record, path: str) -> None:
            async with slots:
                try:
                    await download_to_path(client, record["url"], Path(path))
                except RuntimeError as error:
                    raise Failure(_undownloaded(record, error)) from None
                say("downloaded " + file_name(record))

        await asyncio.gather(*(download(*each) for each in files))

    def install(self, packages: List[Record], paths: List[str], prefix: str) -> None:
        """Unpack and link packages whose files were verified."""
        asyncio.run(self._install(packages, paths, prefix))
        # rattler writes records for the owner only.
        umask = os.umask(0)
        os.umask(umask)
        for path in glob.glob(os.path.join(glob.escape(prefix), "conda-meta", "*")):
            os.chmod(path, 0o666 & ~umask)
        for path in glob.glob(os.path.join(glob.escape(prefix), "bin", ".*-post-link.sh")):
            say("not run, as it could do anything: the script %s" % path)

    async def _install(self, packages: List[Record], paths: List[str], prefix: str) -> None:
        records = [await _from_archive(*each) for each in zip(packages, paths)]
        say("installing %d packages" % len(records))
        # Nothing else uses what is unpacked for this environment: hard links are safe.
        own = rattler.Config.from_toml("allow-hard-links = true")
        try:
            await rattler.install(
                records,
                prefix,
                cache_dir=Path(prefix + ".unfinished", "unpacked"),
                config=self.config.merge(own),
                show_progress=False,
            )
        except (problems.InstallerError, problems.TransactionError) as error:
            raise Failure("a package cannot be installed\n%s" % error) from None


def _identity(record: Any) -> Tuple[str, str, str]:
    return record.name.normalized, str(record.version), str(record.build)


def _plain(record: Any) -> Record:
    """A record of rattler as plain data."""
    name, version, build = _identity(record)
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


async def _from_archive(record: Record, path: str) -> Any:
    """rattler's record of a package: from its file, with what the request says of it."""
    try:
        found = await rattler.RepoDataRecord.from_package_archive(path)
    except Exception as error:  # its exceptions have no common base
        raise Failure("%s is no conda package: %s" % (file_name(record), error)) from None
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
        _parsed(rattler.BuildString, build),
    )


def _undownloaded(record: Record, error: Exception) -> str:
    text = "%s cannot be downloaded: %s" % (record["url"], error)
    if "404" in str(error) or "410" in str(error):
        text += "\nIts channel may have withdrawn it: solve again to get another one"
    return text


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


def _unsolvable(spec: Spec, explanation: str) -> str:
    lines = ["the channels have no packages that fit together", explanation.strip()]
    lines += ["Requested:"] + requested(spec)
    if re.search(r"(^|\W)__[a-z]", explanation):
        lines.append(
            "A package asks more of the machine (__cuda, __glibc, ...) than the machine is said to "
            "have: choose another version or build of that package, or correct the machine's facts"
        )
    return "\n".join(lines)
