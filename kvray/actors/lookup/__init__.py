"""The lookup: one Ray actor a cluster, which knows which shards hold which blocks.

Shards announce what they store and ask where blocks are. It owns nothing that they could not tell
it again. Only `actor.py` imports Ray.
"""
