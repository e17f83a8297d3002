"""Show which Horovod release and patches fit a combination of versions.

grid also shows whether the combination was ever built and verified, and which rules apply to it.
Without options it lists every combination that was tried."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

from hvdenv.cli.check import told as told_rule
from hvdenv.cli.options import add, add_options, print_json
from hvdenv.knowledge.grid import (
    ANY,
    NONE,
    Advice,
    Asked,
    Row,
    advise,
    all_rows,
    options,
    told,
    told_answer,
)
from hvdenv.model.layers import load_recipe
from hvdenv.schema import encode

EXAMPLES = """\
examples:
  hvdenv grid                                       every combination that was tried
  hvdenv grid --torch 2.6 --python 3.12             2.6 stands for every 2.6 release
  hvdenv grid --tensorflow 2.15.1 --mpi mpich
  hvdenv grid --torch 2.11 --cuda 13.0 --json
  hvdenv grid --torch 2.13 --cuda none --mpi openmpi-5

`python -m grid.run` in a checkout tries combinations; `make docs` shows the results.
"""

SCHEMA = "hvdenv.grid/1"
BASE = "local"
_KINDS = ("openmpi", "mpich", "mvapich", "cray-mpich", "intel", "spectrum")


def configure(parser: argparse.ArgumentParser) -> None:
    add(parser, "--torch X", "version of PyTorch", type=_version)
    add(parser, "--tensorflow Y", "version of TensorFlow", type=_version)
    add(parser, "--python Z", "version of Python", type=_version)
    add(
        parser, "--cuda W", "version of CUDA that Horovod is built for, or any, or none", type=_cuda
    )
    add(
        parser, "--mpi M",
        f"{', '.join(_KINDS)}; a version may follow, as in openmpi-4.1",
        type=_mpi, default=("", ""),
    )  # fmt: skip
    add_options(parser, "json")


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)*([a-z]+\d+)?(\+[a-z0-9.]+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no version such as 2.6 or 2.13.0+cpu")
    return text


def _cuda(text: str) -> str:
    return text if text in (ANY, NONE) else _version(text)


def _mpi(text: str) -> tuple[str, str]:
    found = re.fullmatch(rf"({'|'.join(_KINDS)})(?:[-/ ](\d.*))?", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(_KINDS)}, with or without a version: openmpi-4.1"
        )
    return found[1], _version(found[2]) if found[2] else ""


def run(arguments: argparse.Namespace) -> int:
    mpi, mpi_version = arguments.mpi
    asked = Asked(
        torch=arguments.torch or "", tensorflow=arguments.tensorflow or "", python=arguments.python or "",
        cuda=arguments.cuda or "", mpi=mpi, mpi_version=mpi_version,
    )  # fmt: skip
    rows = all_rows()
    if not any(asked):
        _show_all(rows, as_json=arguments.json)
        return 0
    advice = advise(asked, load_recipe(BASE).recipe, rows)
    if arguments.json:
        print_json(_document(asked, advice))
    else:
        print("\n".join(_lines(asked, advice)))
    return 0


def _show_all(rows: tuple[Row, ...], *, as_json: bool) -> None:
    if as_json:
        print_json({"schema": SCHEMA, "rows": encode(rows)})
        return
    for row in rows:
        print(told(row))
    print(f"{len(rows)} combinations; `make docs` in a checkout shows each in full")


def _document(asked: Asked, advice: Advice) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "asked": {name: each for name, each in asked._asdict().items() if each},
        "horovod": advice.horovod,
        "patches": list(advice.patches),
        **encode(advice.answer),
        "rules": encode(advice.rules),
    }


def _lines(asked: Asked, advice: Advice) -> Iterator[str]:
    yield f"Horovod {advice.horovod}, with the patches {', '.join(advice.patches) or 'none'}"
    yield from told_answer(asked, advice.answer)
    for row in advice.answer.rows[:1]:
        if row.verdict == "pass":
            yield f"to have it: {shlex.join(options(row))}"
    yield from map(told_rule, advice.rules)
    if not advice.rules:
        yield "no rule blocks it or warns of it"
