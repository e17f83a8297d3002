"""Programs in an image: which recipes have theirs there, and the words that start them."""

from __future__ import annotations

import pytest

from hvdenv.errors import IncompatibleError
from hvdenv.launch.container import inside, recipe_image, start_in_image
from hvdenv.launch.launchers import LAUNCHERS, Launch, Mpi
from hvdenv.model.cluster import Container
from hvdenv.model.layers import load_recipe
from hvdenv.sites.hosts import Host

BOTH = Container(None, (), "singularity", "/images/h.sif", ("/scratch", "/data"), "nvidia")
CHARLIE = Container(None, (), "ch-run", "/images/h", ("/scratch",))
TRAIN = ("python", "train.py")


def test_a_recipe_that_names_an_image_has_its_programs_there() -> None:
    named = recipe_image(load_recipe("singularity").recipe, "/scratch/ann")
    assert named and named.image == "/scratch/ann/horovod.sif"
    other = ["container.image=/images/../images/h.sif"]
    named = recipe_image(load_recipe("singularity", overrides=other).recipe, "/scratch/ann")
    assert named and named.image == "/images/h.sif"
    assert recipe_image(load_recipe("local").recipe, "/") is None
    defined = load_recipe("local", overrides=["container.base=debian:12"]).recipe
    assert defined.container and recipe_image(defined, "/") is None


def test_singularity_and_apptainer() -> None:
    without = ("env", "-u", "OPAL_PREFIX", "-u", "PMIX_INSTALL_PREFIX")
    assert inside(BOTH, "/home/ann") == (
        *without,
        "singularity",
        "exec",
        "--nv",
        "--bind",
        "/scratch",
        "--bind",
        "/data",
        "/images/h.sif",
    )
    amd = BOTH._replace(gpu="rocm", binds=(), runtime="apptainer")
    assert inside(amd, "/", ("/a:/srv",)) == (
        *without,
        "apptainer",
        "exec",
        "--rocm",
        "--bind",
        "/a:/srv:ro",
        "/images/h.sif",
    )
    assert inside(amd._replace(gpu="none"), "/")[-1] == "/images/h.sif"
    assert "--rocm" not in inside(amd._replace(gpu="none"), "/")


@pytest.mark.parametrize(
    ("folder", "binds"),
    [
        ("/home/ann", ["/scratch", "/home/ann", "/a:/srv"]),
        ("/scratch/ann", ["/scratch", "/a:/srv"]),
        ("/tmp/x", ["/scratch", "/a:/srv"]),
        ("/", ["/scratch", "/a:/srv"]),
        ("/scratch2", ["/scratch", "/scratch2", "/a:/srv"]),
    ],
)
def test_charliecloud_sees_the_folder_that_the_program_starts_in(
    folder: str, binds: list[str]
) -> None:
    words = inside(CHARLIE, folder, ("/a:/srv",))
    assert words[0] == "ch-run" and words[-3:] == (f"--cd={folder}", "/images/h", "--")
    assert [word.removeprefix("--bind=") for word in words if "--bind" in word] == binds
    # What the image has of its own comes after what is taken away.
    for name in ("OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "LD_LIBRARY_PATH"):
        assert words.index("--set-env") > words.index(f"--unset-env={name}")


@pytest.mark.parametrize("name", ["horovodrun-gloo", "horovodrun-mpi", "torchrun"])
def test_a_launcher_of_the_image_starts_ranks_on_its_own_host_only(name: str) -> None:
    assert LAUNCHERS[name].provided
    launch, words = Launch(TRAIN, 2, mpi=Mpi("Open MPI", "4.1.8")), inside(BOTH, "/")
    here: list[tuple[Host, ...]] = [(), (Host("localhost", 2),), (Host("f1", 2),)]
    for hosts in here:
        argv = start_in_image(name, launch._replace(hosts=hosts), words, "f1.example.org").argv
        assert argv[: len(words)] == words and argv[-2:] == TRAIN
        assert argv.count("singularity") == 1
    elsewhere: list[tuple[Host, ...]] = [(Host("f2", 2),), (Host("f1", 1), Host("f2", 1))]
    for hosts in elsewhere:
        with pytest.raises(IncompatibleError, match="a program of the image"):
            start_in_image(name, launch._replace(hosts=hosts), words, "f1")
    unknown = launch._replace(host_list="{hosts}", ranks_per_node=1)
    with pytest.raises(IncompatibleError):
        start_in_image(name, unknown, words, "f1")
