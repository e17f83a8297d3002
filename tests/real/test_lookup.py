"""`check` asks the real package index; for conda: test_conda.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdenv.building import resolver
from hvdenv.cli.main import main
from tests.real.conftest import Cli
from tests.support.index import served

TORCH = ("check", "local", "--variant", "torch", "--json")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("frameworks.torch.version=2.99.0", "there is no version of torch==2.99.0"),
        ("packages.numpy=>=2.99", "packages.numpy: "),
        ("packages.hvdenv-does-not-exist=>=1", "hvdenv-does-not-exist was not found"),
    ],
)
def test_what_the_index_lacks(cli: Cli, override: str, said: str) -> None:
    found = cli(*TORCH, "--set", override, code=3).json["findings"]
    (message,) = (each["message"] for each in found if each["id"] == "packages-not-available")
    assert said in message


@pytest.mark.needs("python3-dev")
def test_what_the_index_has(cli: Cli, tmp_path: Path) -> None:
    """The release of future has no wheel; none of its code is run."""
    found = cli(*TORCH, "--set", "packages.future===0.18.2").json
    assert "Python packages: " in found["looked_up"][0]
    assert any("future: no wheel fits" in each for each in found["not_looked_up"])


def test_an_index_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resolver, "MEMORY", 600 << 20)
    monkeypatch.setenv("HVDENV_HOME", str(tmp_path / "home"))
    with served(tmp_path) as site:
        site.everywhere = (
            b'<a href="torch-1.0-py3-none-any.whl">torch-1.0-py3-none-any.whl</a>\n' * (4 << 20)
        )
        main([*TORCH, "--set", f"frameworks.torch.cpu_index={site.url}/simple"])
    assert "GiB of memory" in "\n".join(json.loads(capsys.readouterr().out)["not_looked_up"])
