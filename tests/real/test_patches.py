"""All patches together on Horovod's real source, in any order."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from hvdenv import PROBES
from hvdenv.knowledge.patches import all_patches


@pytest.mark.parametrize("order", [1, -1], ids=["by name", "reversed"])
@pytest.mark.parametrize("version", ["0.25.0", "0.26.1", "0.28.1"])
def test_patches_fit_the_source(
    version: str, order: int, local_prefix: Path, tmp_path: Path
) -> None:
    subprocess.run(
        [local_prefix / "venv" / "bin" / "python", "-m", "pip", "download", "--quiet", "--no-deps",
         "--no-build-isolation", "--no-binary", "horovod", "--dest", tmp_path, f"horovod=={version}"],
        check=True,
    )  # fmt: skip
    archive = tmp_path / f"horovod-{version}.tar.gz"
    patches = [p for p in all_patches() if SpecifierSet(p.horovod).contains(version)][::order]
    assert patches
    data = [
        {"name": patch.name, "edits": [edit._asdict() for edit in patch.edit]} for patch in patches
    ]
    (tmp_path / "patches.json").write_text(json.dumps(data))
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    subprocess.run(
        [sys.executable, PROBES / "prepare_source.py", archive, sha256, tmp_path / "source",
         tmp_path / "patches.json"],
        check=True,
    )  # fmt: skip
    for patch in patches:
        for edit in patch.edit:
            assert edit.replace in (tmp_path / "source" / edit.file).read_text()
