"""The shard: one Ray actor a node, the only owner of that node's arena and NVMe directory.

Engines call it through the node's unix socket. Other shards, the supervisor and commands call its
actor. All state belongs to its event loop; only `actor.py` imports Ray.
"""
