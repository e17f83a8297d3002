"""A recipe and facts become steps: plain data that can be printed and compared."""
