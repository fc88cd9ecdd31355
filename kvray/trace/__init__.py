"""Notes on requests for people: prompt-prefix digests, reasons, arrivals; pure.

Engines write it, their shard keeps it, and `kvray explain` reads it.
"""
