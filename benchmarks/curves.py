"""What commands cost over the size of what they work on, as pictures and a table for the docs.

    python benchmarks/curves.py [--only CURVE]

Writes docs/images/curves-NAME.svg for each curve, and docs/explanation/curves.md. Takes a few
minutes, needs the environment of `hvdenv build local`, and does not change it.

- build: `hvdenv plan` of a recipe with as many packages, and what `build` from a lock does with
  them when its caches are warm: uv installs them from files with hashes and compiles bytecode;
- verify: `hvdenv verify local --quick` on as many ranks;
- doctor: a log with a failure at its end, and one full of failures;
- solve: conda_env.py --solve-only and the lock, as in benchmarks/solve.py;
- isolate: what it costs that an environment is known to be as it was built, and that nobody else
  can change it. The build hashes every file into the manifest; `verify` compares the files with
  it, and judges the owner and mode of each.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import itertools
import math
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from solve import Taken, by_hvdenv, make_channel, run  # type: ignore[import-not-found]

from hvdenv.reports.page import figure

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TABLE = DOCS / "explanation/curves.md"
HVDENV = (sys.executable, "-m", "hvdenv")

# Above this factor between the least and the greatest, decades are marks enough.
WIDE = 300

Work = Callable[[Path, int], Iterator[tuple[str, Taken]]]


class Scale(NamedTuple):
    """A logarithmic axis: the values at its ends, and where these lie."""

    least: float
    greatest: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.least) / math.log(self.greatest / self.least)
        return round(self.start + share * (self.end - self.start), 1)


class Curve(NamedTuple):
    """What is measured.

    Attributes:
        title: of the picture.
        axis: what its horizontal axis counts.
        sizes: where to measure.
        work: given an empty directory and a size, measures each line of the picture.
    """

    title: str
    axis: str
    sizes: tuple[int, ...]
    work: Work


# The seconds and MiB of each line, by size.
Measured = Mapping[str, Mapping[int, Taken]]
# What is drawn of it.
Lines = Mapping[str, Mapping[int, float]]


def best(words: Sequence[str | Path]) -> Taken:
    """What a program takes; the fastest of three runs if it takes less than two seconds."""
    taken = run(words, os.environ)
    again = [run(words, os.environ) for _ in range(2)] if taken.seconds < 2 else []
    return min([taken, *again], key=lambda each: each.seconds)


def build(folder: Path, packages: int) -> Iterator[tuple[str, Taken]]:
    names = [f"made-up-{number}" for number in range(packages)]
    recipe = folder / "many.toml"
    listed = "".join(f'{name} = "==1.0"\n' for name in names)
    recipe.write_text(f'format = 1\nname = "many"\nextends = "local"\n[packages]\n{listed}')
    yield "plan", best([*HVDENV, "plan", recipe])
    requirements = folder / "wheels.txt"
    wheels = [make_wheel(folder, name) for name in names]
    requirements.write_text("".join(wheels))
    variables = {
        **os.environ,
        "UV_CACHE_DIR": f"{folder}/cache",
        "UV_FIND_LINKS": str(folder),
        "UV_LINK_MODE": "clone",
    }
    for turn in ("first", "second"):
        run([*UV, "venv", "--quiet", folder / turn], variables)
        words = [*INSTALL, "--python", folder / turn, "--requirement", requirements]
        taken = run(words, variables)
    yield "install, caches warm", taken


UV = (sys.executable, "-m", "uv")
# As the step "packages" of a plan with a lock.
INSTALL = (
    *UV,
    "pip",
    "install",
    "--no-config",
    "--offline",
    "--no-index",
    "--compile-bytecode",
    "--no-deps",
    "--require-hashes",
    "--only-binary",
    ":all:",
)


def make_wheel(folder: Path, name: str) -> str:
    """A wheel of 40 modules of 2 kB. Returns the line of a file of requirements."""
    package = name.replace("-", "_")
    information = f"{package}-1.0.dist-info"
    files = {f"{package}/m{number}.py": "x = [1, 2, 3]\n" * 140 for number in range(40)}
    files[f"{information}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    files[f"{information}/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = f"{information}/RECORD"
    files[record] = "".join(f"{each},,\n" for each in (*files, record))
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def verify(folder: Path, ranks: int) -> Iterator[tuple[str, Taken]]:
    words = [*HVDENV, "verify", "local", "--quick", "--quiet", "-n", str(ranks)]
    yield "verify --quick", run(words, os.environ)


LOGS = ROOT / "tests/cases/logs"


def doctor(folder: Path, megabytes: int) -> Iterator[tuple[str, Taken]]:
    failure = recorded("mpi-kill.txt")
    for name, lines in (("failure at the end", epochs()), ("full of failures", failures())):
        log = folder / "log"
        with log.open("w", encoding="utf-8") as stream:
            left = megabytes * 10**6
            while left > 0:
                left -= stream.write(next(lines))
            stream.write(failure)
        yield name, best([*HVDENV, "doctor", log])


def recorded(name: str) -> str:
    return (LOGS / name).read_text(encoding="utf-8").partition("\n+++\n")[2]


def epochs() -> Iterator[str]:
    """The output of a training."""
    for step in itertools.count():
        loss, rate = 7 / (1 + step / 1000), 900 + step % 91
        yield f"[1,{step % 8}]<stdout>:epoch {step // 1000} step {step % 1000}: loss {loss:.4f}, {rate} images/s\n"


def failures() -> Iterator[str]:
    """All recorded logs, again and again."""
    yield from itertools.cycle([recorded(each.name) for each in sorted(LOGS.glob("*.txt"))])


def solve(folder: Path, records: int) -> Iterator[tuple[str, Taken]]:
    make_channel(folder / "channel", records)
    turns = []
    for turn in ("first", "second", "third"):
        (folder / turn).mkdir()
        turns.append(by_hvdenv((folder / "channel").as_uri(), folder / turn))
    yield "solve and lock", min(turns, key=lambda each: each.seconds)


def isolate(folder: Path, files: int) -> Iterator[tuple[str, Taken]]:
    tree = folder / "tree"
    for number in range(files):
        path = tree / f"lib/python3.11/site-packages/package{number // 400}/part{number // 20 % 20}"
        if number % 20 == 0:
            path.mkdir(parents=True)
        (path / f"{number}.so").write_bytes(str(number).encode() * (8000 // len(str(number))))
    for name, program in ISOLATE.items():
        yield name, best([sys.executable, "-c", program, tree])


ISOLATE = {
    "build: hash every file": """
import sys; from pathlib import Path; from hvdenv.environments import manifest
manifest.write(Path(sys.argv[1]))
""",
    "verify: compare the files": """
import sys; from pathlib import Path; from hvdenv.environments import manifest
root = Path(sys.argv[1])
assert manifest.compare(root, manifest.read(root / manifest.NAME)) == []
""",
    "verify: judge who can change them": """
import sys; from hvdenv.base import trust
for _ in trust.in_environment(sys.argv[1], trust.trusted_owners(), whole=True): pass
""",
}

CURVES = {
    "build": Curve("Plan and install packages", "packages", (10, 50, 250), build),
    "verify": Curve("Verify the environment local", "ranks", (2, 3, 4), verify),
    "doctor": Curve("Diagnose a log", "size of the log in MB", (1, 10, 100), doctor),
    "solve": Curve("Solve and lock a conda recipe", "records", (10_000, 50_000, 200_000), solve),
    "isolate": Curve("Keep an environment as built", "files", (1_000, 10_000, 50_000), isolate),
}


def measured(curve: Curve) -> Measured:
    found: dict[str, dict[int, Taken]] = {}
    for size in curve.sizes:
        with tempfile.TemporaryDirectory(prefix="hvdenv-curves-") as folder:
            for line, taken in curve.work(Path(folder), size):
                found.setdefault(line, {})[size] = taken
                print(
                    f"  {size:>9,} {line:36}{taken.seconds:8.2f} s{taken.mebibytes:8.0f} MiB",
                    flush=True,
                )
    return found


PANEL, HEIGHT = 440, 340
LEFT, RIGHT, TOP, BOTTOM = 66, 24, 62, 58
COLOURS = ("#1f5fa8", "#b3480f", "#2b7a3d")


def picture(curve: Curve, found: Measured) -> str:
    """Seconds and memory side by side, on logarithmic axes, with a legend below."""
    seconds = {line: {n: each.seconds for n, each in at.items()} for line, at in found.items()}
    memory = {line: {n: each.mebibytes for n, each in at.items()} for line, at in found.items()}
    below = HEIGHT + 18 * (len(found) + 1) + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * PANEL} {below}" '
        'font-family="sans-serif" font-size="13" fill="#222">'
    )
    return "\n".join(
        [
            head,
            f"<title>{html.escape(curve.title)}</title>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            text(LEFT, 22, curve.title, 'font-size="16" font-weight="bold"'),
            *panel(0, "seconds", curve.axis, seconds),
            *proportional(0, seconds),
            *panel(PANEL, "largest process, MiB", curve.axis, memory),
            *legend(found),
            "</svg>\n",
        ]
    )


def panel(x: int, title: str, axis: str, lines: Lines) -> Iterator[str]:
    across, up = scales(x, lines)
    yield text(x + LEFT, TOP - 14, title)
    for level in levels(lines):
        y = up.at(level)
        yield line(x + LEFT, y, x + PANEL - RIGHT, y, "#ddd")
        yield text(x + LEFT - 6, y + 4, f"{level:,.9g}", 'text-anchor="end"')
    for size in sizes(lines):
        yield line(across.at(size), up.start, across.at(size), up.start + 5, "#222")
        yield text(across.at(size), up.start + 20, f"{size:,}", 'text-anchor="middle"')
    yield text((across.start + across.end) / 2, up.start + 42, axis, 'text-anchor="middle"')
    for at, colour in zip(lines.values(), itertools.cycle(COLOURS), strict=False):
        points = [(across.at(size), up.at(each)) for size, each in at.items()]
        joined = " ".join(f"{left},{top}" for left, top in points)
        yield f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for left, top in points:
            yield f'<circle cx="{left}" cy="{top}" r="3.5" fill="{colour}"/>'


def proportional(x: int, lines: Lines) -> Iterator[str]:
    """What each line would be if it grew as much as the size, up to the end of the drawing."""
    across, up = scales(x, lines)
    for at, colour in zip(lines.values(), itertools.cycle(COLOURS), strict=False):
        first, value = next(iter(at.items()))
        end = min(max(at), first * up.greatest / value)
        yield line(
            across.at(first),
            up.at(value),
            across.at(end),
            up.at(value * end / first),
            colour,
            'stroke-dasharray="3 4"',
        )


def scales(x: int, lines: Lines) -> tuple[Scale, Scale]:
    least, *_, greatest = sizes(lines)
    bottom, *_, top = levels(lines)
    return (
        Scale(least, greatest, x + LEFT + 16, x + PANEL - RIGHT - 16),
        Scale(bottom, top, HEIGHT - BOTTOM, TOP),
    )


def sizes(lines: Lines) -> list[int]:
    return sorted({size for at in lines.values() for size in at})


def levels(lines: Lines) -> list[float]:
    """Round numbers around the values, and another one if there is only one."""
    found = marks([value for at in lines.values() for value in at.values()])
    return found if len(found) > 1 else [*found, 2 * found[0]]


def marks(values: Sequence[float]) -> list[float]:
    """Round numbers around the values: decades, and between them where these are few."""
    least, greatest = min(values), max(values)
    steps = (1,) if greatest / least > WIDE else (1, 2, 5)
    # One decade more than there has to be at either end: log10() rounds.
    decades = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(greatest)) + 2)
    found = [step * 10.0**decade for decade in decades for step in steps]
    first = max(place for place, mark in enumerate(found) if mark <= least)
    last = min(place for place, mark in enumerate(found) if mark >= greatest)
    return found[first : last + 1]


def legend(names: Iterable[str]) -> Iterator[str]:
    y = HEIGHT + 14
    for name, colour in zip(names, itertools.cycle(COLOURS), strict=False):
        yield line(LEFT, y - 4, LEFT + 26, y - 4, colour, 'stroke-width="2"')
        yield text(LEFT + 34, y, name)
        y += 18
    yield line(LEFT, y - 4, LEFT + 26, y - 4, "#222", 'stroke-dasharray="3 4"')
    yield text(LEFT + 34, y, "in proportion to the size")


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{html.escape(words)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, colour: str, style: str = "") -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{colour}" {style}/>'


def rows(curve: Curve, found: Measured) -> Iterator[str]:
    for name, at in found.items():
        *_, before, last = at
        yield (
            "| "
            + " | ".join(
                (
                    f"{curve.title}: {name}",
                    f"{curve.axis}: {listed(at)}",
                    listed(each.seconds for each in at.values()),
                    listed(each.mebibytes for each in at.values()),
                    f"{figure(at[last].seconds / at[before].seconds)} times the seconds for {figure(last / before)} times the size",
                )
            )
            + " |"
        )


def listed(values: Iterable[float]) -> str:
    return " · ".join(f"{each:,}" if isinstance(each, int) else figure(each) for each in values)


HEADER = """\
| what | sizes | seconds | largest process, MiB | growth from the last but one to the last size |
|---|---|---|---|---|
"""


def main(names: Sequence[str]) -> None:
    found = {}
    before = os.getloadavg()[0]
    for name in names:
        print(name)
        curve = CURVES[name]
        found[name] = measured(curve)
        (DOCS / f"images/curves-{name}.svg").write_text(picture(curve, found[name]))
    table = "".join(f"{row}\n" for name in names for row in rows(CURVES[name], found[name]))
    day, after = time.strftime("%Y-%m-%d"), os.getloadavg()[0]
    head = f"`benchmarks/curves.py` on {day}, {len(os.sched_getaffinity(0))} cores, load {before:.0f} to {after:.0f}:\n\n"
    if len(names) == len(CURVES):
        TABLE.write_text(head + HEADER + table)
    print(f"\n{head}{HEADER}{table}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=CURVES, help="may be repeated")
    main(parser.parse_args().only or list(CURVES))
