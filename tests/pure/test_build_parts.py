"""Parts of a build that work without starting anything; builds themselves are in tests/real."""

from __future__ import annotations

import pytest

from hvdenv.plans.step import fingerprint
from hvdenv.session.progress import ObjectClock


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ("[1/78] Building CXX object a.cc.o", (1, 78)),
        ("  [78/78] Linking CXX shared module", (78, 78)),
        ("[ 12%] Building CXX object", (0, 0)),
        ("see [1/2] there", (0, 0)),
        ("[1/2]", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_objects_that_are_compiled(line: str, counted: tuple[int, int]) -> None:
    text = "compiled {} of {} objects".format(*counted) if counted != (0, 0) else ""
    assert ObjectClock().report(line) == text


ONE_PROGRAM = r'''
# A comment.
import sys
from typing import List

def run(words, limit=1 << 3, *more, **named):
    """A docstring."""
    size = len(words) if words else -1.5e3
    return [word[1:].strip("'") for word in words if word not in (None, b"x", ..., u"\xfc")], {
        **named, "size": "%d of %r" % (size, not limit), f"{size:>{limit}} {limit!r}": lambda x, *, y: x
    }

class Error(ValueError):
    def __init__(self, *words):
        super().__init__(*words)
        self.x, *self.y = words

if __name__ == "__main__":
    try:
        with open(sys.argv[1]) as a, open(sys.argv[2]) as b:
            print(run(a.read().split(), 2), end="")
    except (OSError, Error) as error:
        sys.exit(str(error))
'''


@pytest.mark.parametrize(
    ("text", "other", "same"),
    [
        ("# A comment.\n", "", True),
        ('    """A docstring."""\n', "", True),
        ("from typing import List\n", "from typing import Dict, List\n", True),
        ("(words, limit=1 << 3,", "(words: List[str], limit: int=1<<3,", True),
        ("**named):", "**named) -> object:", True),
        ('"%d of %r" % (size,', "'%d of %r' % (\n size,", True),
        ("limit=1 << 3", "limit=1 << 4", False),
        ("import sys", "import sys, os", False),
        ("(None,", "(True,", False),
        ("not in", "in", False),
        ("def run(", "def go(", False),
        ("-1.5e3", "-1.5e4", False),
        ("lambda x, *, y:", "lambda x, *, y=None:", False),
    ],
)
def test_a_program_is_known_by_what_it_does(text: str, other: str, same: bool) -> None:
    assert text in ONE_PROGRAM
    changed = ONE_PROGRAM.replace(text, other, 1)
    assert (fingerprint(changed) == fingerprint(ONE_PROGRAM)) is same


def test_every_python_has_the_same_fingerprint_of_a_program() -> None:
    """Computed with 3.10, 3.11, 3.12 and 3.13: an upgrade of Python rebuilds nothing."""
    assert (
        fingerprint(ONE_PROGRAM)
        == "81e1b9ce2a00df5e1320d7137ab92c28a67a83085cebc80a74c6fd6f3bd6c0b5"
    )
