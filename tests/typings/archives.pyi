# For mypy: programs of ranks import archives.py from their own directory, hvdenv as its own module.
from hvdenv.standalone.steps.archives import *  # noqa: F403
