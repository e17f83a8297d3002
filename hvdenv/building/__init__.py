"""Running plans."""
