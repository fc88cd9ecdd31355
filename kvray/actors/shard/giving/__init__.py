"""Sends blocks of a drained node to others; finds extra copies. Part of the shard's loop."""

from kvray.actors.shard.giving.copies import Copies
from kvray.actors.shard.giving.drain import Drain
from kvray.actors.shard.giving.giver import Giver

__all__ = ["Copies", "Drain", "Giver"]
