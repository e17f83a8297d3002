"""Running plans; the cache of compiled wheels, and indexes of published ones."""
