"""What the operating system gives a store: mounts, memory limits, permissions and locks."""
