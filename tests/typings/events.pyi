# For mypy: programs of ranks import events.py from their own directory, hvdenv as its own module.
from hvdenv.standalone.ranks.events import *  # noqa: F403
