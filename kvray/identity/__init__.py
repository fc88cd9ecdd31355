"""Everything that names a block: its key, its namespace, the checkpoint and the tenant.

Engines, shards and commands use it. Pure, except for the fingerprint, which reads a checkpoint.
"""
