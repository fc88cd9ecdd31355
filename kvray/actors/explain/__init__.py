"""Explains why requests hit or missed: runs in a command's or client's process, asks the shards."""
