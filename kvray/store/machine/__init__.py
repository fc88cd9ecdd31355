"""The operating system's side of a store: mounts, memory limits, permissions and locks."""
