"""What a cluster has: modules, workspaces, batch systems."""
