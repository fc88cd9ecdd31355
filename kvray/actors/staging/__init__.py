"""Staging, a part of the shard: has blocks in its arena before an engine is promised them.

Runs on the shard's event loop. The shard calls it for its engines; it calls the node's mover, the
lookup and other shards. Imports no Ray.
"""
