"""KV events: what routers hear of the blocks that an engine or a tier holds."""

from kvray.events.message import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, pack

__all__ = ["AllBlocksCleared", "Batch", "BlockRemoved", "BlockStored", "Event", "pack"]
