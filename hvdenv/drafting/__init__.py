"""Drafting a recipe: from the commands of a page, from a machine, from answers."""
