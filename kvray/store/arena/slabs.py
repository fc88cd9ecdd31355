"""Slabs of an arena: each serves one block size for as long as it holds a block of it.

Each has a count of its FREE slots, so that a writer looks into a few slabs only, however large the
arena is. Pure, like `slots`: the caller holds the arena's lock.
"""

import numpy as np

from kvray.store.arena.eviction import classify, is_fit
from kvray.store.arena.layout import FREE, READY
from kvray.store.arena.tables import Array, Tables

_LOOKED_INTO = 4
"""Slabs, the emptiest, in which a writer looks for a run of FREE slots; more if it needs more."""

_FIRST = np.zeros(1, dtype=np.int64)
_BUSY = np.uint64(2**64 - 1)
"""Stands for the time of use of blocks that cannot go."""
_CLASS_SHIFT = np.uint64(48)
"""Times of use are below that: one a microsecond, for nine years."""


def usable(tables: Tables, block_bytes: int) -> int:
    """Return how many blocks of `block_bytes` a slab holds."""
    return tables.geometry.slab_bytes // tables.geometry.stride(block_bytes)


def block_sizes(tables: Tables) -> list[int]:
    """Return the block sizes that slabs serve now, ascending; needs no lock."""
    sizes = np.unique(tables.slab_block_bytes)
    found: list[int] = sizes[sizes > 0].tolist()
    return found


def num_possible(tables: Tables, block_bytes: int) -> int:
    """Return how many blocks of a size fit into its slabs and the spare ones."""
    num_slabs = np.count_nonzero(np.isin(tables.slab_block_bytes, (0, block_bytes)))
    return int(num_slabs) * usable(tables, block_bytes)


def slots_of(tables: Tables, block_bytes: int) -> Array:
    """Return the slots in slabs that serve `block_bytes`, ascending."""
    slabs = np.flatnonzero(tables.slab_block_bytes == block_bytes)
    starts = slabs[:, None] * tables.geometry.slots_per_slab
    slots: Array = (starts + np.arange(usable(tables, block_bytes))).ravel()
    return slots


def free_slots(tables: Tables, block_bytes: int, count: int) -> Array:
    """Return at least `count` FREE slots for `block_bytes`, ascending; fewer: there are no more.

    They are those of the emptiest slabs, where the runs are longest.
    """
    slabs = np.flatnonzero(tables.slab_block_bytes == block_bytes)
    num_free = tables.slab_free[slabs]
    order = np.argsort(-num_free, kind="stable")
    enough = int(np.searchsorted(np.cumsum(num_free[order]), count)) + 1
    slabs = np.sort(slabs[order[: max(enough, _LOOKED_INTO)]])
    free: Array = np.flatnonzero(_states(tables, slabs, block_bytes).ravel() == FREE)
    if len(slabs) > 1 or (len(slabs) and slabs[0]):
        at, column = np.divmod(free, usable(tables, block_bytes))
        free = slabs[at] * tables.geometry.slots_per_slab + column
    return free


def num_available(tables: Tables, block_bytes: int) -> int:
    """Return how many blocks of a size fit into its slabs and the spare ones without eviction."""
    free = tables.slab_free[tables.slab_block_bytes == block_bytes].sum()
    return int(free) + num_spare(tables) * usable(tables, block_bytes)


def num_spare(tables: Tables) -> int:
    """Return the number of slabs that serve no block size."""
    return int(np.count_nonzero(tables.slab_block_bytes == 0))


def shortfall(tables: Tables, block_bytes: int, free_target: float) -> int:
    """Return how many blocks must go so that a `free_target` share of its slabs' slots is free.

    Spare slabs count as its own: a slab that eviction empties becomes one.
    """
    num_slabs = int(np.count_nonzero(tables.slab_block_bytes == block_bytes))
    target = int(num_slabs * usable(tables, block_bytes) * free_target)
    return max(0, target - num_available(tables, block_bytes)) if target else 0


def take_spare(tables: Tables, count: int, block_bytes: int) -> None:
    """Give `block_bytes` the spare slabs that `count` blocks need beside its FREE slots."""
    spare = np.flatnonzero(tables.slab_block_bytes == 0)
    missing = count - (
        num_available(tables, block_bytes) - len(spare) * usable(tables, block_bytes)
    )
    if missing > 0:
        each = usable(tables, block_bytes)
        taken = spare[: -(-missing // each)]
        tables.put(taken, slab_block_bytes=block_bytes, slab_free=each)


def note_taken(tables: Tables, slots: Array) -> None:
    """Count `slots` as FREE no longer."""
    tables.add(slots // tables.geometry.slots_per_slab, slab_free=-1)


def give_back(tables: Tables, slots: Array) -> None:
    """Count `slots`, which have become FREE, and make those slabs spare that are empty now."""
    slabs = slots // tables.geometry.slots_per_slab
    tables.add(slabs, slab_free=1)
    slabs = np.unique(slabs)
    # A count may be damaged: a slab that has a block must never serve another size.
    _make_spare(tables, slabs[tables.slab_free[slabs] >= usable_in(tables, slabs)])


def recount(tables: Tables) -> None:
    """Count the FREE slots of every slab, and make the empty ones spare."""
    tables.slab_free[:] = count_free(tables, range(tables.geometry.num_slabs))
    _make_spare(tables, np.arange(tables.geometry.num_slabs))


def count_free(tables: Tables, slabs: range) -> Array:
    """Return the number of FREE slots of each of `slabs`; a spare one has none."""
    chosen = slice(slabs.start, slabs.stop)
    sizes = usable_in(tables, np.arange(slabs.start, slabs.stop))
    is_inside = np.arange(tables.geometry.slots_per_slab) < sizes[:, None]
    counts: Array = np.count_nonzero((_by_slab(tables)[chosen] == FREE) & is_inside, axis=1)
    return counts


def _make_spare(tables: Tables, slabs: Array) -> None:
    """Make those of `slabs` spare that serve a size and are empty."""
    slabs = slabs[tables.slab_block_bytes[slabs] > 0]
    empty = slabs[(_by_slab(tables)[slabs] == FREE).all(axis=1)]
    tables.put(empty, slab_block_bytes=0, slab_free=0)


def usable_in(tables: Tables, slabs: Array) -> Array:
    """Return how many slots each of `slabs` has."""
    sizes = tables.slab_block_bytes[slabs].tolist()
    each = {size: usable(tables, size) if size else 0 for size in set(sizes)}
    return np.array([each[size] for size in sizes], dtype=np.int64)


def choose_to_clear(tables: Tables, count: int, block_bytes: int, *, protect: Array) -> Array:
    """Return the blocks that go so that up to `count` slabs of other block sizes become spare.

    A slab can be cleared if nothing in it, and no block that hangs from one in it, is leased, being
    written or in `protect`. Of these slabs it chooses those whose blocks can go first. Needs no
    lock: `eviction.keep_evictable` has the last word.
    """
    busy = (tables.slot_state != FREE) & (tables.slot_state != READY) | (tables.slot_leases > 0)
    busy[protect] = True
    above = _parents(tables)
    used = np.append(np.where(busy, _BUSY, _order(tables, protect)), np.uint64(0))
    used[:-1][tables.slot_state == FREE] = 0
    for _ in range(_rounds(tables)):
        np.maximum.at(used, above, used)
        used[-1] = 0
        above = above[above]
    last_used = _by_slab(tables, used[:-1]).max(axis=1)
    other = (tables.slab_block_bytes != block_bytes) & (tables.slab_block_bytes != 0)
    slabs = np.flatnonzero(other & (last_used < _BUSY))
    chosen = slabs[np.argsort(last_used[slabs], kind="stable")[:count]]
    return np.flatnonzero(_with_descendants(tables, chosen) & (tables.slot_state == READY))


def longest_runs_first(slots: Array, count: int) -> Array:
    """Return `count` of the ascending `slots` in as few contiguous runs as possible."""
    if len(slots) <= count or slots[-1] - slots[0] == len(slots) - 1:
        return slots[:count]
    breaks = np.flatnonzero(slots[1:] != slots[:-1] + 1) + 1
    starts = np.concatenate((_FIRST, breaks))
    lengths = np.concatenate((breaks, [len(slots)])) - starts
    enough = np.flatnonzero(lengths >= count)
    if len(enough):
        start = starts[enough[lengths[enough].argmin()]]
        return slots[start : start + count]
    order = np.argsort(-lengths, kind="stable")
    order = order[: int(np.searchsorted(np.cumsum(lengths[order]), count)) + 1]
    picked = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in order])
    chosen: Array = slots[picked[:count]]
    return chosen


def _order(tables: Tables, protect: Array) -> Array:
    """Return a number for each slot, u8: of READY blocks the lowest goes first."""
    order: Array = tables.slot_tick.copy()
    fit = np.flatnonzero(is_fit(tables, np.arange(tables.geometry.num_slots)))
    classes = classify(tables, fit, order[fit].astype(np.float64), protect)
    if classes is not None:
        order[fit] += classes.astype("<u8") << _CLASS_SHIFT
    return order


def _with_descendants(tables: Tables, slabs: Array) -> Array:
    """Return a mask of the slots of `slabs` and of every block that hangs from one of them."""
    marked = np.zeros(tables.geometry.num_slots + 1, dtype=bool)
    _by_slab(tables, marked[:-1])[slabs] = True
    above = _parents(tables)
    for _ in range(_rounds(tables)):
        marked |= marked[above]
        above = above[above]
    return marked[:-1]


def _parents(tables: Tables) -> Array:
    """Return every slot's parent, and one more row that stands for none and is its own parent."""
    nowhere = tables.geometry.num_slots
    parents = tables.parents()
    has_one = (tables.slot_state != FREE) & (parents >= 0)
    return np.append(np.where(has_one, parents, nowhere), nowhere)


def _rounds(tables: Tables) -> int:
    """Return after how many doublings every block has seen its root.

    Counted, because without the lock parents may seem to form a circle.
    """
    return int(tables.slot_depth.max()).bit_length()


def _states(tables: Tables, slabs: Array, block_bytes: int) -> Array:
    states: Array = _by_slab(tables)[slabs, : usable(tables, block_bytes)]
    return states


def _by_slab(tables: Tables, column: "Array | None" = None) -> Array:
    """Return a column of the slot table (the states) as [num_slabs, slots_per_slab]."""
    column = tables.slot_state if column is None else column
    return column.reshape(tables.geometry.num_slabs, -1)
