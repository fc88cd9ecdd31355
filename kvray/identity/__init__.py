"""What names a block: its key, its namespace, the checkpoint and the tenant behind them.

Engines, shards and commands use it. Pure, but for the fingerprint, which reads a checkpoint.
"""
