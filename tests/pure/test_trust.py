"""Nothing that another user can change is executed without --trust, by any command."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdenv import trust
from hvdenv.cli import job
from hvdenv.cli.main import COMMANDS, main, make_parser
from hvdenv.cli.options import refuse_foreign_path, refuse_foreign_prefix
from hvdenv.command import Command
from hvdenv.environments import generations
from hvdenv.errors import UntrustedError
from hvdenv.model.cluster import Modules
from hvdenv.model.layers import load_recipe
from hvdenv.model.recipe import Conda, FrameworkPackage, Source, executed_paths
from hvdenv.reading import RECIPE, read_file
from hvdenv.runner import Runner, drop_relative_folders
from hvdenv.schema import decode, encode
from tests.commands import Hvdenv
from tests.environments import ONE, build
from tests.files import EXECUTABLE, write

EVE, GROUP = 12345, 12346
OF_EVE = f"belongs to uid {EVE}"
# What `job` says of `local` after all files were judged: it goes on, and fails.
RAN = "this recipe has no scheduler"
OWN = trust.own_policy()

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only the superuser can give a file to another user"
)


def mine(folder: Path, *lines: str) -> Path:
    """A recipe over `local`."""
    text = "\n".join(('format = 1\nname = "mine"\nextends = "local"', *lines))
    return write(folder / "mine.toml", text)


def of_eve(path: Path) -> Path:
    os.chown(path, EVE, GROUP, follow_symlinks=False)
    return path


def problems(path: Path, policy: trust.Policy = OWN) -> list[str]:
    return [fault.problem for fault in trust.faults_on_way(path, policy)]


# What executes nothing of a recipe or an environment.
SHOWN = {
    "cache", "completion", "diff", "doctor", "envs", "export", "grid", "init", "plan", "recipes", "show",
    "trust", "wheels",
}  # fmt: skip
EXECUTING = {
    "build": (), "check": (), "fetch": ("--to", "there"), "install": ("tqdm",), "job": ("--", "true"),
    "lock": (), "module": (), "run": ("--", "true"), "shell": (), "verify": (),
    "container": ("--build",), "pack": (),
}  # fmt: skip


def test_every_command_that_executes_anything_can_be_told_to_trust() -> None:
    parser = make_parser()
    with_trust = {
        command
        for command in COMMANDS
        if hasattr(parser.parse_args([command, *REQUIRED.get(command, ())]), "trust")
    }
    assert with_trust == set(EXECUTING) == set(COMMANDS) - SHOWN


REQUIRED = {
    "build": ("r",), "check": ("r",), "container": ("r",), "fetch": ("r", "--to", "x"), "lock": ("r",),
    "install": ("r", "p"), "plan": ("r",), "diff": ("a", "b"), "completion": ("bash",),
    "cache": ("list",), "wheels": ("verify", "x"), "export": ("--format", "requirements"), "doctor": ("x",),
}  # fmt: skip


@needs_root
@pytest.mark.parametrize("command", EXECUTING)
@pytest.mark.parametrize("whose", ["recipe", "parent", "site", "init", "folder"])
def test_nothing_of_another_user_is_executed(
    command: str, whose: str, tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as it was attacked: a script that a recipe or site file names left a mark."""
    monkeypatch.chdir(tmp_path)
    mark, init = tmp_path / "mark", tmp_path / "init.sh"
    init.write_text(f"touch {mark}\n")
    named = f'modules = {{ init = "{init}", load = ["x"] }}'
    folder = tmp_path / "folder"
    folder.mkdir()
    recipe = mine(folder, named)
    foreign: Path = recipe
    if whose == "parent":
        foreign = recipe.rename(folder / "base.toml")
        recipe = write(
            folder / "child.toml", 'format = 1\nname = "child"\nextends = "./base.toml"\n'
        )
    elif whose == "site":
        foreign = write(folder / "site.toml", named)
        monkeypatch.setenv("HVDENV_SITE", str(foreign))
        recipe = mine(tmp_path)
    elif whose in ("init", "folder"):
        foreign = {"init": init, "folder": folder}[whose]
    of_eve(foreign)
    words = [command, str(recipe), *EXECUTING[command]]
    said = hvdenv(*words, code=(125 if command in ("run", "shell") else 2)).err
    assert OF_EVE in said
    assert "hvdenv trust" in said and "--trust" in said
    assert str(foreign) in said
    assert not mark.exists()


@needs_root
def test_a_job_of_init_is_not_kept_in_the_home_of_another_user(
    tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDENV_HOME", str(of_eve(tmp_path)))
    assert OF_EVE in hvdenv("init", "x", "--here", "--where", "compute", code=2).err


@needs_root
def test_with_trust_it_is_executed(tmp_path: Path, hvdenv: Hvdenv) -> None:
    """So the mark above means something."""
    mark, init = tmp_path / "mark", tmp_path / "init.sh"
    init.write_text(f"touch {mark}\n")
    of_eve(init)
    recipe = of_eve(mine(tmp_path, f'modules = {{ init = "{init}", load = ["x"] }}'))
    assert main(["check", str(recipe)]) == 2
    assert not mark.exists()
    main(["check", "--trust", str(recipe)])
    assert mark.exists()


@needs_root
def test_what_executes_nothing_shows_foreign_files(tmp_path: Path, cases: Path) -> None:
    recipe = of_eve(mine(tmp_path))
    facts = ("--facts", str(cases / "facts.json"))
    assert main(["show", str(recipe)]) == 0
    assert main(["plan", str(recipe), *facts]) == 0
    site = write(tmp_path / "site.toml", f'recipe_folders = ["{tmp_path}"]')
    assert main(["recipes", "--site", str(of_eve(site))]) == 0


@needs_root
def test_a_file_is_trusted_as_it_is(tmp_path: Path, hvdenv: Hvdenv) -> None:
    recipe = of_eve(mine(tmp_path))
    command = ["job", str(recipe), "--", "true"]  # fails later: it has no scheduler
    assert f"hvdenv trust {recipe}" in hvdenv(*command, code=2).err
    assert hvdenv("trust", str(recipe)).out.startswith(f"{recipe}: sha256 ")
    assert RAN in hvdenv(*command, code=2).err
    assert [each["path"] for each in json.loads(hvdenv("trust", "--list", "--json").out)] == [
        str(recipe)
    ]
    recipe.write_text(recipe.read_text() + "# changed\n")
    assert OF_EVE in hvdenv(*command, code=2).err
    hvdenv("trust", str(recipe))
    hvdenv("trust", "--remove", str(recipe))
    hvdenv("trust", "--remove", str(recipe), code=2)
    assert OF_EVE in hvdenv(*command, code=2).err


@needs_root
def test_a_script_is_trusted_with_the_owner_of_its_folder(tmp_path: Path, hvdenv: Hvdenv) -> None:
    """Not by its hash: its owner can change it before a shell opens it."""
    folder = tmp_path / "init"
    folder.mkdir()
    init = write(folder / "sh", "true\n")
    of_eve(init)
    recipe = mine(tmp_path, f'modules = {{ init = "{init}", load = ["x"] }}')
    command = ["job", str(recipe), "--", "true"]
    said = hvdenv(*command, code=2).err
    assert f"{init}: this file belongs to uid {EVE}, and {recipe} names it: modules.init" in said
    assert f"`hvdenv trust {folder}`" in said
    hvdenv("trust", str(init))
    assert OF_EVE in hvdenv(*command, code=2).err
    hvdenv("trust", str(folder))
    assert RAN in hvdenv(*command, code=2).err


@needs_root
def test_nobody_else_can_grant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdenv.places import find_places

    recipe = of_eve(mine(tmp_path))
    main(["trust", str(recipe)])
    places = find_places()
    assert len(trust.read_granted(places)) == 1
    record = places.home / "trusted" / f"{os.geteuid()}.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    os.chown(record, EVE, -1)
    assert trust.read_granted(places) == ()
    os.chown(record, 0, -1)
    record.chmod(0o622)
    assert trust.read_granted(places) == ()
    record.chmod(0o600)
    for damaged in ("", "[]", '{"trusted": [{}]}', '{"trusted": 3}', "[" * 100_000):
        record.write_text(damaged)
        assert trust.read_granted(places) == ()


@needs_root
def test_a_site_file_of_root_names_owners_and_groups(
    tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, site = of_eve(mine(tmp_path)), tmp_path / "site.toml"
    monkeypatch.setenv("HVDENV_SITE", str(site))
    command = ["job", str(recipe), "--", "true"]
    site.write_text(f'[trust]\nowners = ["nobody-of-this-name", "{EVE}"]\n')
    assert RAN in hvdenv(*command, code=2).err
    # It counts only if nobody but root could have written it.
    of_eve(site)
    said = hvdenv(*command, code=2).err
    assert OF_EVE in said
    assert f"note: {site}: [trust] is ignored" in said
    os.chown(site, 0, GROUP)
    site.chmod(0o664)
    assert OF_EVE in hvdenv(*command, code=2).err


def test_what_a_site_file_must_not_say(tmp_path: Path, hvdenv: Hvdenv) -> None:
    site = write(tmp_path / "site.toml", '[trust]\nowner = ["ann"]\n')
    assert "trust.owner" in hvdenv("check", "local", "--site", str(site), code=2).err
    recipe = mine(tmp_path, '[trust]\nowners = ["ann"]')
    assert "trust" in hvdenv("show", str(recipe), code=2).err


def test_a_file_and_every_folder_that_leads_to_it_count(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    path = write(folder / "r.toml", "")
    assert problems(path) == []
    path.chmod(0o602)
    assert problems(path) == ["can be written by everybody"]
    path.chmod(0o600)
    folder.parent.chmod(0o777)
    assert problems(path) == ["can be written by everybody"]
    folder.parent.chmod(0o1777)  # as /tmp: nobody else can rename what is in there
    assert problems(path) == []
    assert problems(folder.parent) == ["can be written by everybody"]
    assert problems(folder / "..") == ["can be written by everybody"]
    (tmp_path / "up").symlink_to("a/b/..")
    assert problems(tmp_path / "up") == ["can be written by everybody"]
    (folder.parent / "here").symlink_to(".")
    assert problems(folder.parent / "here") == ["can be written by everybody"]
    assert problems(folder.parent / "nothing" / "there") == []
    link = tmp_path / "link"
    link.symlink_to("a/../a/b/./r.toml")
    assert problems(link) == []
    folder.chmod(0o777)
    assert problems(link) == ["can be written by everybody"]
    round_ = tmp_path / "round"
    round_.symlink_to("round")
    assert problems(round_) == []  # nothing is there


@needs_root
def test_links_of_others_in_a_sticky_folder(tmp_path: Path) -> None:
    folder, good = tmp_path / "sticky", tmp_path / "good.toml"
    folder.mkdir()
    folder.chmod(0o1777)
    good.write_text("")
    link = folder / "link"
    link.symlink_to(good)
    assert problems(link) == []
    of_eve(link)
    assert problems(link) == [f"belongs to uid {EVE}"]


def test_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "r.toml", "")
    path.chmod(0o660)
    user, group = os.geteuid(), 4711
    status = os.stat_result((*path.stat()[:5], group, *path.stat()[6:]))

    def faults(policy: trust.Policy = OWN) -> list[str]:
        for cached in (trust._user, trust._group, trust._groups_of):
            cached.cache_clear()
        return [f.problem for f in trust._faults(str(path), status, policy, last=True)]

    import grp
    import pwd

    names = {user: "ann", 99: "bob"}
    users = {
        number: SimpleNamespace(pw_name=name, pw_uid=number, pw_gid=group)
        for number, name in names.items()
    }
    listed = SimpleNamespace(gr_name="ann", gr_mem=[])
    monkeypatch.setattr(pwd, "getpwuid", lambda number: users[number])
    monkeypatch.setattr(
        pwd, "getpwnam", lambda name: next(u for u in users.values() if u.pw_name == name)
    )
    monkeypatch.setattr(grp, "getgrgid", lambda number: listed)
    assert faults() == []  # the user's own, as useradd makes it
    listed.gr_mem = ["ann"]
    assert faults() == []
    listed.gr_mem = ["ann", "bob"]
    assert faults() == ["can be written by the group ann"]
    listed = SimpleNamespace(gr_name="users", gr_mem=[])
    assert faults() == ["can be written by the group users"]  # others may have it as their first
    assert faults(OWN._replace(groups=frozenset({group}))) == []
    # Who is in a group that is trusted may own files, too.
    status = os.stat_result((0o100600, *path.stat()[1:4], 99, *path.stat()[5:]))
    assert faults() == ["belongs to bob"]
    monkeypatch.setattr(os, "getgrouplist", lambda name, first: [group])
    assert faults(OWN._replace(groups=frozenset({group}))) == []


@needs_root
def test_bytes_that_are_used_are_those_that_were_judged(tmp_path: Path) -> None:
    """A link is exchanged all the time while the recipe is read and judged."""
    good, bad, link = tmp_path / "good.toml", tmp_path / "bad.toml", tmp_path / "link.toml"
    good.write_text("good")
    bad.write_text("bad")
    of_eve(bad)
    link.symlink_to(good)
    done = threading.Event()

    def exchange() -> None:
        temporary = tmp_path / "next"
        while not done.is_set():
            for target in (bad, good):
                temporary.symlink_to(target)
                temporary.rename(link)

    thread = threading.Thread(target=exchange)
    thread.start()
    accepted, refused = [], 0
    try:
        for _ in range(3000):
            content = read_file(link, RECIPE)
            try:
                trust.refuse_content(content, OWN, "")
                accepted.append(content.data)
            except UntrustedError:
                refused += 1
    finally:
        done.set()
        thread.join()
    assert accepted and refused
    assert set(accepted) == {b"good"}


def test_what_is_read_once_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between reading and judging nothing is opened again."""
    from hvdenv.model import layers

    recipe = mine(tmp_path)
    opened: list[Path] = []

    def reading(path: Path, kind: object) -> object:
        opened.append(path)
        return read_file(path, RECIPE)

    monkeypatch.setattr(layers, "read_file", reading)
    resolved = layers.load_recipe(str(recipe))
    assert opened.count(recipe) == 1
    (content,) = resolved.contents
    assert content.data == recipe.read_bytes()
    monkeypatch.setattr(os, "open", lambda *words, **more: pytest.fail("opened again"))
    trust.refuse_content(content, OWN, "")


def environment(folder: Path) -> Path:
    """Something like a virtual environment."""
    prefix = folder / "env"
    packages = prefix / "lib/python3.11/site-packages"
    (packages / "horovod" / "common").mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(folder / "python3.11")
    (folder / "python3.11").write_text("")
    for path in ("activate.sh", "bin/pip", "lib/python3.11/site-packages/a.pth", "pyvenv.cfg"):
        (prefix / path).write_text("")
    (packages / "horovod" / "common" / "basics.py").write_text("")
    (folder / "src").mkdir()
    (folder / "base").mkdir()
    (prefix / "pyvenv.cfg").write_text(
        f"home = {folder / 'base'}\n"
    )  # its interpreter can be a copy
    (packages / "a.pth").write_text(f"import site\n{folder / 'src'}\n")
    return prefix


PARTS = (
    "", "activate.sh", "bin", "bin/python", "bin/pip", "lib", "lib/python3.11", "pyvenv.cfg",
    "lib/python3.11/site-packages", "lib/python3.11/site-packages/a.pth",
    "lib/python3.11/site-packages/horovod", "../python3.11", "../src", "../base", "..",
)  # fmt: skip


@needs_root
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("whole", [False, True])
def test_what_an_environment_executes_is_judged(part: str, whole: bool, tmp_path: Path) -> None:
    prefix = environment(tmp_path)
    trust.refuse_prefix(prefix, OWN, "", whole=whole)
    path = prefix / part
    of_eve(path)
    with pytest.raises(UntrustedError, match=f"belongs to uid {EVE}"):
        trust.refuse_prefix(prefix, OWN, "", whole=whole)
    os.chown(path, 0, 0, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(path.stat().st_mode | stat.S_IWOTH)
        with pytest.raises(UntrustedError, match="can be written by everybody"):
            trust.refuse_prefix(prefix, OWN, "", whole=whole)


@needs_root
def test_deep_in_an_environment_verify_alone_looks(tmp_path: Path) -> None:
    prefix = environment(tmp_path)
    of_eve(prefix / "lib/python3.11/site-packages/horovod/common/basics.py")
    trust.refuse_prefix(prefix, OWN, "", whole=False)
    with pytest.raises(UntrustedError, match=f"basics.py.* belongs to uid {EVE}"):
        trust.refuse_prefix(prefix, OWN, "", whole=True)


@needs_root
@pytest.mark.parametrize("command", ["verify", "run", "shell", "job"])
def test_a_prefix_of_another_user_is_not_run(command: str, tmp_path: Path, hvdenv: Hvdenv) -> None:
    prefix = tmp_path / "env"
    environment_ = generations.at(prefix)
    generations.claim(environment_)
    record = {"recipe": "local", "variants": [], "resolved": encode(load_recipe("local").recipe)}
    build(environment_, ONE, **record, environment=".")
    generations.switch(environment_, ONE)
    mark = tmp_path / "mark"
    (prefix / "activate.sh").write_text(f"touch {mark}\n")
    of_eve(prefix / "activate.sh")
    more = {"run": ("--", "true"), "job": ("--", "true")}.get(command, ())
    words = [command, *(("neuron",) if command == "job" else ()), "--prefix", str(prefix), *more]
    said = hvdenv(*words, code=(125 if command in ("run", "shell") else 2)).err
    assert OF_EVE in said
    assert f"hvdenv trust {prefix}" in said
    assert not mark.exists()


@needs_root
def test_a_build_is_not_stopped_by_what_is_beside_its_prefix(tmp_path: Path) -> None:
    """/tmp, for instance: full of other users' files, and with the sticky bit."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    (folder / "hers").mkdir()
    of_eve(folder / "hers")
    arguments = make_parser().parse_args(["build", "local"])
    refuse_foreign_path(str(folder / "env"), arguments)
    refuse_foreign_prefix(folder / ".env.hvdenv", arguments)
    (folder / ".env.hvdenv").mkdir()
    of_eve(folder / ".env.hvdenv")
    with pytest.raises(UntrustedError, match=f"belongs to uid {EVE}"):
        refuse_foreign_prefix(folder / ".env.hvdenv", arguments)


@needs_root
def test_an_environment_is_trusted_with_its_owners(tmp_path: Path) -> None:
    prefix = environment(tmp_path)
    for path in (prefix, *prefix.rglob("*")):
        of_eve(path)
    granted = trust.grant(prefix, OWN)
    assert granted == trust.Granted(str(prefix), "", (EVE,), ())
    assert trust.described(granted) == f"files of uid {EVE}"
    policy = OWN._replace(granted=(granted,))
    trust.refuse_prefix(prefix, policy, "", whole=True)
    # Not what is beside it, and nobody else in it.
    with pytest.raises(UntrustedError):
        trust.refuse_prefix(of_eve(prefix.parent / "src"), policy, "", whole=True)
    os.chown(prefix.parent / "src", 0, 0)
    os.chown(prefix / "bin" / "pip", EVE + 7, GROUP)
    with pytest.raises(UntrustedError, match=f"belongs to uid {EVE + 7}"):
        trust.refuse_prefix(prefix, policy, "", whole=True)
    (prefix / "bin").chmod(0o777)
    with pytest.raises(UntrustedError, match="so it cannot be trusted"):
        trust.grant(prefix, OWN)


@needs_root
def test_a_home_of_others_is_refused(
    tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, site = tmp_path / "project" / "home", tmp_path / "site.toml"
    home.mkdir(parents=True)
    monkeypatch.setenv("HVDENV_HOME", str(home))
    words = ["job", "local", "--", "true"]

    def said() -> str:
        return hvdenv(*words, code=2).err

    assert RAN in said()
    home.chmod(0o1777)
    assert f"HVDENV_HOME: {home}: this folder can be written by everybody" in said()
    home.chmod(0o700)
    of_eve(home)
    assert f"this folder belongs to uid {EVE}" in said()
    hvdenv("trust", "--list", code=2)
    os.chown(home, 0, GROUP)
    home.chmod(0o2770)
    assert f"this folder can be written by the group {GROUP}" in said()
    site.write_text(f'[trust]\ngroups = ["{GROUP}"]\n')
    monkeypatch.setenv("HVDENV_SITE", str(site))
    assert RAN in said()
    # For what leads to it one can vouch.
    monkeypatch.delenv("HVDENV_SITE")
    home.chmod(0o700)
    os.chown(home.parent, 0, GROUP)
    home.parent.chmod(0o2770)
    assert f"hvdenv trust {home}" in said()
    hvdenv("trust", str(home))
    assert RAN in said()
    home.parent.chmod(0o2777)
    assert "can be written by everybody" in said()
    trusted = hvdenv(*words[:2], "--trust", *words[2:], code=2).err
    assert RAN in trusted


@pytest.mark.parametrize(
    ("tag", "said"),
    [(0x02, f"can be written by uid {EVE}"), (0x08, f"can be written by the group {EVE}")],
)
def test_who_may_write_by_an_access_control_list_counts(
    tag: int, said: str, tmp_path: Path
) -> None:
    """Then the group's rights in the mode are the most that the list gives."""
    rights = [(0x01, 7, -1), (tag, 6, EVE), (0x04, 0, -1), (0x10, 7, -1), (0x20, 0, -1)]
    if tag == 0x08:
        rights[1:3] = rights[2:0:-1]
    listed = b"".join(struct.pack("<HHi", *each) for each in rights)
    path = tmp_path / "recipe.toml"
    path.touch()
    try:
        os.setxattr(path, "system.posix_acl_access", struct.pack("<I", 2) + listed)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error}")
    own_group = OWN._replace(groups=frozenset({os.getegid()}))
    assert problems(path, own_group) == [said]
    path.chmod(0o640)
    assert problems(path, own_group) == []


@needs_root
def test_a_home_that_was_never_made_can_be_trusted_as_the_message_says(
    tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root in a CI job has the home folder of another user."""
    home = of_eve(tmp_path) / "no folder"
    monkeypatch.setenv("HVDENV_HOME", str(home))
    words = ["job", "local", "--", "true"]
    said = hvdenv(*words, code=2).err
    assert f"HVDENV_HOME: {home}: its folder {tmp_path} belongs to uid {EVE}" in said
    assert f"`mkdir -p '{home}' && hvdenv trust '{home}'`" in said
    home.mkdir(parents=True)
    hvdenv("trust", str(home))
    assert RAN in hvdenv(*words, code=2).err


def test_nobody_is_told_to_change_a_device(hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UntrustedError) as refused:
        trust.refuse_path("/dev/null", OWN, "it would be run")
    monkeypatch.setenv("HVDENV_HOME", "/dev/null")
    said = f"{refused.value}{hvdenv('job', 'local', '--', 'true', code=2).err}"
    assert said.count("neither a file nor a folder") == 2 and "chmod" not in said


@pytest.mark.parametrize("inside", ["cache", "cache/uv", "jobs"])
def test_a_home_in_which_others_can_write_is_refused(
    inside: str, tmp_path: Path, hvdenv: Hvdenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older hvdenv left it with a umask of 000."""
    (tmp_path / inside).mkdir(parents=True)
    (tmp_path / inside).chmod(0o777)
    monkeypatch.setenv("HVDENV_HOME", str(tmp_path))
    said = hvdenv("job", "local", "--", "true", code=2).err
    assert f"{tmp_path / inside} can be written by everybody" in said
    assert f"`chmod go-w {tmp_path / inside}`" in said


def test_all_that_a_recipe_names_is_judged() -> None:
    """A key that takes a folder, a file or a URL is among these, or not executed from."""
    recipe = load_recipe("local").recipe
    modules = decode(
        Modules, {"init": "/a/init", "use": ["/a/use"], "source": ["/a/source"], "load": ["x"]}
    )
    conda = decode(
        Conda, {"channels": ["file:///a/chan%20nel", "conda-forge"], "program": "/a/conda"}
    )
    torch = FrameworkPackage(
        "1", wheelhouse="/a/wheels", cpu_index="file://localhost/a/index",
        extra_index="file:///a/more%23x#fragment",
        find_links=("/a/links", "file:///a/page", "https://x/page"),
        source=Source("file:///a/git", "v1"),
    )  # fmt: skip
    named = executed_paths(
        recipe._replace(
            modules=modules,
            conda=conda,
            frameworks={"torch": torch},
            python=recipe.python._replace(prefix="/a/prefix"),
        )
    )
    assert {path for _, path in named} == {
        "/a/init", "/a/use", "/a/source", "/a/conda", "/a/prefix", "/a/wheels", "/a/index", "/a/git",
        "/a/chan nel", "/a/more#x", "/a/links", "/a/page",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        (".:/usr/bin::bin:/bin:", "/usr/bin:/bin"),
        (".", os.defpath),
        ("/usr/bin", "/usr/bin"),
    ],
)
def test_programs_of_the_current_folder_are_not_found(
    path: str, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "quota", "#!/bin/sh\ntouch mark\n", EXECUTABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path)
    drop_relative_folders()
    assert os.environ["PATH"] == kept
    assert shutil.which("quota") in (None, "/usr/bin/quota")
    assert Runner().run(Command(("sh", "-c", "echo $PATH"))).output == kept


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_modules_of_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pathlib", "argparse", "tomli", "pwd", "signal", "packaging", "pip", "horovod"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} of the folder')\n")
    done = start(tmp_path, "-m", "hvdenv", "show", "local")
    assert (done.returncode, done.stderr) == (0, "")
    assert "of the folder" not in done.stdout
    # Nor by the Pythons that hvdenv starts.
    monkeypatch.chdir(tmp_path)
    runner = Runner()
    program = write(
        tmp_path / "there" / "program.py",
        "import subprocess, sys; subprocess.check_call([sys.executable, *sys.argv[1:]])",
    )
    by_another = (str(program), "-m", "pip", "--version")  # as hvdenv's programs for steps do
    for words in (("-m", "pip", "--version"), ("-c", "import pathlib"), by_another):
        outcome = runner.run(Command((sys.executable, *words)))
        assert outcome
        assert "of the folder" not in outcome.output


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_jobs_start_hvdenv_without_the_current_folder(
    version: tuple[int, int], tmp_path: Path
) -> None:
    if version > sys.version_info:
        pytest.skip("this Python has no -P")
    (tmp_path / "hvdenv").mkdir()
    for name in ("hvdenv/__init__", "argparse", "runpy"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} of the folder')\n")
    words = job.AS_MODULE if version > (3, 10) else job.AS_MODULE_3_10
    done = start(tmp_path, *words, "hvdenv", "show", "local")
    assert (done.returncode, done.stderr) == (0, "")
    assert "of the folder" not in done.stdout
    assert 'name = "local"' in done.stdout
