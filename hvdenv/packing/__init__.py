"""Images of environments: one file that holds a generation, mounted where the generation is."""
