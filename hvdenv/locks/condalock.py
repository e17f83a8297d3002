"""The conda packages of a lock, in conda-lock's own format: ``conda-lock.yml``, version 1.

conda-lock's models write and read it, so that ``conda-lock install`` accepts the file. It has
name, version, URL, hashes and dependencies of each package. Build and subdir of a package are in
its URL; the package itself, which the sha256 identifies, has the rest.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

from packaging.utils import canonicalize_name

from hvdenv import schema
from hvdenv.errors import RecipeError, StepError
from hvdenv.libraries import install_command
from hvdenv.locks.lockfile import CONDA, Locked, malformed, reachable

_HEADER = """\
# Written by hvdenv in the format of conda-lock: `conda-lock install` takes it as well.
"""
_DEPTH = 10
# /t/ is followed by a token, and conda-lock expands variables after a $.
_URL = r"(https?|file)://(?!.*/t/[^/]+/)[^\s@?#'\"`$\\]+"

Platform = Literal["linux-64", "linux-aarch64", "linux-ppc64le"]
Channel = Annotated[
    str,
    schema.Pattern(_URL + r"|[a-z0-9][a-z0-9._/-]*", "a channel's name, or URL without a token"),
]


class CondaPackage(NamedTuple):
    """A package of a lock; ``depends`` is sorted, in conda's syntax: ``python >=3.10,<3.11``."""

    name: Annotated[str, schema.Pattern(r"[a-z0-9_][a-z0-9._-]*", "a conda package's name")]
    version: Annotated[str, schema.Pattern(r"[^\s/-]+", "a version")]
    url: Annotated[
        str,
        schema.Pattern(
            _URL + r"/(linux-[a-z0-9]+|noarch)/[^/]+-[^/-]+-[^/-]+(\.conda|\.tar\.bz2)",
            "the URL of a conda package, without a token",
        ),
    ]
    sha256: Annotated[str, schema.Pattern(r"[0-9a-f]{64}", "a sha256")]
    md5: Annotated[str, schema.Pattern(r"[0-9a-f]{32}", "an md5, which conda-lock requires")]
    depends: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """Name of its file, by which an offline folder identifies it."""
        return unquote(self.url.rpartition("/")[2])

    @property
    def build(self) -> str:
        return re.sub(r"(\.conda|\.tar\.bz2)$", "", self.file_name).rpartition("-")[2]

    @property
    def subdir(self) -> str:
        return self.url.split("/")[-2]


class CondaLock(NamedTuple):
    """A ``conda-lock.yml``, for one platform.

    Attributes:
        content_hash: of the request, as conda-lock defines it. conda-lock compares it before it
            solves again; no program compares it when it installs.
    """

    platform: Platform
    channels: tuple[Channel, ...]
    packages: tuple[CondaPackage, ...]
    content_hash: str


def lock(records: Iterable[Mapping[str, Any]], spec: Mapping[str, Any]) -> CondaLock:
    """A lock of the result of a solve.

    Args:
        records: what ``conda_env.py --solve-only`` reports.
        spec: the request: channels, specs, platform, virtual.

    Raises:
        RecipeError: a package or channel that a lock cannot contain.
    """
    packages = [
        {name: record[name] for name in ("name", "version", "url", "sha256", "md5")}
        | {"depends": [f"{name} {text}".strip() for name, text in _merged(record["depends"])]}
        for record in records
    ]
    return _decoded(
        {
            "platform": spec["platform"], "channels": list(spec["channels"]),
            "packages": packages, "content_hash": _content_hash(spec),
        },
        "conda packages cannot be locked",
    )  # fmt: skip


def _merged(depends: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Name and version of each dependency: conda-lock accepts each name once."""
    found: dict[str, str] = {}
    for text in depends:
        name, wanted = _split(text)
        before = found.get(name, "")
        plain = before and wanted and " " not in before + wanted
        found[name] = f"{before},{wanted}" if plain else wanted or before
    yield from sorted(found.items())


def render(found: CondaLock) -> str:
    with _libraries():
        import yaml
        from conda_lock.lockfile.v1.models import LockedDependency, Lockfile, LockMeta

    packages = [
        LockedDependency(
            name=each.name, version=each.version, manager="conda", platform=found.platform,
            dependencies=dict(_merged(each.depends)), url=each.url,
            hash={"md5": each.md5, "sha256": each.sha256}, category="main", optional=False,
        )
        for each in found.packages
    ]  # fmt: skip
    meta = LockMeta(
        content_hash={found.platform: found.content_hash}, channels=list(found.channels),
        platforms=[found.platform], sources=[],
    )  # fmt: skip
    document = Lockfile(package=packages, metadata=meta).dict_for_output()
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return _HEADER + str(yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True))


def parse(text: str, where: str = "conda-lock.yml") -> CondaLock:
    """Read ``conda-lock.yml``, written by hvdenv or by conda-lock for one platform.

    Raises:
        RecipeError: it is malformed, or has packages that hvdenv does not install from it.
    """
    with _libraries():
        from conda_lock.lockfile.v1.models import Lockfile
        from pydantic import ValidationError
    document = _read_yaml(text, where)
    version = document.get("version") if isinstance(document, dict) else None
    if version != 1:
        raise malformed(f"expected a lock of conda-lock with version 1, found {version}", where)
    try:
        found = Lockfile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise malformed(f"{schema.dotted(first['loc'])}: {first['msg']}", where) from None
    except (AttributeError, KeyError, TypeError):  # of conda-lock's own checks
        raise malformed("it is not in the format that conda-lock writes", where) from None
    platforms = found.metadata.platforms
    platform = platforms[0] if len(platforms) == 1 else None
    for each in found.package:
        if (each.manager, each.platform, each.category) != ("conda", platform, "main"):
            raise malformed(
                f"{each.name} is for {each.manager}, {each.platform}, {each.category}: a lock "
                "of hvdenv has packages for conda, one platform and the category main",
                where,
            )
    return _decoded(
        {
            "platform": platform, "channels": [each.url for each in found.metadata.channels],
            "packages": [_plain(each) for each in found.package],
            "content_hash": found.metadata.content_hash.get(platform, ""),
        },
        where,
    )  # fmt: skip


def _read_yaml(text: str, where: str) -> Any:
    with _libraries():
        import yaml
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            # Constructing it recurses at each level, and a stack overflow would end the process.
            if depth > _DEPTH:
                raise malformed("it is nested too deeply", where)
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError) as error:
        raise malformed(f"it is not YAML: {error}", where) from None


def _plain(package: Any) -> dict[str, object]:
    depends = [f"{name} {text}".strip() for name, text in sorted(package.dependencies.items())]
    hashes = {"sha256": package.hash.sha256 or "", "md5": package.hash.md5 or ""}
    named = {"name": package.name, "version": package.version, "url": package.url}
    return {**named, **hashes, "depends": depends}


def _decoded(document: dict[str, Any], where: str) -> CondaLock:
    document["packages"].sort(key=lambda each: str(each["name"]))
    names = [each["name"] for each in document["packages"]]
    for one, other in pairwise(names):
        if one == other:
            raise malformed(f"{one} is listed twice", where)
    try:
        found = schema.decode(CondaLock, document)
    except schema.Problem as problem:
        index = problem.path[1] if problem.path[:1] == ("packages",) else None
        subject = f"{names[index]}: " if isinstance(index, int) else ""
        raise malformed(f"{subject}{problem}", where) from None
    for each in found.packages:
        if each.subdir not in (found.platform, "noarch"):
            raise malformed(f"{each.url} is not for {found.platform}", where)
        if not each.file_name.startswith(f"{each.name}-{each.version}-"):
            raise malformed(f"{each.url} is not {each.name} {each.version}", where)
    return found


def load() -> None:
    """Import the libraries that read and write locks, which takes a second.

    Raises:
        StepError: they are not installed.
    """
    with _libraries():
        for name in ("conda_lock.lockfile.v1.models", "rattler", "yaml"):
            import_module(name)


@contextmanager
def _libraries() -> Iterator[None]:
    """Report how to install the libraries that only locks of conda environments need."""
    try:
        with warnings.catch_warnings():
            # conda, which conda-lock contains, warns about its own modules.
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise StepError(
            f"the lock of a conda environment needs conda-lock and py-rattler ({error})",
            remedy=f"install them: {install_command('conda-lock', 'py-rattler')}",
        ) from None


def _content_hash(spec: Mapping[str, Any]) -> str:
    """The hash that conda-lock computes for the same request."""
    with _libraries():
        from conda_lock.content_hash import compute_content_hashes
        from conda_lock.models.lock_spec import LockSpecification
        from conda_lock.src_parser.conda_common import conda_spec_to_versioned_dep
        from conda_lock.virtual_package import FakeRepoData, VirtualPackage
    platform, virtual = spec["platform"], sorted(spec["virtual"].items())
    entries = [VirtualPackage(name=name, version=text) for name, text in virtual]
    packages = dict(each.to_repodata_entry(subdir=platform) for each in entries)
    of_target = {"info": {"subdir": platform}, "packages": packages}
    for_any = {"info": {"subdir": "noarch"}, "packages": {}}
    asked = LockSpecification(
        dependencies={
            platform: [conda_spec_to_versioned_dep(text, "main") for text in spec["specs"]]
        },
        channels=list(spec["channels"]),
        sources=[],
    )
    machine = FakeRepoData(
        base_path=Path(), all_repodata={"noarch": for_any, platform: of_target}
    )  # fmt: skip
    return str(compute_content_hashes(asked, machine)[platform])


def packages(locked: Locked) -> CondaLock:
    """The conda packages of a lock.

    Raises:
        RecipeError: it has none, or its file is malformed or contains what no lock may contain.
    """
    where = str(locked.folder / CONDA)
    if CONDA not in locked.texts:
        raise malformed("the lock has no conda packages, and the recipe requests some", where)
    found, inputs = parse(locked.texts[CONDA], where), locked.lock.inputs.conda
    known = ("https://", *(f"{each.rstrip('/')}/" for each in (inputs.channels if inputs else ())))
    for each in found.packages:
        if not each.url.startswith(known):
            raise malformed(
                f"{each.url}: expected https://, or a channel that the recipe names", where
            )
    return found


# Packages that have another name on the Python index.
_PIP_NAMES = {"pytorch": "torch", "msgpack-python": "msgpack", "tensorflow-base": "tensorflow"}


def pip_name(name: str) -> str:
    return canonicalize_name(_PIP_NAMES.get(name, name))


def for_pip(found: CondaLock) -> dict[str, str]:
    """Versions of the Python packages among them, by their names on the Python index."""
    python = {"python", "python_abi"}
    return {
        pip_name(each.name): each.version
        for each in found.packages
        if python & {_split(text)[0] for text in each.depends}
    }


def explicit(found: CondaLock) -> dict[str, object]:
    """Input for ``conda_env.py`` to install or fetch exactly these packages."""
    packages = [{**each._asdict(), "depends": list(each.depends)} for each in found.packages]
    return {"platform": found.platform, "explicit": packages}


def preferring(found: CondaLock, free: Iterable[str]) -> dict[str, object]:
    """Addition to a solve so that only the ``free`` packages change, and their dependencies.

    Raises:
        RecipeError: one of them is not in the lock.
    """
    names = sorted(free)
    for unknown in set(names) - {each.name for each in found.packages}:
        raise RecipeError(
            f"{unknown} is not a conda package of the lock",
            remedy="name one of its packages, or write a new lock: hvdenv lock RECIPE",
        )
    kept = [{"name": p.name, "version": p.version, "build": p.build} for p in found.packages]
    return {"prefer": kept, "free": names}


def unsatisfied(packages: Sequence[CondaPackage], specs: Iterable[str]) -> tuple[str, ...]:
    """Requirements, of the recipe or of packages, that the packages do not satisfy."""
    with _libraries():
        from rattler import BuildString, MatchSpec, PackageRecord
        from rattler.exceptions import InvalidMatchSpecError
    records = {
        each.name: PackageRecord(each.name, each.version, BuildString(each.build), 0, each.subdir)
        for each in packages
    }
    asked = [(text, "the recipe") for text in specs]
    asked += [(text, each.name) for each in packages for text in each.depends if text[:2] != "__"]
    found = []
    for text, by in asked:
        try:
            spec = MatchSpec(text, strict=False)
        except InvalidMatchSpecError as error:
            found.append(f"{by} asks for {text}: {error}")
            continue
        name, _ = _split(text)
        if name not in records:
            found.append(f"{by} asks for {text}, which is not in the lock")
        elif not spec.matches(records[name]):
            has = records[name]
            found.append(f"{by} asks for {text}, and the lock has {name} {has.version} {has.build}")
    return tuple(found)


def unneeded(packages: Sequence[CondaPackage], specs: Iterable[str]) -> tuple[str, ...]:
    """Packages of a lock that neither the recipe nor another package requires."""
    depends = {each.name: (_split(text)[0] for text in each.depends) for each in packages}
    reached = reachable((_split(text)[0] for text in specs), depends)
    return tuple(
        f"neither the recipe nor a package asks for {each.name} {each.version}"
        for each in packages
        if each.name not in reached
    )


def _split(spec: str) -> tuple[str, str]:
    """The name, and what follows it, with or without a space between."""
    name = re.split(r"[\s=<>!~\[]", spec.strip(), maxsplit=1)[0]
    return name.rpartition("::")[2].lower(), spec.strip()[len(name) :].strip()
