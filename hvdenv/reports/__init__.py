"""What verify found, as data, and in the forms that people and programs read."""
