"""Slabs of an arena: each serves one block size for as long as it holds a block of it.

Each has a count of its FREE slots, so that a writer looks into a few slabs only, however large the
arena is. Pure, like `slots`: the caller holds the arena's lock.
"""

import re
from collections import Counter

import numpy as np

from kvray.store.arena.eviction import by_priority, keep_evictable
from kvray.store.arena.layout import FREE, NO_SLOTS, READY, SIZE_FACTOR
from kvray.store.arena.tables import Array, Tables

_LOOKED_INTO = 4
"""Slabs, the emptiest, in which a writer looks for a run of FREE slots; more if it needs more."""

_FREE = re.escape(bytes([FREE]))
_FIRST = np.zeros(1, dtype=np.int64)
_CLASS_SHIFT = 48
"""Times of use are below that: one a microsecond, for nine years."""

_PIECE = 2**13
"""Rows of the slot table that one who needs room looks at, where nobody has chosen ahead."""

_FAMILIES = 2
"""Slabs whose blocks' descendants are looked for, which takes a look at all blocks each."""

_FAMILY_MAX = 2**14
"""Blocks that go at once for one slab: the lock is held meanwhile."""

_TURN = 7919
"""Slabs from one turn's first to the next one's: a prime, so that all get their turn."""


def usable(tables: Tables, block_bytes: int) -> int:
    """Return how many blocks of `block_bytes` a slab holds."""
    return tables.geometry.slab_bytes // tables.geometry.stride(block_bytes)


def has_rows(tables: Tables, block_bytes: int) -> bool:
    """Return whether the slots of a slab for `block_bytes` have rows with memory.

    If not, the arena's owner is asked for them; it has them soon, or warns.
    """
    rows = tables.geometry.rows_for(usable(tables, block_bytes))
    if rows > tables.num_backed:
        tables.counts.wanted_rows = max(rows, tables.counts.wanted_rows)
    return rows <= tables.num_backed


def block_sizes(tables: Tables) -> list[int]:
    """Return the block sizes that slabs serve now, ascending; needs no lock."""
    sizes = np.unique(tables.slab_block_bytes)
    found: list[int] = sizes[sizes > 0].tolist()
    return found


def serving(tables: Tables) -> Array:
    """Return the slabs that serve a block size, ascending; needs no lock."""
    # Compared first: numpy objects to what changes under a search.
    return np.flatnonzero(tables.slab_block_bytes != 0)


def serve(tables: Tables, slabs: Array, block_bytes: "int | Array") -> None:
    """Have `slabs` serve a block size; 0: make them spare."""
    tables.put(slabs, slab_block_bytes=block_bytes, slab_check=_check(block_bytes))


def _check(block_bytes: "int | Array") -> Array:
    checks: Array = np.asarray(block_bytes, np.uint64) * np.array([SIZE_FACTOR], np.uint64)
    return checks


def num_possible(tables: Tables, block_bytes: int) -> int:
    """Return how many blocks of a size fit into its slabs and the spare ones."""
    num_slabs = np.count_nonzero(np.isin(tables.slab_block_bytes, (0, block_bytes)))
    return int(num_slabs) * usable(tables, block_bytes)


def slots_of(tables: Tables, block_bytes: int) -> Array:
    """Return the slots in slabs that serve `block_bytes`, slab by slab."""
    own = np.flatnonzero(tables.slab_block_bytes == block_bytes)
    return _inside(tables, own, usable(tables, block_bytes))


def free_slots(tables: Tables, block_bytes: int, count: int) -> Array:
    """Return up to `count` FREE slots for `block_bytes`, in the order of their bytes.

    They are the smallest run in the emptiest slab that has them all, or else the longest runs of
    the emptiest slabs.
    """
    # A flipped bit makes no other slab's check this one: its slots lie across the blocks there.
    num_free: Array = tables.slab_free * (tables.slab_check == _check(block_bytes))
    emptiest = int(num_free.argmax())
    if num_free[emptiest] >= count > 0:
        # Bytes are searched by one call, where arrays take a dozen.
        each = usable(tables, block_bytes)
        states = _by_slab(tables)[emptiest].tobytes()[:each]
        if states.count(FREE) == each:  # a count in the tables may be damaged
            return tables.geometry.slots_from(emptiest, 0, count)
        runs = [run.span() for run in re.finditer(b"%b{%d,}" % (_FREE, count), states)]
        if runs:
            start = min(runs, key=lambda run: run[1] - run[0])[0]
            return tables.geometry.slots_from(emptiest, start, count)
    slabs: Array = np.flatnonzero(num_free > 0)
    num_free = num_free[slabs]
    order = np.argsort(-num_free, kind="stable")
    enough = int(np.searchsorted(np.cumsum(num_free[order]), count)) + 1
    slabs = np.sort(slabs[order[: max(enough, _LOOKED_INTO)]])
    each = usable(tables, block_bytes)
    free = np.flatnonzero(states_in(tables, slabs, each).ravel() == FREE)
    at, position = np.divmod(longest_runs_first(free, count), each)
    return tables.geometry.slots_at(slabs[at], position)


def num_available(tables: Tables, block_bytes: int) -> int:
    """Return how many blocks of a size fit into its slabs and the spare ones without eviction."""
    free = tables.slab_free[tables.slab_block_bytes == block_bytes].sum()
    return int(free) + num_spare(tables) * usable(tables, block_bytes)


def num_spare(tables: Tables) -> int:
    """Return the number of slabs that serve no block size."""
    return int(np.count_nonzero(tables.slab_check == 0))


def free_bytes(tables: Tables) -> int:
    """Return the bytes of all slots and slabs without a block."""
    free = sum(
        int(tables.slab_free[tables.slab_block_bytes == size].sum()) * size
        for size in block_sizes(tables)
    )
    return free + num_spare(tables) * tables.geometry.slab_bytes


def shortfall(tables: Tables, block_bytes: int, free_target: float) -> int:
    """Return how many blocks must go so that a `free_target` share of its slabs' slots is free.

    Spare slabs count as its own: a slab that eviction empties becomes one.
    """
    num_slabs = int(np.count_nonzero(tables.slab_block_bytes == block_bytes))
    target = int(num_slabs * usable(tables, block_bytes) * free_target)
    return max(0, target - num_available(tables, block_bytes)) if target else 0


def take_spare(tables: Tables, count: int, block_bytes: int) -> None:
    """Give `block_bytes` the spare slabs that `count` blocks need beside its FREE slots."""
    spare = np.flatnonzero(tables.slab_check == 0)
    missing = count - (
        num_available(tables, block_bytes) - len(spare) * usable(tables, block_bytes)
    )
    if missing > 0:
        each = usable(tables, block_bytes)
        taken = spare[: -(-missing // each)]
        serve(tables, taken, block_bytes)
        tables.put(taken, slab_free=each)


def note_taken(tables: Tables, slots: Array) -> None:
    """Count `slots` as FREE no longer."""
    _count(tables, slots, -1)


def give_back(tables: Tables, slots: Array) -> None:
    """Count `slots`, which have become FREE, and make those slabs spare that are empty now."""
    slabs = _count(tables, slots, 1)
    empty = slabs[tables.slab_free[slabs] >= usable_in(tables, slabs)]
    # A count may be damaged: a slab that has a block must never serve another size.
    if len(empty):
        _make_spare(tables, empty)


def _count(tables: Tables, slots: Array, step: int) -> Array:
    """Add `step` to the counts of FREE slots for each of `slots`; return their slabs."""
    found = tables.geometry.slab_of(slots)
    if not np.count_nonzero(found != found[:1]):  # as mostly
        tables.add(found[:1], slab_free=step * len(slots))
        return found[:1]
    counts = Counter(found.tolist())
    slabs = np.array(list(counts), dtype=np.int64)
    tables.add(slabs, slab_free=step * np.array(list(counts.values()), dtype=np.int32))
    return slabs


def recount(tables: Tables) -> None:
    """Count the FREE slots of every slab, and make the empty ones spare."""
    tables.slab_free[:] = count_free(tables, range(tables.geometry.num_slabs))
    _make_spare(tables, np.arange(tables.geometry.num_slabs))


def count_free(tables: Tables, slabs: range) -> Array:
    """Return the number of FREE slots of each of `slabs`; a spare one has none."""
    chosen = np.arange(slabs.start, slabs.stop)
    sizes = usable_in(tables, chosen)
    states = states_in(tables, chosen)
    is_inside = np.arange(states.shape[1]) < sizes[:, None]
    counts: Array = np.count_nonzero((states == FREE) & is_inside, axis=1)
    return counts


def _make_spare(tables: Tables, slabs: Array) -> None:
    """Make those of `slabs` spare that serve a size and are empty."""
    slabs = slabs[tables.slab_block_bytes[slabs] > 0]
    empty = slabs[are_empty(tables, slabs)]
    serve(tables, empty, 0)
    tables.put(empty, slab_free=0)


def are_empty(tables: Tables, slabs: Array) -> Array:
    """Return a mask of those of `slabs` whose slots are all FREE."""
    empty: Array = (states_in(tables, slabs) == FREE).all(axis=1)
    return empty


def usable_in(tables: Tables, slabs: Array) -> Array:
    """Return how many slots each of `slabs` has."""
    sizes = tables.slab_block_bytes[slabs].tolist()
    each = {size: usable(tables, size) if size else 0 for size in set(sizes)}
    return np.array([each[size] for size in sizes], dtype=np.int64)


def choose_to_clear(tables: Tables, count: int, *, among: Array, protect: Array) -> Array:
    """Return the blocks that go so that up to `count` of the slabs `among` become spare.

    The first of `among` are preferred, and only a few are looked at. Best is a slab in which every
    block can go, alone or with those of slabs that are cleared too. Where prompts are longer than
    that, and grow, there may be none: then one slab is cleared together with all that comes after
    its blocks, wherever it is. Needs no lock: `eviction.keep_evictable` has the last word.
    """
    num_looked_at = count
    while True:
        chosen = among[:num_looked_at]
        while True:
            slots = _inside(tables, chosen, _backed_in_slab(tables))
            used: Array = slots[tables.slot_state.take(slots) != FREE]
            kept = keep_evictable(tables, used, protect=protect)
            is_whole = _num_in(tables, kept, chosen) == _num_in(tables, used, chosen)
            if is_whole.all() and len(chosen) <= count:
                break
            chosen = chosen[is_whole][:count]
        if len(chosen) == count or num_looked_at >= len(among):
            return kept if len(kept) else _clear_with_descendants(tables, among, protect)
        num_looked_at *= 4


def _clear_with_descendants(tables: Tables, among: Array, protect: Array) -> Array:
    """Return the blocks that go so that one of the first of `among` becomes spare, in order.

    A block was last used no later than those before it in its prompt. So what comes after the
    blocks of a slab that was not used for long was not used for longer.
    """
    for slab in among[:_FAMILIES]:
        slots = _inside(tables, np.array([slab]), _backed_in_slab(tables))
        used = slots[tables.slot_state.take(slots) != FREE]
        family = descendants(tables, used)
        kept = keep_evictable(tables, family, protect=protect)
        if np.isin(used, kept).all():
            return kept[:_FAMILY_MAX]  # the rest another time
    return NO_SLOTS


def descendants(tables: Tables, slots: Array) -> Array:
    """Return `slots` and the READY blocks that come after them in their prompts, ascending."""
    is_in = np.zeros(tables.num_backed + 1, dtype=bool)  # the last one stands for no slot
    is_in[slots] = True
    rows = np.flatnonzero(tables.slot_state[tables.backed] == READY)
    above = tables.parents(tables.backed)
    at = above[rows]
    # Each round looks twice as far up as the one before. They are counted, because without the lock
    # parents may be seen to go in a circle.
    for _ in range(tables.num_backed.bit_length()):
        rows, at = rows[at >= 0], at[at >= 0]
        if not len(rows):
            break
        is_in[rows] |= is_in[at]
        above[rows] = above[at]
        at = above[rows]
    return np.flatnonzero(is_in[:-1])


def use_order(tables: Tables, slots: Array) -> Array:
    """Return a number for each of `slots`, i8: the lower was used earlier, after priority."""
    ticks: Array = tables.slot_tick.take(slots).astype(np.int64)
    ticks += by_priority(tables, slots) << _CLASS_SHIFT
    return ticks


def coldest_first(tables: Tables, slabs: Array) -> Array:
    """Return those of `slabs` that have blocks, all free to go: first those used longest ago.

    Retention priority comes before use. Needs no lock. Each row, i8, has the slab, the `use_order`
    of its last use, and the depth of what was used then, less than 0.
    """
    per_slab, found = _backed_in_slab(tables), [np.empty((0, 3), dtype=np.int64)]
    step = max(1, _PIECE // per_slab)
    for start in range(0, len(slabs), step):
        piece = slabs[start : start + step]
        slots, shape = _inside(tables, piece, per_slab), (len(piece), per_slab)
        states = tables.slot_state.take(slots)
        ready = (states == READY).reshape(shape)
        is_busy = ((states != FREE) & (states != READY)) | (tables.slot_leases.take(slots) > 0)
        order = np.where(ready, use_order(tables, slots).reshape(shape), -1)
        last = order.max(axis=1)
        # A request uses its whole prefix at once: of slabs used together the deeper goes first.
        depths = tables.slot_depth.take(slots).reshape(shape)
        depths = np.where(order == last[:, None], depths, 2**31).min(axis=1)
        can_go = ready.any(axis=1) & ~is_busy.reshape(shape).any(axis=1)
        found.append(np.stack((piece, last, -depths.astype(np.int64)), axis=1)[can_go])
    chosen = np.concatenate(found)
    ordered: Array = chosen[np.lexsort((chosen[:, 2], chosen[:, 1]))]
    return ordered


def some_of(tables: Tables, block_bytes: int, *, turn: int) -> Array:
    """Return slots in some of a size's slabs, in others at each turn."""
    each = usable(tables, block_bytes)
    some = _some(tables.slab_block_bytes == block_bytes, _PIECE // each, turn)
    return _inside(tables, some, each)


def some_others(tables: Tables, block_bytes: int, *, turn: int) -> Array:
    """Return some slabs of other sizes, others at each turn."""
    sizes = tables.slab_block_bytes
    most = _PIECE // _backed_in_slab(tables)
    return _some((sizes != block_bytes) & (sizes != 0), most, turn)


def longest_runs_first(free: Array, count: int) -> Array:
    """Return `count` of the ascending numbers `free` in as few contiguous runs as possible."""
    if len(free) <= count or free[-1] - free[0] == len(free) - 1:
        return free[:count]
    breaks = np.flatnonzero(free[1:] != free[:-1] + 1) + 1
    starts = np.concatenate((_FIRST, breaks))
    lengths = np.concatenate((breaks, [len(free)])) - starts
    enough = np.flatnonzero(lengths >= count)
    if len(enough):
        start = starts[enough[lengths[enough].argmin()]]
        return free[start : start + count]
    order = np.argsort(-lengths, kind="stable")
    order = order[: int(np.searchsorted(np.cumsum(lengths[order]), count)) + 1]
    picked = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in order])
    chosen: Array = free[picked[:count]]
    return chosen


def _some(is_meant: Array, most: int, turn: int) -> Array:
    """Return at most so many, but four, of the slabs that the mask means, spread over all."""
    slabs, most = np.flatnonzero(is_meant), max(4, most)
    if len(slabs) <= most:
        return slabs
    first, step = turn * _TURN % len(slabs), len(slabs) // most
    some: Array = slabs[np.sort((first + step * np.arange(most)) % len(slabs))]
    return some


def _inside(tables: Tables, slabs: Array, each: int) -> Array:
    """Return the first `each` slots of each of `slabs`, slab by slab."""
    return tables.geometry.slots_at(slabs[:, None], np.arange(each)).ravel()


def _num_in(tables: Tables, slots: Array, slabs: Array) -> Array:
    """Return how many of `slots` are in each of `slabs`."""
    num_slabs = tables.geometry.num_slabs
    found: Array = np.bincount(tables.geometry.slab_of(slots), minlength=num_slabs)[slabs]
    return found


def states_in(tables: Tables, slabs: Array, each: int | None = None) -> Array:
    """Return the states of all slots of `slabs` that have memory, or of the first `each`."""
    states: Array = _by_slab(tables)[slabs].reshape(len(slabs), _backed_in_slab(tables))
    return states[:, :each]


def _by_slab(tables: Tables) -> Array:
    """Return the states as [num_slabs, runs, run_slots]."""
    return tables.geometry.by_slab(tables.slot_state[tables.backed])


def _backed_in_slab(tables: Tables) -> int:
    """Return how many slots of a slab have memory."""
    return tables.num_backed // tables.geometry.num_slabs
