"""The contents of environments: as data, compared, and in formats of other programs."""
