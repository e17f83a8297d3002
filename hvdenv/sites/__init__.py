"""What a cluster has: modules, workspaces, batch systems, launchers, runtimes of images."""
