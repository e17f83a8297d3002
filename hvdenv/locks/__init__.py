"""Locks: what an environment is made of, so that it is reproducible."""
