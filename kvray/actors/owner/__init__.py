"""The owner of a node's directory: its files, lock and leftovers, and the right to end a tier.

Used by the shard when it starts, and by commands that look at a node or sweep it.
"""
