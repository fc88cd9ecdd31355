"""Notes on requests for people: reasons, arrivals, spans; pure.

Engines write it, their shard keeps it, and `kvray explain` reads it.
"""
