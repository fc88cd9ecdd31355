"""Sends blocks of a drained node to others; finds extra copies. Part of the shard's loop."""

from kvray.actors.shard.sending.copies import Copies
from kvray.actors.shard.sending.drain import Drain
from kvray.actors.shard.sending.sender import Sender

__all__ = ["Copies", "Drain", "Sender"]
