"""The mover: one Ray actor a node, in a process of its own because a NIXL peer can end it.

It reads and writes the node's arena, which the shard owns. The shard's staging asks it to fetch;
movers of other nodes ask it to send. Only `actor.py` imports Ray.
"""
