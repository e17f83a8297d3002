"""How ranks are started: hosts, launchers, allocations."""
