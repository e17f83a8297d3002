"""Wheels that were compiled before: kept, trusted, taken along."""
