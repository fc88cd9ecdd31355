"""The blocks and slabs that go next: chosen ahead by the arena's owner, taken by who needs room.

So a writer in a full arena pays for what it takes, not for what the arena has. Each block size has
a queue, in the order in which its blocks go, and there is one of slabs for a size that needs more.
All of it is advice: whoever takes a victim checks it again under the lock. So nothing here is
undone, audited or rebuilt, and a wrong row costs at most a block that goes too early.
"""

import numpy as np

from kvray.store.arena import slabs
from kvray.store.arena.eviction import keep_evictable
from kvray.store.arena.layout import NO_SLOTS, QUEUES
from kvray.store.arena.tables import Array, Tables

_HINT = 2
"""Rows of a queue to look at for each block that must go: some are in use now."""

_LOOK_MIN = 16
_LOOKS = 4
"""Looks into a queue by one who needs room; what has been used since makes them fruitless."""

_SLABS_LOOKED_AT = 64
"""Rows of the queue of slabs that one writer looks at."""


def put(tables: Tables, block_bytes: int, chosen: Array, *, tick: int) -> None:
    """Have `chosen` go next of the blocks of a size, in that order; the lock is held.

    They were chosen when the arena's logical time was `tick`: one used since stays.
    """
    row, size = _row_for(tables, block_bytes), tables.geometry.queue_rows // QUEUES
    chosen = chosen[:size]
    tables.queue_slot[row * size : row * size + len(chosen)] = chosen
    tables.queue_bytes[row], tables.queue_tick[row] = block_bytes, tick
    tables.queue_next[row], tables.queue_end[row] = 0, len(chosen)


def put_slabs(tables: Tables, chosen: Array) -> None:
    """Have the slabs `chosen` be cleared next, in that order; the lock is held."""
    tables.queue_slab[: len(chosen)] = chosen
    tables.queue_slab_next[0], tables.queue_slab_end[0] = 0, len(chosen)


def most(tables: Tables, block_bytes: int) -> int:
    """Return how many blocks of a size to choose ahead: an eighth of them, if the queue is as long.

    More would go in an order that is no longer right.
    """
    size = tables.geometry.queue_rows // QUEUES
    return min(size, slabs.num_possible(tables, block_bytes) // 8)


def num_left(tables: Tables, block_bytes: int) -> int:
    """Return how many blocks of a size are in its queue; needs no lock."""
    row = _row_of(tables, block_bytes)
    return 0 if row is None else int(tables.queue_end[row]) - int(tables.queue_next[row])


def num_slabs_left(tables: Tables) -> int:
    """Return how many slabs are in their queue; needs no lock."""
    return max(0, int(tables.queue_slab_end[0]) - int(tables.queue_slab_next[0]))


def take(tables: Tables, block_bytes: int, count: int, *, protect: Array = NO_SLOTS) -> Array:
    """Take up to `count` blocks from a size's queue that can go without any other, in order.

    Fewer: the queue is empty, or too much of its start is in use. The lock is held.
    """
    row, size = _row_of(tables, block_bytes), tables.geometry.queue_rows // QUEUES
    if row is None or count <= 0:
        return NO_SLOTS
    start, end = int(tables.queue_next[row]), min(int(tables.queue_end[row]), size)
    taken, at = NO_SLOTS, start
    for _ in range(_LOOKS):
        if len(taken) >= count or at >= end:
            break
        # What comes after its children in the queue can go only with them.
        at = min(end, at + max(_LOOK_MIN, _HINT * (count - len(taken))))
        offered = tables.queue_slot[row * size + start : row * size + at].astype(np.int64)
        fit = offered[_is_as_chosen(tables, row, offered)]
        if len(set(fit.tolist())) < len(fit):
            fit = NO_SLOTS  # no owner wrote that
        taken = keep_evictable(tables, fit, protect=protect, rank=_in_order)
    if len(taken) >= count:
        taken = taken[:count]
        at = start + int(np.flatnonzero(offered == taken[-1])[0]) + 1
    tables.queue_next[row] = at
    return taken


def head(tables: Tables, block_bytes: int) -> Array | None:
    """Return the slot that goes next of a size, in an array of one; needs no lock. None: none."""
    row, size = _row_of(tables, block_bytes), tables.geometry.queue_rows // QUEUES
    if row is None or not num_left(tables, block_bytes):
        return None
    at = row * size + int(tables.queue_next[row])
    found = tables.queue_slot[at : at + 1].astype(np.int64)
    return found if len(found) and found[0] < tables.num_backed else None


def next_slabs(tables: Tables, block_bytes: int) -> Array:
    """Return slabs of other sizes that are to be cleared next, in order; needs no lock."""
    start = int(tables.queue_slab_next[0])
    end = min(int(tables.queue_slab_end[0]), start + _SLABS_LOOKED_AT)
    found = tables.queue_slab[start:end].astype(np.int64)
    found = found[found < tables.geometry.num_slabs]
    sizes = tables.slab_block_bytes[found]
    others: Array = found[(sizes != block_bytes) & (sizes != 0)]
    return others


def pass_slabs(tables: Tables, *, at_least: int = 0) -> None:
    """Take `at_least` so many slabs from their queue, and those then that are spare; locked."""
    tables.queue_slab_next[0] += min(at_least, num_slabs_left(tables))
    start, end = int(tables.queue_slab_next[0]), int(tables.queue_slab_end[0])
    ahead = tables.queue_slab[start : min(end, start + _SLABS_LOOKED_AT)]
    ahead = ahead[ahead < tables.geometry.num_slabs]
    is_there = tables.slab_block_bytes[ahead] != 0
    tables.queue_slab_next[0] = start + (int(is_there.argmax()) if is_there.any() else len(ahead))


def _in_order(slots: Array) -> Array:
    return np.arange(len(slots))


def _is_as_chosen(tables: Tables, row: int, offered: Array) -> Array:
    """Return a mask of the slots that have a block of the queue's size, not used since."""
    is_slot = offered < tables.num_backed
    slots = np.where(is_slot, offered, 0)
    sizes = tables.slab_block_bytes.take(tables.geometry.slab_of(slots))
    fits: Array = is_slot & (sizes == tables.queue_bytes[row])
    fits &= tables.slot_tick.take(slots) <= tables.queue_tick[row]
    return fits


def _row_of(tables: Tables, block_bytes: int) -> int | None:
    rows = np.flatnonzero(tables.queue_bytes == block_bytes)
    return int(rows[0]) if len(rows) else None


def _row_for(tables: Tables, block_bytes: int) -> int:
    """Return the queue of a size; of one that has none, the queue with the least left in it."""
    row = _row_of(tables, block_bytes)
    if row is not None:
        return row
    left = tables.queue_end.astype(np.int64) - tables.queue_next
    return int(np.where(tables.queue_bytes == 0, -1, left).argmin())
