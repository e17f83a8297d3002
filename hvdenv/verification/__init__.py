"""Judging an environment: facts are found out, then checks judge them."""
