"""Moves what only this node has to other nodes, because it is to go; part of the shard's loop."""

from kvray.actors.shard.drain.drain import Drain

__all__ = ["Drain"]
