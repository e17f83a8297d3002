"""What commands print: results on standard output, notes on standard error."""

from __future__ import annotations

import json
import sys
from typing import Any


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def report(text: str) -> None:
    """Print a line to standard error without delay."""
    print(text, file=sys.stderr, flush=True)
