"""Slots of an arena: reserve -> write -> commit, or abort; evict; and what a death leaves.

Every function changes the tables only, and all of them at once or nothing: the caller holds the
arena's lock and has marked the section. Payloads are written between `reserve` and `commit`,
outside the lock.
"""

from dataclasses import dataclass

import numpy as np

from kvray.store import key_index
from kvray.store.eviction import choose_victims
from kvray.store.layout import FREE, LIMBO, QUARANTINED, READY, RESERVED
from kvray.store.tables import Array, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Slots that one writer may fill."""

    rows: Array
    """Index, in the keys that were asked for, of each reserved slot; ascending."""
    slots: Array
    """The slots, one a row."""
    existing: int
    """Keys that needed no slot because the arena has them, or has them under way."""
    dropped: int
    """Keys that got none: no room, or their parent is not here."""


def reserve(
    tables: Tables,
    keys: Array,
    *,
    parent: Array | None,
    depth: int,
    part: int,
    block_bytes: int,
    holder: int,
) -> Reservation:
    """Reserve a slot for each key of a chain that the arena does not have.

    Args:
        tables: the arena's tables.
        keys: keys in prefix order, u64 of shape [num_keys, 4].
        parent: key before the first one, shape [1, 4]; None if the chain starts here.
        depth: place of the first key in its chain.
        part: index of the part that is to be written.
        block_bytes: bytes of the part.
        holder: index of the writer.

    Returns:
        The slots. Reserved keys are always a prefix of the missing ones: a block whose parent is
        not here could never be matched.
    """
    tick = tables.next_tick()
    before = -1 if parent is None else int(key_index.find(tables, parent, part)[0])
    if parent is not None and before < 0:
        tables.header["dropped"] += len(keys)
        empty = np.empty(0, dtype=np.int64)
        return Reservation(rows=empty, slots=empty, existing=0, dropped=len(keys))
    chain = key_index.find(tables, keys, part)
    here = chain >= 0
    protect = chain[here] if before < 0 else np.append(chain[here], before)
    tables.slot_tick[protect] = tick
    wanted = np.flatnonzero(~here)
    slots = _allocate(tables, len(wanted), block_bytes, protect)
    rows = wanted[: len(slots)]
    if len(slots):
        chain[rows] = slots
        _fill(tables, keys, chain, rows, before=before, depth=depth, part=part, holder=holder)
        rows, slots = _enter(tables, chain, rows, slots)
    dropped = len(wanted) - len(rows)
    tables.header["dropped"] += dropped
    return Reservation(
        rows=rows, slots=slots, existing=int(np.count_nonzero(here)), dropped=dropped
    )


def _fill(
    tables: Tables,
    keys: Array,
    chain: Array,
    rows: Array,
    *,
    before: int,
    depth: int,
    part: int,
    holder: int,
) -> None:
    """Write the rows of freshly allocated slots; the state comes last."""
    slots = chain[rows]
    parents = np.concatenate(([before], chain[:-1]))
    tables.slot_key[slots] = keys[rows]
    tables.slot_part[slots] = part
    tables.slot_depth[slots] = depth + rows
    tables.slot_parent[slots] = -1
    tables.slot_children[slots] = 0
    tables.slot_leases[slots] = 0
    tables.slot_holder[slots] = holder + 1
    tables.slot_tick[slots] = tables.header["tick"]
    # A block that was here before its parent (which a dead writer left behind) finds it again.
    linked = np.flatnonzero((tables.slot_parent[chain] < 0) & (parents >= 0) & (chain >= 0))
    tables.slot_parent[chain[linked]] = parents[linked]
    np.add.at(tables.slot_children, parents[linked], 1)
    tables.slot_state[slots] = RESERVED


def _enter(tables: Tables, chain: Array, rows: Array, slots: Array) -> tuple[Array, Array]:
    """Enter `slots` into the index; cut the chain before the first that does not fit."""
    full = key_index.insert(tables, slots)
    if not full.any():
        return rows, slots
    cut = int(full.argmax())
    free(tables, slots[cut:])
    return rows[:cut], slots[:cut]


def commit(tables: Tables, slots: Array, checksums: Array, *, holder: int) -> int:
    """Make reserved slots READY; return how many were still this holder's to commit."""
    mine = tables.slot_state[slots] == RESERVED
    mine &= tables.slot_holder[slots] == holder + 1
    slots = slots[mine]
    tables.slot_checksum[slots] = checksums[mine]
    tables.slot_holder[slots] = 0
    tables.slot_state[slots] = READY
    tables.changed(slots)
    tables.header["stored"] += len(slots)
    return len(slots)


def abort(tables: Tables, slots: Array, *, holder: int) -> None:
    """Give back reserved slots that will not be written."""
    mine = tables.slot_state[slots] == RESERVED
    mine &= tables.slot_holder[slots] == holder + 1
    free(tables, slots[mine])


def evict(tables: Tables, count: int, *, within: Array, protect: Array) -> int:
    """Evict up to `count` blocks of `within`; return how many went."""
    victims = choose_victims(tables, count, within=within, protect=protect)
    free(tables, victims)
    tables.header["evicted"] += len(victims)
    return len(victims)


def free(tables: Tables, slots: Array) -> None:
    """Make `slots` FREE, whatever they were, and unlink them from parents and children."""
    if not len(slots):
        return
    _unlink(tables, slots)
    tables.slot_state[slots] = FREE
    _give_back_slabs(tables, slots)


def quarantine(tables: Tables, slots: Array) -> None:
    """Take READY slots whose bytes are wrong out of service; they hold no block any more."""
    bad = slots[tables.slot_state[slots] == READY]
    if not len(bad):
        return
    _unlink(tables, bad)
    tables.slot_state[bad] = QUARANTINED
    tables.header["corrupt"] += len(bad)


def strand(tables: Tables, holder: int, *, now: float) -> int:
    """Send to LIMBO what a dead holder had reserved: a late copy may still land there."""
    slots = np.flatnonzero((tables.slot_state == RESERVED) & (tables.slot_holder == holder + 1))
    if len(slots):
        _unlink(tables, slots)
        tables.slot_since[slots] = now
        tables.slot_state[slots] = LIMBO
    return len(slots)


def reclaim(tables: Tables, *, before: float) -> int:
    """Free the slots that went to LIMBO before then, and unleased QUARANTINED ones."""
    limbo = (tables.slot_state == LIMBO) & (tables.slot_since <= before)
    bad = (tables.slot_state == QUARANTINED) & (tables.slot_leases == 0)
    slots = np.flatnonzero(limbo | bad)
    if len(slots):
        tables.slot_state[slots] = FREE
        _give_back_slabs(tables, slots)
    return len(slots)


def slots_of(tables: Tables, slabs: Array, block_bytes: int) -> Array:
    """Return the usable slots of `slabs`, which serve `block_bytes`, ascending."""
    geometry = tables.geometry
    usable = geometry.slab_bytes // geometry.stride(block_bytes)
    first = np.sort(slabs).astype(np.int64) * geometry.slots_per_slab
    return (first[:, None] + np.arange(usable)).ravel()


def _unlink(tables: Tables, slots: Array) -> None:
    """Take `slots` out of the index and out of their families."""
    ready = slots[tables.slot_state[slots] == READY]
    key_index.remove(tables, slots)
    parents = tables.slot_parent[slots]
    np.subtract.at(tables.slot_children, parents[parents >= 0], 1)
    if tables.slot_children[slots].any():
        # Only a writer that fails, or a block that proved corrupt, goes before its children.
        orphans = np.isin(tables.slot_parent, slots[tables.slot_children[slots] > 0])
        tables.slot_parent[orphans] = -1
    tables.slot_children[slots] = 0
    tables.slot_parent[slots] = -1
    tables.slot_holder[slots] = 0
    if len(ready):
        tables.changed(ready)


def _allocate(tables: Tables, count: int, block_bytes: int, protect: Array) -> Array:
    """Return up to `count` FREE slots for `block_bytes`, evicting where too few are free."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    pool, found = _free_slots(tables, block_bytes)
    usable = tables.geometry.slab_bytes // tables.geometry.stride(block_bytes)
    if len(found) < count:
        spare = np.flatnonzero(tables.slab_block_bytes == 0)
        tables.slab_block_bytes[spare[: -(-(count - len(found)) // usable)]] = block_bytes
        pool, found = _free_slots(tables, block_bytes)
    if len(found) < count and len(pool):
        evict(tables, count - len(found), within=pool, protect=protect)
        # Evicting may have emptied a slab, which has then gone back to all block sizes.
        tables.slab_block_bytes[_slabs_of(tables, pool)] = block_bytes
        pool, found = _free_slots(tables, block_bytes)
    if not len(found) and _take_slab(tables, block_bytes, protect):
        pool, found = _free_slots(tables, block_bytes)
    return _longest_runs_first(found, count)


def _free_slots(tables: Tables, block_bytes: int) -> tuple[Array, Array]:
    """Return all slots that serve `block_bytes`, and the FREE ones of them."""
    pool = slots_of(tables, np.flatnonzero(tables.slab_block_bytes == block_bytes), block_bytes)
    return pool, pool[tables.slot_state[pool] == FREE]


def _take_slab(tables: Tables, block_bytes: int, protect: Array) -> bool:
    """Empty a slab of another block size by evicting from all of that size, oldest first."""
    sizes = np.unique(tables.slab_block_bytes[tables.slab_block_bytes != block_bytes])
    for size in sizes[sizes > 0]:
        while True:
            pool = slots_of(tables, np.flatnonzero(tables.slab_block_bytes == size), int(size))
            spare = np.flatnonzero(tables.slab_block_bytes == 0)
            if len(spare):
                tables.slab_block_bytes[spare[0]] = block_bytes
                return True
            step = max(1, len(pool) // 8)
            if not evict(tables, step, within=pool, protect=protect):
                break
    return False


def _longest_runs_first(slots: Array, count: int) -> Array:
    """Return `count` of the ascending `slots` in as few contiguous runs as possible."""
    if len(slots) <= count:
        return slots
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    lengths = np.diff(starts, append=len(slots))
    enough = np.flatnonzero(lengths >= count)
    if len(enough):
        start = starts[enough[lengths[enough].argmin()]]
        return slots[start : start + count]
    order = np.argsort(-lengths, kind="stable")
    picked = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in order[:count]])
    return slots[picked[:count]]


def _slabs_of(tables: Tables, slots: Array) -> Array:
    return np.unique(slots // tables.geometry.slots_per_slab)


def _give_back_slabs(tables: Tables, slots: Array) -> None:
    """Return slabs that have become empty to all block sizes."""
    for slab in _slabs_of(tables, slots):
        start = slab * tables.geometry.slots_per_slab
        if not tables.slot_state[start : start + tables.geometry.slots_per_slab].any():
            tables.slab_block_bytes[slab] = 0
