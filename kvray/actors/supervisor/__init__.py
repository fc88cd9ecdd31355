"""The supervisor: one Ray actor a tier, which keeps a shard and a mover on every chosen node."""
