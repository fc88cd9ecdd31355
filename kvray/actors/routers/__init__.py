"""A router's side of the tier: asks shards about prompts, and hands them notes on its choices.

Runs in the process that chooses, on its event loop; `kvray.serve` is one that does.
"""
