"""The supervisor: one Ray actor a cluster, which keeps a shard and a mover on every chosen node.

It starts parts on nodes that join, and ends parts that no longer answer. Commands ask it for the
state of the tier.
"""
