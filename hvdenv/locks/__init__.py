"""Locks: what an environment is made of, so that it can be had again."""
