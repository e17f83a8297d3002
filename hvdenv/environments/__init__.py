"""Environments on disk: prefixes, generations, who uses them, what they take."""
