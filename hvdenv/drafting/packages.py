"""conda, pip, virtual environments, sources and lists of packages: what a page installs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import get_args

from packaging.requirements import InvalidRequirement, Requirement

from hvdenv.drafting.options import meaning_of, reason, split, tables
from hvdenv.drafting.shell import Statement
from hvdenv.drafting.values import BUILD, UNKNOWN, Fact, Left, Value, Weight, at, leave
from hvdenv.model.recipe import Framework

_CREATES = leave("hvdenv creates and activates the environment itself", understood=True)
_BUILDS = leave("hvdenv builds it with its own commands", understood=True)
_SOURCE = leave(
    "a build from source: set frameworks.NAME.source, or for Horovod the version of a release"
)
_PAGE_PROGRAM = leave("a program of the page", understood=True)


def python(statement: Statement) -> Iterator[Fact]:
    """python and virtualenv."""
    name, *words = statement.words
    if name == "virtualenv":
        yield from _venv(words)
    elif words[:2] in (["-m", "venv"], ["-m", "virtualenv"]):
        yield from _venv(words[2:], name)
    elif words[:2] == ["-m", "pip"]:
        yield from read_pip(words[2:])
    elif words[:1] == ["setup.py"] and {"install", "develop", "build"} & {*words}:
        yield _SOURCE
    else:
        yield _PAGE_PROGRAM


def pip(statement: Statement) -> Iterator[Fact]:
    yield from read_pip(statement.words[1:])


def _venv(words: Sequence[str], python: str = "") -> Iterator[Fact]:
    options = split(words, tables()["venv"])
    yield Value(at("python.provider"), "venv")
    if options.all("system"):
        yield Value(at("python.system_site_packages"), True)
    yield from _python_version(options.last("python") or python)


def _python_version(text: str) -> Iterator[Fact]:
    """``3.9``, ``python3.9`` or ``/usr/bin/python3.9``."""
    if found := re.fullmatch(r"(?:.*/)?(?:python)?(\d+\.\d+)(\.\d+)?", text):
        yield Value(at("python.version"), f"=={found[1]}{found[2] or '.*'}")


def conda(statement: Statement) -> Iterator[Fact]:
    """conda, mamba and micromamba."""
    options = split(statement.words[1:], tables()["conda"])
    action, *specs = options.rest or ("",)
    if action == "config" and options.all("add"):
        of_channel = len(specs) == 2 and specs[0] == "channels"
        told = "recipes have no key for the configuration of conda"
        yield channel(specs[1]) if of_channel else leave(told)
    elif (reasons := options.reasons) and action in ("env", "create", "install"):
        yield from reasons
    elif action == "activate":
        yield Value(at("python.provider"), "conda", weight=Weight.INFERRED)
        yield _CREATES
    elif action not in ("create", "install"):
        yield _CREATES if action != "run" else _PAGE_PROGRAM
    else:
        created = Weight.COMMAND if action == "create" else Weight.INFERRED
        yield Value(at("python.provider"), "conda", weight=created)
        yield from map(channel, options.all("channel"))
        for spec in specs:
            yield from conda_package(spec)


def channel(name: str) -> Value:
    return Value(at("conda.channels"), name, item=True)


def conda_package(spec: str) -> Iterator[Fact]:
    """``channel::name=version``."""
    of_channel, _, named = spec.rpartition("::")
    found = re.fullmatch(r"([A-Za-z0-9_.-]+?)\s*((?:[=<>!~].*)?)", named)
    name, version = (found[1].lower(), found[2]) if found else ("", "")
    exact = re.fullmatch(r"==?(\d+(?:\.\d+){1,3})(?:=.*)?", version)
    if of_channel:
        yield channel(of_channel)
    if not name:
        yield leave(f"{spec} is no package of conda")
    elif name == "python":
        stated = [*_python_version(exact[1] if exact else version.lstrip("="))]
        yield from stated or [leave(f"{spec} names no version of Python")]
    elif " " in (framework := meaning_of(name, "conda_packages")):
        yield reason(name, framework)
    elif framework:
        full = exact and version.count(".") > 1
        yield from _framework(framework, name, exact[1] if exact and full else "")
        yield Value(at("frameworks", framework, "provider"), "conda")
    elif re.fullmatch(r"=\d+(\.\d+)?", version):  # a prefix, where ==11.3 is exact
        yield Value(at("conda.packages", name), f"{version[1:]}.*")
    else:
        yield Value(at("conda.packages", name), version.lstrip("=") or "*")


def _framework(name: str, package: str, version: str) -> Iterator[Fact]:
    if package != name:
        yield Value(at("frameworks", name, "package"), package)
    yield Value(at("horovod.frameworks"), name, item=True, weight=Weight.INFERRED)
    told = leave(f"it names no exact version of {package}")
    yield Value(at("frameworks", name, "version"), version) if version else told


# In place of the framework that an index is for, if a command only names the index.
EVERY = "*"


def read_pip(words: Sequence[str]) -> Iterator[Fact]:
    """``pip install``; words follow the program."""
    options = split(words, tables()["pip"])
    action, *specs = options.rest or ("",)
    if action not in ("install", "wheel", "download"):
        yield leave("it installs nothing", understood=action not in ("uninstall", "sync"))
        return
    yield from options.reasons
    for text in specs:
        yield from requirement(text)
    named = {meaning_of(re.split(r"[^A-Za-z-]", text)[0], "pip_packages") for text in specs}
    frameworks = sorted(named & {*get_args(Framework)}) if specs else [EVERY]
    for _, meaning, url in options.given:
        if meaning in ("index", "links"):
            # Such pages list files; they are no index. The other ending is PyTorch's.
            key = "find_links" if url.endswith(".html") or meaning == "links" else "extra_index"
            key = "cpu_index" if url.rstrip("/").endswith("/whl/cpu") else key
            for name in frameworks:
                yield Value(at("frameworks", name, key), url, item=key == "find_links")
            if not frameworks:
                yield other_index(url)


def other_index(url: str) -> Left:
    told = f"an index for other packages ({url}); a site file can name it"
    return leave(told, understood=url.startswith("https://download.pytorch.org/"))


def requirement(text: str) -> Iterator[Fact]:
    """What pip accepts as the name of something to install."""
    release = re.search(r"horovod(?:\.git)?@v?(\d+\.\d+\.\d+)(?:#|$)", text)
    if "git+" in text and "horovod/horovod" in text:
        told = leave("it names no release of Horovod, and hvdenv builds releases")
        yield Value(BUILD, True)
        yield Value(at("horovod.version"), release[1]) if release else told
    elif text in (".", "./") or "git+" in text:
        yield _SOURCE
    elif UNKNOWN in text or "/" in text:
        stated = UNKNOWN not in text
        yield leave(f"{text} is no package of an index" if stated else "it is not stated")
    else:
        try:
            yield from _package(Requirement(text))
        except InvalidRequirement:
            yield leave(f"{text} is no requirement")


def _package(requirement: Requirement) -> Iterator[Fact]:
    name, specifier = requirement.name.lower().replace("_", "-"), str(requirement.specifier)
    found = re.fullmatch(r"==([^,*]+)", specifier)
    exact = found[1] if found else ""
    framework = meaning_of(name, "pip_packages")
    if requirement.marker:
        yield leave(f"only if {requirement.marker}; recipes have no conditions")
    if name == "horovod":
        yield Value(BUILD, True)
        for extra in sorted(filter(None, (meaning_of(e, "extras") for e in requirement.extras))):
            yield Value(at("horovod.frameworks"), extra, item=True)
        yield Value(at("horovod.version"), exact) if exact else _BUILDS
    elif "horovod" in name:  # Intel's, for instance
        yield leave(f"hvdenv builds Horovod itself, not {name}", understood=True)
    elif framework in get_args(Framework):
        yield from _framework(framework, name, exact)
    elif framework == "tools" and not specifier:
        yield leave("hvdenv installs the tools of a build itself", understood=True)
    elif specifier:
        table = "build_tools" if framework == "tools" else "packages"
        yield Value(at(table, name), specifier)
    else:
        told = f"hvdenv needs no {name}; `hvdenv install {name}` adds it after the build"
        yield leave(told, understood=True)
