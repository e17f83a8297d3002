"""conda, pip, virtual environments and sources: which packages a page installs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from packaging.requirements import InvalidRequirement, Requirement

from hvdenv.drafting.options import Options, split
from hvdenv.drafting.page import Page
from hvdenv.drafting.shell import UNKNOWN, Statement
from hvdenv.drafting.values import COMMAND, INFERRED, Read, Value, at, leave

_CREATES = leave("hvdenv creates and activates the environment itself", understood=True)
_BUILDS = leave("hvdenv builds it with its own commands", understood=True)
_PAGE_PROGRAM = leave("a program of the page", understood=True)
# What the index and conda call the frameworks, and where their sources are.
_FRAMEWORKS = {
    "torch": "torch",
    "tensorflow": "tensorflow",
    "tensorflow-gpu": "tensorflow",
    "tensorflow-cpu": "tensorflow",
    "tensorflow-rocm": "tensorflow",
    "intel-tensorflow": "tensorflow",
}
_CONDA_FRAMEWORKS = {
    "pytorch": "torch",
    "pytorch-gpu": "torch",
    "tensorflow": "tensorflow",
    "tensorflow-gpu": "tensorflow",
}
_REPOSITORIES = {"pytorch/pytorch": "torch", "tensorflow/tensorflow": "tensorflow"}
_EXTRAS = {"pytorch": "torch", "tensorflow": "tensorflow"}
# Of a channel that has an address for each release, such as open-ce/1.7.2.
_RELEASE = re.compile(r"\d[\d.]*|current|latest")
_BUILD_TOOLS = frozenset({"cmake", "ninja", "packaging", "setuptools", "wheel"})
_PIP_VALUES = (
    "-i", "--index-url", "--extra-index-url", "-f", "--find-links", "-r", "--requirement", "-c",
    "--constraint", "-t", "--target", "--prefix", "--root", "--no-binary", "--only-binary",
    "--platform", "--python-version", "--timeout", "--global-option", "--build-option", "--src",
    "--cache-dir", "--config-settings", "-C", "--trusted-host", "--upgrade-strategy", "--retries",
    "-e", "--editable", "-b", "--build", "-p", "--python",
)  # fmt: skip
_CONDA_VALUES = (
    "-c",
    "--channel",
    "-n",
    "--name",
    "-p",
    "--prefix",
    "-f",
    "--file",
    "--clone",
    "--solver",
    "-m",
    "--revision",
)
_GIT_VALUES = ("-b", "--branch", "--depth", "-C", "-j", "--jobs", "-o", "--origin")


def python(statement: Statement, page: Page) -> Iterator[Read]:
    """python and virtualenv."""
    name, *words = statement.words
    if name == "virtualenv":
        yield from _venv(words)
    elif words[:2] in (["-m", "venv"], ["-m", "virtualenv"]):
        yield from _venv(words[2:], name)
    elif words[:2] == ["-m", "pip"]:
        yield from read_pip(words[2:], page)
    elif words[:1] == ["setup.py"] and {"install", "develop", "build"} & {*words}:
        yield from _build_source(page)
    else:
        yield _PAGE_PROGRAM


def pip(statement: Statement, page: Page) -> Iterator[Read]:
    """pip and uv."""
    name, action, *words = *statement.words, ""
    if name != "uv":
        yield from read_pip(statement.words[1:], page)
    elif action == "venv":
        yield from _venv(words[:-1])
    elif action == "pip":
        yield from read_pip(words[:-1], page)
    else:
        yield leave(f"recipes have no key for uv {action}")


def _venv(words: Sequence[str], python: str = "") -> Iterator[Read]:
    options = split(words, ("-p", "--python", "--prompt", "--seeder"))
    yield Value(at("python.provider"), "venv")
    if options.has("--system-site-packages"):
        yield Value(at("python.system_site_packages"), True)
    yield from _python_version(options.last("-p", "--python") or python)


def _python_version(text: str) -> Iterator[Read]:
    """``3.9``, ``python3.9`` or ``/usr/bin/python3.9``."""
    if found := re.fullmatch(r"(?:.*/)?(?:python)?(\d+\.\d+)(\.\d+)?", text):
        yield Value(at("python.version"), f"=={found[1]}{found[2] or '.*'}")


def conda(statement: Statement, _: Page) -> Iterator[Read]:
    """conda, mamba and micromamba."""
    options = split(statement.words[1:], _CONDA_VALUES)
    action, *specs = options.rest or ("",)
    if action == "config" and options.has("--add", "--append", "--prepend"):
        of_channel = len(specs) == 2 and specs[0] == "channels"
        told = "recipes have no key for the configuration of conda"
        yield channel(specs[1]) if of_channel else leave(told)
    elif options.has("-f", "--file") and action in ("env", "create", "install"):
        yield leave("the contents of the environment are in a file that the page names")
    elif action not in ("create", "install"):
        if action == "activate":
            yield Value(at("python.provider"), "conda", weight=INFERRED)
        yield _CREATES if action != "run" else _PAGE_PROGRAM
    elif prefix := options.last("--clone"):
        yield Value(at("python.provider"), "clone")
        yield Value(at("python.prefix"), prefix) if "/" in prefix else leave("clones by name")
    else:
        created = COMMAND if action == "create" else INFERRED
        yield Value(at("python.provider"), "conda", weight=created)
        yield from map(channel, options.all("-c", "--channel"))
        for spec in specs:
            yield from conda_package(spec)


def channel(name: str) -> Value:
    """A channel. Its releases are alternatives."""
    folder, _, release = name.rstrip("/").rpartition("/")
    role = f"release of {folder}" if _RELEASE.fullmatch(release) and folder else ""
    return Value(at("conda.channels"), name, item=True, role=role)


def conda_package(spec: str) -> Iterator[Read]:
    """``channel::name=version``."""
    of_channel, _, named = spec.rpartition("::")
    found = re.fullmatch(r"([A-Za-z0-9_.-]+?)\s*((?:[=<>!~].*)?)", named)
    if of_channel:
        yield channel(of_channel)
    if not found:
        yield leave(f"{spec} is no package of conda")
        return
    name, version = found[1].lower(), found[2]
    exact = re.fullmatch(r"==?(\d+(?:\.\d+){1,3})(?:=.*)?", version)
    if name == "python":
        stated = [*_python_version(exact[1] if exact else version.lstrip("="))]
        yield from stated or [leave(f"{spec} names no version of Python")]
    elif name == "anaconda":
        yield leave("the package anaconda installs hundreds of others; name those that you need")
    elif name == "pip":
        yield leave("hvdenv installs pip itself", True)
    elif name == "horovod":
        yield leave("hvdenv builds Horovod from its source, and takes no package of conda")
    elif framework := _CONDA_FRAMEWORKS.get(name):
        full = exact and version.count(".") > 1
        yield from _framework(framework, name, exact[1] if exact and full else "")
        yield Value(at("frameworks", framework, "provider"), "conda")
    else:
        yield Value(at("conda.packages", name), _conda_version(version))


def _conda_version(version: str) -> str:
    """As recipes write it: ``=11.3`` is a prefix, ``==11.3`` is exact."""
    if re.fullmatch(r"=\d+(\.\d+)?", version):
        return f"{version[1:]}.*"
    return version[2:] if version.startswith("==") else version.lstrip("=") or "*"


def _framework(name: str, package: str, version: str) -> Iterator[Read]:
    if package != name:
        yield Value(at("frameworks", name, "package"), package)
    yield Value(at("horovod.frameworks"), name, item=True, weight=INFERRED)
    if version:
        yield Value(at("frameworks", name, "version"), version)
    else:
        yield leave(f"it names no exact version of {package}")


def read_pip(words: Sequence[str], page: Page, others: Collection[str] = ()) -> Iterator[Read]:
    """``pip install`` and ``uv pip install``; words follow the program.

    Args:
        others: frameworks that the same file installs.
    """
    options = split(words, _PIP_VALUES)
    action, *specs = options.rest or ("",)
    if action not in ("install", "wheel", "download"):
        yield leave("it installs nothing", understood=action not in ("uninstall", "sync"))
        return
    if options.has("-r", "--requirement"):
        yield leave("the packages are in a file that the page names")
    if options.has("-c", "--constraint"):
        yield leave("the versions are in a file that the page names")
    if options.has("-e", "--editable"):
        yield leave("an editable installation; hvdenv install -e adds it after the build", True)
    upgrades = options.has("-U", "--upgrade")
    for text in specs:
        yield from requirement(text, page, upgrades=upgrades)
    frameworks = {*others, *(name for text in specs for name in find_frameworks(text))}
    yield from _indexes(options, sorted(frameworks))


def find_frameworks(text: str) -> list[str]:
    """The framework that a requirement installs, if any."""
    found = re.match(r"[A-Za-z-]+", text)
    return [_FRAMEWORKS[found[0]]] if found and found[0] in _FRAMEWORKS else []


def _indexes(options: Options, frameworks: Sequence[str]) -> Iterator[Read]:
    links = options.all("-f", "--find-links")
    for url in (*options.all("-i", "--index-url", "--extra-index-url"), *links):
        # Such pages list files; they are no index. The other ending is PyTorch's.
        key = "find_links" if url.endswith(".html") or url in links else "extra_index"
        key = "cpu_index" if url.rstrip("/").endswith("/whl/cpu") else key
        for name in frameworks:
            yield Value(at("frameworks", name, key), url, item=key == "find_links")
        if not frameworks:
            told = f"an index for other packages ({url}); a site file can name it"
            yield leave(told, understood=url.startswith("https://download.pytorch.org/"))


def requirement(text: str, page: Page, *, upgrades: bool = False) -> Iterator[Read]:
    """What pip accepts as the name of something to install."""
    if repository := re.match(r"(?:[\w\[\],-]+ ?@ ?)?git\+(https://[^@#]+)(?:@([^#]+))?", text):
        yield from _repository_build(repository[1], repository[2] or "")
        return
    if archive := re.search(r"(?:^|/)horovod-(\d+(?:\.\d+)+)\.tar\.gz$", text):
        text = f"horovod=={archive[1]}"
    if text in (".", "./") or ("/" in text and text.strip("./") in ("", page.folder)):
        yield from _build_source(page)
    elif UNKNOWN in text or "/" in text:
        stated = UNKNOWN not in text
        yield leave(f"{text} is no package of an index" if stated else "it is not stated")
    else:
        try:
            yield from _package(Requirement(text), page, upgrades)
        except InvalidRequirement:
            yield leave(f"{text} is no requirement")


def _package(requirement: Requirement, page: Page, upgrades: bool) -> Iterator[Read]:
    name, specifier = requirement.name.lower().replace("_", "-"), str(requirement.specifier)
    found = re.fullmatch(r"==([^,*]+)", specifier)
    exact = found[1] if found else ""
    if requirement.marker:
        yield leave(f"only if {requirement.marker}; recipes have no conditions")
    if name == "horovod":
        page.builds_horovod += 1
        for extra in sorted(requirement.extras & _EXTRAS.keys()):
            yield Value(at("horovod.frameworks"), _EXTRAS[extra], item=True)
        yield Value(at("horovod.version"), exact) if exact else _BUILDS
    elif name in _FRAMEWORKS:
        yield from _framework(_FRAMEWORKS[name], name, exact)
    elif name == "pip" or (upgrades and not specifier and name in _BUILD_TOOLS | {"virtualenv"}):
        yield leave("hvdenv installs the tools of a build itself", understood=True)
    elif name in _BUILD_TOOLS:
        yield Value(at("build_tools", name), specifier) if specifier else _BUILDS
    elif specifier:
        yield Value(at("packages", name), specifier)
    else:
        yield leave(
            f"hvdenv needs no {name}; `hvdenv install {name}` adds it after the build", True
        )


def git(statement: Statement, page: Page) -> Iterator[Read]:
    """Which repository a page builds."""
    action, *arguments = statement.words[1:] or ("",)
    options = split(arguments, _GIT_VALUES)
    if action == "clone" and options.rest:
        url, *folder = options.rest
        page.repository, page.tag = url.removesuffix(".git"), options.last("-b", "--branch")
        page.folder = folder[0] if folder else page.repository.rpartition("/")[2]
    elif action == "checkout" and options.rest:
        page.tag = options.rest[0].removeprefix("tags/")
    else:
        yield leave("hvdenv fetches sources with their submodules", understood=True)
        return
    yield leave(f"the sources of {page.folder or 'a repository'}", understood=True)


def _repository_build(url: str, tag: str) -> Iterator[Read]:
    """The build of a repository, as far as recipes can express it."""
    path = "/".join(url.removesuffix(".git").rstrip("/").split("/")[-2:]).lower()
    release = re.fullmatch(r"v?(\d+(?:\.\d+)+)", tag)
    if path in ("horovod/horovod", "uber/horovod"):
        told = "it names no release of Horovod, and hvdenv builds releases"
        yield Value(at("horovod.version"), release[1]) if release else leave(told)
    elif framework := _REPOSITORIES.get(path):
        yield from _framework(framework, framework, release[1] if release else "")
        yield Value(at("frameworks", framework, "provider"), "source")
        yield Value(at("frameworks", framework, "source", "git"), url.removesuffix(".git"))
        if tag:
            yield Value(at("frameworks", framework, "source", "tag"), tag)
    else:
        yield leave(f"hvdenv does not build {path or 'this'} from its source")


def _build_source(page: Page) -> Iterator[Read]:
    """``python setup.py install`` or ``pip install .``, in the repository cloned last."""
    if not page.repository:
        yield leave("the page does not say which repository this is in")
        return
    for read in _repository_build(page.repository, page.tag):
        page.builds_horovod += isinstance(read, Value) and read.key == at("horovod.version")
        yield read
