"""Which blocks of an arena pins keep: of each pin from its front what its share has room for; pure.

A block of two pins counts for the older one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvray.actors.shard.pinning.pin import Pin
from kvray.store.arena import key_index
from kvray.store.arena.layout import NO_SLOTS, READY
from kvray.store.arena.tables import Array, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an arena has of one pin."""

    pin: Pin
    slots: Array
    """Of the blocks that it keeps, in prefix order."""
    num_blocks: int
    """Those of which it keeps a part."""


def kept_by(
    tables: Tables, pins: Sequence[Pin], *, bytes_max: int, owner_bytes_max: int
) -> list[Kept]:
    """Return what each of `pins` keeps of what is in the arena, the first ones first.

    Needs no lock: what is not there any more when it is leased is found the next time.
    """
    taken = np.zeros(tables.geometry.num_slots, dtype=bool)
    left, left_of = bytes_max, dict.fromkeys((pin.owner for pin in pins), owner_bytes_max)
    found = []
    for pin in pins:
        blocks, slots = _here(tables, pin)
        costs = np.cumsum(np.where(taken[slots], 0, tables.block_bytes(slots)))
        count = int(np.searchsorted(costs, min(left, left_of[pin.owner]), side="right"))
        used = int(costs[count - 1]) if count else 0
        left, left_of[pin.owner] = left - used, left_of[pin.owner] - used
        taken[slots[:count]] = True
        num_blocks = len(np.unique(blocks[:count]))
        found.append(Kept(pin=pin, slots=slots[:count], num_blocks=num_blocks))
    return found


def slots_of(kept: Sequence[Kept]) -> Array:
    """Return all slots that are kept, each once."""
    return np.unique(np.concatenate([NO_SLOTS, *(one.slots for one in kept)]))


def _here(tables: Tables, pin: Pin) -> tuple[Array, Array]:
    """Return place and slot of each part that is here of a pin's blocks, in prefix order."""
    keys = np.frombuffer(pin.keys, dtype="<u8").reshape(-1, 4)
    found = [key_index.find(tables, keys, part) for part in range(pin.num_parts)]
    slots = np.stack(found, axis=1).ravel() if found else NO_SLOTS
    is_here = (slots >= 0) & (tables.slot_state.take(slots, mode="clip") == READY)
    rows = np.flatnonzero(is_here)
    return rows // max(1, pin.num_parts), slots[rows]
