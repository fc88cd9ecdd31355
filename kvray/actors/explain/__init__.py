"""Explains why requests hit or missed; runs in a command's process and asks the shards."""
