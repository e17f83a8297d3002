"""The conda packages of a lock, in conda-lock's own format: ``conda-lock.yml``, version 1.

conda-lock's models write and read it, so that ``conda-lock install`` accepts the file. It has
name, version, URL, hashes and dependencies of each package. Build and subdir of a package are in
its URL; the package itself, which the sha256 identifies, has the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

from hvdenv.base import schema
from hvdenv.locks.lockfile import CONDA, Locked, malformed, sha256
from hvdenv.locks.packages import canonicalize_name

if TYPE_CHECKING:
    from conda_lock.lockfile.v1.models import LockedDependency

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
        return unquote(self.url.rpartition("/")[2])

    @property
    def build(self) -> str:
        return re.sub(r"(\.conda|\.tar\.bz2)$", "", self.file_name).rpartition("-")[2]

    @property
    def subdir(self) -> str:
        return self.url.split("/")[-2]


class CondaLock(NamedTuple):
    """A ``conda-lock.yml``, for one platform."""

    platform: Platform
    channels: tuple[Channel, ...]
    packages: tuple[CondaPackage, ...] = ()


def render(records: Iterable[Mapping[str, Any]], spec: Mapping[str, Any]) -> str:
    """The text of a lock of the result of a solve.

    Args:
        records: what ``conda_env.py --solve-only`` reports.
        spec: the request, with its channels and platform.

    Raises:
        RecipeError: a package or channel that a lock cannot contain.
    """
    import yaml
    from conda_lock.lockfile.v1.models import LockedDependency, Lockfile, LockMeta

    platform, where = spec["platform"], "conda packages cannot be locked"
    ordered = sorted(records, key=lambda each: str(each["name"]))
    # conda-lock compares this hash of the request before it solves; hvdenv compares the request.
    digest = sha256("".join(each["sha256"] for each in ordered))
    with _malformed(where):
        meta = LockMeta(
            content_hash={platform: digest},
            channels=list(spec["channels"]),
            platforms=[platform],
            sources=[],
        )
        packages = [
            LockedDependency(
                name=each["name"],
                version=each["version"],
                manager="conda",
                platform=platform,
                dependencies=_merged(each["depends"]),
                url=each["url"],
                hash={"md5": each["md5"], "sha256": each["sha256"]},
                category="main",
                optional=False,
            )
            for each in ordered
        ]
    document = Lockfile(package=packages, metadata=meta).dict_for_output()
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = str(yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True))
    parse(text, where)
    return _HEADER + text


def _merged(depends: Iterable[str]) -> dict[str, str]:
    """Version of each dependency by its name, sorted: conda-lock accepts each name once."""
    found: dict[str, str] = {}
    for text in depends:
        name, wanted = _split(text)
        before = found.get(name, "")
        plain = before and wanted and " " not in before + wanted
        found[name] = f"{before},{wanted}" if plain else wanted or before
    return dict(sorted(found.items()))


def parse(text: str, where: str = CONDA) -> CondaLock:
    """Read ``conda-lock.yml``, written by hvdenv or by conda-lock for one platform.

    Raises:
        RecipeError: it is malformed, or has packages that hvdenv does not install from it.
    """
    from conda_lock.lockfile.v1.models import Lockfile

    document = _read_yaml(text, where)
    with _malformed(where):
        found = Lockfile.model_validate(document)
        platform = ", ".join(found.metadata.platforms)
        channels = [each.url for each in found.metadata.channels]
        lock = schema.decode(CondaLock, {"platform": platform, "channels": channels})
    packages = []
    for each in sorted(found.package, key=lambda each: each.name):
        with _malformed(where, f"{each.name}: "):
            packages.append(_package(each, platform))
    for one, other in pairwise(packages):
        if one.name == other.name:
            raise malformed(f"{one.name} is listed twice", where)
    return lock._replace(packages=tuple(packages))


@contextmanager
def _malformed(where: str, subject: str = "") -> Iterator[None]:
    """Report what is wrong with a lock."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        raise malformed(f"{subject}{schema.dotted(first['loc'])}: {first['msg']}", where) from None
    except schema.Problem as problem:
        raise malformed(f"{subject}{problem}", where) from None
    except (AttributeError, KeyError, TypeError):  # of conda-lock's own checks
        raise malformed("it is not in the format that conda-lock writes", where) from None


def _package(found: LockedDependency, platform: str) -> CondaPackage:
    """A package that hvdenv can install.

    Raises:
        schema.Problem: a value that it does not accept.
    """
    if (found.manager, found.platform, found.category) != ("conda", platform, "main"):
        raise schema.Problem((), f"expected manager conda, platform {platform}, category main")
    depends = [f"{name} {text}".strip() for name, text in sorted(found.dependencies.items())]
    values = {
        "name": found.name,
        "version": found.version,
        "url": found.url,
        "depends": depends,
        "sha256": found.hash.sha256 or "",
        "md5": found.hash.md5 or "",
    }
    package = schema.decode(CondaPackage, values)
    if package.subdir not in (platform, "noarch"):
        raise schema.Problem(("url",), f"{package.url} is not for {platform}")
    if not package.file_name.startswith(f"{package.name}-{package.version}-"):
        raise schema.Problem(("url",), f"{package.url} is not {package.name} {package.version}")
    return package


def _read_yaml(text: str, where: str) -> Any:
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


def for_pip(packages: Iterable[CondaPackage]) -> dict[str, str]:
    """Versions of the Python packages among them, by their names on the Python index."""
    python = {"python", "python_abi"}
    return {
        pip_name(each.name): each.version
        for each in packages
        if python & {_split(text)[0] for text in each.depends}
    }


def solved(records: Iterable[Mapping[str, Any]]) -> tuple[CondaPackage, ...]:
    """The packages that ``conda_env.py --solve-only`` reports."""
    return tuple(
        CondaPackage(**{name: each[name] for name in CondaPackage._fields}) for each in records
    )


def explicit(found: CondaLock) -> dict[str, object]:
    """Input for ``conda_env.py`` to install or fetch exactly these packages."""
    packages = [{**each._asdict(), "depends": list(each.depends)} for each in found.packages]
    return {"platform": found.platform, "explicit": packages}


def preferring(found: CondaLock, free: str | None) -> dict[str, object]:
    """Addition to a solve so that only the package ``free`` changes, and what it depends on."""
    kept = [(each.name, each.version, each.build) for each in found.packages if each.name != free]
    return {"prefer": [dict(zip(("name", "version", "build"), each, strict=True)) for each in kept]}


def unsatisfied(packages: Sequence[CondaPackage], specs: Iterable[str]) -> tuple[str, ...]:
    """Requirements, of the recipe or of packages, that the packages do not satisfy."""
    from conda_lock.src_parser.conda_common import MatchSpec

    known = {each.name: each for each in packages}
    asked = [(text, "the recipe") for text in specs]
    asked += [(text, each.name) for each in packages for text in each.depends if text[:2] != "__"]
    found = []
    for text, by in asked:
        name, wanted = _split(text)
        has = known.get(name)
        try:
            spec = MatchSpec(f"{name} {wanted}")
        except ValueError as error:
            found.append(f"{by} asks for {text}: {error}")
            continue
        if has is None:
            found.append(f"{by} asks for {text}, which is not in the lock")
        elif not spec.match({**has._asdict(), "build": has.build, "build_number": 0}):
            found.append(f"{by} asks for {text}, and the lock has {name} {has.version} {has.build}")
    return tuple(found)


def _split(spec: str) -> tuple[str, str]:
    """The name, and what follows it, with or without a space between."""
    name = re.split(r"[\s=<>!~\[]", spec.strip(), maxsplit=1)[0]
    return name.rpartition("::")[2].lower(), spec.strip()[len(name) :].strip()
