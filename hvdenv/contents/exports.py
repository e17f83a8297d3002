"""The contents of an environment in the formats of other programs.

Each file lists at its top what the format cannot hold. The same contents give the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

from hvdenv.contents import cyclonedx
from hvdenv.contents.packages import Contents, Package

Format = Literal["cyclonedx", "environment.yml", "requirements", "constraints"]
FORMATS: tuple[Format, ...] = get_args(Format)


def export(contents: Contents, form: Format) -> str:
    writers: dict[Format, Callable[[Contents], str]] = {
        "cyclonedx": cyclonedx.render,
        "environment.yml": environment_yml,
        "requirements": requirements,
        "constraints": constraints,
    }
    return writers[form](contents)


def requirements(contents: Contents) -> str:
    """A requirements.txt with hashes, which make pip refuse any other file."""
    own = _of(contents, "pypi")
    lost = [
        *_elsewhere(contents, own),
        "Files for another Python or architecture: the hashes are of the installed files.",
    ]
    lines = [*_head(contents, "Python packages", lost), *_horovod(contents), ""]
    lines += _sources(contents)
    for each in own:
        pinned = f"{each.name}=={each.version}"
        if each.sha256:
            lines += [f"{pinned} \\", f"    --hash=sha256:{each.sha256}"]
        else:
            lines.append(f"# {pinned}: the hash of its file is unknown (was it installed by venv?)")
    return _text(lines)


def constraints(contents: Contents) -> str:
    """A constraints file: versions that later installations by pip must keep."""
    lost = ["Hashes, Python itself, and everything that is not a Python package."]
    lines = _head(contents, "Constraints (pip install -c) of the Python packages", lost)
    lines += [f"{name}=={version}" for name, version in contents.distributions.items()]
    return _text(lines)


def environment_yml(contents: Contents) -> str:
    """An environment.yml for conda, mamba and micromamba."""
    conda, own = _of(contents, "conda"), _of(contents, "pypi")
    lost = [*_elsewhere(contents, (*conda, *own)), "Hashes and URLs of files."]
    nowhere = [each.name for each in conda if not each.url]
    lost += (
        [f"The channel of {', '.join(nowhere)}: it exists only on the machine that built."]
        if nowhere
        else []
    )
    lines = [
        *_head(contents, "Packages of conda and pip", lost),
        *_horovod(contents),
        f"name: {_scalar(contents.name)}",
        "channels:",
    ]
    # conda-forge for Python and pip, where nothing else came by conda.
    channels = contents.channels or ("conda-forge",)
    lines += [f"  - {_scalar(each)}" for each in channels]
    lines += ["  - nodefaults"] if "defaults" not in channels else []
    named = {each.name for each in conda}
    lines.append("dependencies:")
    lines += [] if "python" in named else [f"  - {_scalar(f'python={contents.python}')}"]
    pins = ["=".join((each.name, each.version, each.build)).rstrip("=") for each in conda]
    lines += [f"  - {_scalar(each)}" for each in pins]
    by_pip = [each for each in own if each.name != "pip"]
    lines += ["  - pip"] if by_pip and "pip" not in named else []
    lines += ["  - pip:"] if by_pip else []
    lines += [f"      - {_scalar(each)}" for each in _sources(contents)]
    lines += [f"      - {_scalar(f'{each.name}=={each.version}')}" for each in by_pip]
    return _text(lines)


def _sources(contents: Contents) -> list[str]:
    """Where pip finds the packages besides its own index, as lines of a requirements.txt."""
    return [
        *(f"--extra-index-url {index}" for index in contents.indexes),
        *(f"--find-links {links}" for links in contents.find_links),
    ]


def _of(contents: Contents, kind: str) -> tuple[Package, ...]:
    return tuple(each for each in contents.packages if each.kind == kind)


def _head(contents: Contents, what: str, lost: Iterable[str]) -> list[str]:
    of = ", ".join(filter(None, (f"Python {contents.python}", contents.machine)))
    built = f", built by hvdenv {contents.hvdenv} on {contents.created[:10]}"
    lines = [f"{what} of {contents.name} ({of}){built if contents.hvdenv else ''}."]
    lines += ["Not in this file:", *(f"- {each}" for each in lost)]
    return [f"# {_line(each)}" for each in lines]


def _elsewhere(contents: Contents, shown: Iterable[Package]) -> Iterator[str]:
    """What else the environment has, in lines for the top of a file."""
    kinds = {each.kind for each in shown}
    labels = {"conda": "packages that conda installed", "pypi": "packages that pip installed"}
    for kind, what in labels.items():
        others = _of(contents, kind)
        if others and kind not in kinds:
            yield f"{len(others)} {what}."
    site = [f"{each.name} {each.version}" for each in _of(contents, "site")]
    if site:
        yield f"Packages of modules or the system: {', '.join(site)}."
    if contents.modules:
        yield f"Modules: {', '.join(contents.modules)}."
    if contents.toolchain:
        named = (f"{name} {version}" for name, version in contents.toolchain.items())
        yield f"The toolchain: {', '.join(named)}."


def _horovod(contents: Contents) -> Iterator[str]:
    """Lines about Horovod, which an index has only as source."""
    horovod = contents.horovod
    if horovod is None:
        return
    if not horovod.source:
        yield f"# Horovod {_line(horovod.version)}, which hvdenv did not build."
        return
    yield f"# Horovod {_line(horovod.version)} was built from its source with patches and flags;"
    yield "# `pip install horovod` alone builds it differently, or fails. Its source archive is"
    yield f"#   horovod=={_line(horovod.version)} --hash=sha256:{_line(horovod.source)}"
    yield from (f"# patch {_line(each)}" for each in horovod.patches)
    for name, value in horovod.variables.items():
        yield f"# {_line(f'{name}={value}')}"


def _line(text: str) -> str:
    """A text without line breaks, which would end a comment."""
    return " ".join(text.split())


def _scalar(text: str) -> str:
    """A text in YAML, quoted if necessary; JSON's quotes are valid in YAML."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=:/!-]*[A-Za-z0-9]", text)
    number = re.fullmatch(r"[0-9.:_eE+-]+|true|false|yes|no|on|off|null", text, re.IGNORECASE)
    return text if plain and not number else json.dumps(text)


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
