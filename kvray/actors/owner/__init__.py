"""The owner of a node's directory: its files, lock and leftovers, and the right to end a tier."""
