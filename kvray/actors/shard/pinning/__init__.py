"""Keeps pinned prompts in the arena; part of the shard's loop."""

from kvray.actors.shard.pinning.keeper import PinKeeper
from kvray.actors.shard.pinning.pin import Pin

__all__ = ["Pin", "PinKeeper"]
