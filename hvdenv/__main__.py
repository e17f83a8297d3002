"""``python -m hvdenv``."""

import sys

from hvdenv.cli.main import main

sys.exit(main())
