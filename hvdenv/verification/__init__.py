"""Judging an environment or a training program: ranks report facts, then checks judge these."""
