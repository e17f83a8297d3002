"""``python -m hvdenv``, and what the program ``hvdenv`` starts."""

import os
import signal
import sys
from types import FrameType


def _end(_number: int = 0, _frame: FrameType | None = None) -> None:
    """End before anything was started, or after everything has ended."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)


for _each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_each) is not signal.SIG_IGN:
        signal.signal(_each, _end)

from hvdenv.cli.main import main  # noqa: E402

try:
    sys.exit(main())
except KeyboardInterrupt:  # a second one
    _end()
