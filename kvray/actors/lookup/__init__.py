"""The lookup: one Ray actor a cluster, which knows which shards hold which blocks.

It asks shards what they store, and they ask it where blocks are. It owns nothing that they could
not tell it again. Only `actor.py` imports Ray.
"""
