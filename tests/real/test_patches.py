"""All patches together on Horovod's real source, in any order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdenv.cascade import resolve
from hvdenv.patches import Patch, all_patches
from hvdenv.plan import PROBES


@pytest.fixture(scope="module")
def source_archive(local_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    subprocess.run(
        [local_prefix / "venv" / "bin" / "python", "-m", "pip", "download", "--quiet", "--no-deps",
         "--no-build-isolation", "--no-binary", "horovod", "--dest", folder, "horovod==0.28.1"],
        check=True,
    )  # fmt: skip
    return folder / "horovod-0.28.1.tar.gz"


@pytest.mark.parametrize(
    "patches", [all_patches(), all_patches()[::-1]], ids=["by name", "reversed"]
)
def test_patches_fit_the_source(
    patches: tuple[Patch, ...], source_archive: Path, tmp_path: Path
) -> None:
    data = [
        {"name": patch.name, "edits": [edit._asdict() for edit in patch.edit]} for patch in patches
    ]
    (tmp_path / "patches.json").write_text(json.dumps(data))
    sha256 = resolve("local").recipe.horovod.sha256
    subprocess.run(
        [sys.executable, PROBES / "prepare_source.py", source_archive, sha256, tmp_path / "source",
         tmp_path / "patches.json"],
        check=True,
    )  # fmt: skip
    for patch in patches:
        for edit in patch.edit:
            assert edit.replace in (tmp_path / "source" / edit.file).read_text()
