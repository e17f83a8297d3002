"""Locks, and comparing and exporting what an environment contains."""
