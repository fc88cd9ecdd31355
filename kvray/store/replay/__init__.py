"""Replays requests through the policies of a tier, in virtual time and without bytes."""

from kvray.store.replay.replay import Replay, Tier
from kvray.store.replay.trace import Trace

__all__ = ["Replay", "Tier", "Trace"]
