"""Slots of an arena: reserve -> write -> commit, or abort; evict; and what a death leaves.

Every function changes the tables only, and all of them at once or nothing: the caller holds the
arena's lock and has marked the section. Payloads are written between `reserve` and `commit`,
outside the lock.
"""

from dataclasses import dataclass

import numpy as np

from kvray.store import key_index, slabs
from kvray.store.eviction import choose_victims
from kvray.store.layout import FREE, LIMBO, QUARANTINED, READY, RESERVED
from kvray.store.tables import ONE, Array, Tables


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
    number: int = 0
    """Never given twice in an arena's life: slots are committed under the number they were
    reserved with, so that a late commit cannot hit what somebody else reserved since."""


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
        depth: place of the first key in its chain; a parent that is here knows better.
        part: index of the part that is to be written.
        block_bytes: bytes of the part.
        holder: index of the writer.

    Returns:
        The slots. Reserved keys are always a prefix of the missing ones: a block whose parent is
        not here could never be matched.
    """
    before = -1 if parent is None else int(key_index.find(tables, parent, part)[0])
    if parent is not None and before < 0:
        tables.header["dropped"] += len(keys)
        return _nothing(dropped=len(keys))
    if before >= 0:
        depth = int(tables.slot_depth[before]) + 1
    number = tables.next_tick()
    chain = key_index.find(tables, keys, part)
    here = chain >= 0
    protect = chain[here] if before < 0 else np.append(chain[here], before)
    tables.slot_tick[protect] = number
    wanted = np.flatnonzero(~here)
    taken = _allocate(tables, len(wanted), block_bytes, protect)
    rows = wanted[: len(taken)]
    chain[rows] = taken
    _fill(tables, keys, chain, rows, depth=depth, part=part, holder=holder)
    _link(tables, chain, before)
    tables.slot_state[taken] = RESERVED
    rows, taken = _enter(tables, rows, taken)
    dropped = len(wanted) - len(rows)
    tables.header["dropped"] += dropped
    return Reservation(
        rows=rows,
        slots=taken,
        existing=int(np.count_nonzero(here)),
        dropped=dropped,
        number=number,
    )


def _nothing(*, dropped: int) -> Reservation:
    empty = np.empty(0, dtype=np.int64)
    return Reservation(rows=empty, slots=empty, existing=0, dropped=dropped)


def _fill(
    tables: Tables, keys: Array, chain: Array, rows: Array, *, depth: int, part: int, holder: int
) -> None:
    """Write the rows of freshly allocated slots, all but the links and the state."""
    slots = chain[rows]
    tables.slot_key[slots] = keys[rows]
    tables.slot_part[slots] = part
    tables.slot_depth[slots] = depth + rows
    tables.slot_parent[slots] = -1
    tables.slot_children[slots] = 0
    tables.slot_leases[slots] = 0
    tables.slot_holder[slots] = holder + 1
    tables.slot_tick[slots] = tables.header["tick"]
    # The number of the reservation stands here until the checksum is known.
    tables.slot_checksum[slots] = tables.header["tick"]


def _link(tables: Tables, chain: Array, before: int) -> None:
    """Link each block of `chain` (-1: not here) that has no parent to the one before it.

    Besides the new ones these are blocks that outlived their parent, which is back now.
    """
    parents = np.append(before, chain[:-1])
    alone = (chain >= 0) & (parents >= 0) & (tables.slot_parent[chain] < 0)
    blocks, parents = chain[alone], parents[alone]
    # The depth must agree, so that no order of keys can make a block its own ancestor.
    below = tables.slot_depth[blocks] == tables.slot_depth[parents] + 1
    tables.slot_parent[blocks[below]] = parents[below]
    np.add.at(tables.slot_children, parents[below], ONE)


def _enter(tables: Tables, rows: Array, slots: Array) -> tuple[Array, Array]:
    """Enter `slots` into the index; cut the chain before the first that does not fit."""
    full = key_index.insert(tables, slots)
    if not full.any():
        return rows, slots
    cut = int(full.argmax())
    free(tables, slots[cut:])
    return rows[:cut], slots[:cut]


def commit(tables: Tables, reservation: Reservation, checksums: Array, *, holder: int) -> int:
    """Make reserved slots READY; return how many were still this reservation's to commit."""
    mine = _still_reserved(tables, reservation, holder)
    slots = reservation.slots[mine]
    tables.slot_checksum[slots] = checksums[mine]
    tables.slot_state[slots] = READY
    tables.slot_holder[slots] = 0
    tables.changed(slots)
    tables.header["stored"] += len(slots)
    return len(slots)


def abort(tables: Tables, reservation: Reservation, *, holder: int) -> None:
    """Give back reserved slots that will not be written."""
    free(tables, reservation.slots[_still_reserved(tables, reservation, holder)])


def abort_holder(tables: Tables, holder: int) -> None:
    """Give back all that `holder` had reserved and is not writing any more."""
    free(tables, _reserved_by(tables, holder))


def evict(tables: Tables, count: int, *, within: Array, protect: Array) -> int:
    """Evict up to `count` blocks of the mask `within`; return how many went."""
    victims = choose_victims(tables, count, within=within, protect=protect)
    free(tables, victims)
    tables.header["evicted"] += len(victims)
    return len(victims)


def free(tables: Tables, slots: Array) -> None:
    """Make `slots` FREE, whatever they were, and unlink them from parents and children.

    Children stand before their parents: whoever dies in here leaves no block without its parent.
    """
    if not len(slots):
        return
    ready = slots[tables.slot_state[slots] == READY]
    tables.slot_state[slots] = FREE
    unlink(tables, slots)
    tables.changed(ready)
    slabs.give_back(tables, slots)


def quarantine(tables: Tables, slots: Array) -> None:
    """Take READY slots whose bytes are wrong out of service; they hold no block any more."""
    bad = np.unique(slots[tables.slot_state[slots] == READY])
    tables.slot_state[bad] = QUARANTINED
    unlink(tables, bad)
    tables.changed(bad)
    tables.header["corrupt"] += len(bad)


def strand(tables: Tables, holder: int, *, now: float) -> int:
    """Send to LIMBO what a dead holder had reserved: a late copy may still land there."""
    slots = _reserved_by(tables, holder)
    tables.slot_since[slots] = now
    tables.slot_state[slots] = LIMBO
    unlink(tables, slots)
    return len(slots)


def reclaim(tables: Tables, *, before: float) -> int:
    """Free the slots that went to LIMBO before then, and unleased QUARANTINED ones."""
    limbo = (tables.slot_state == LIMBO) & (tables.slot_since <= before)
    bad = (tables.slot_state == QUARANTINED) & (tables.slot_leases == 0)
    slots = np.flatnonzero(limbo | bad)
    tables.slot_state[slots] = FREE
    slabs.give_back(tables, slots)
    return len(slots)


def unlink(tables: Tables, slots: Array) -> None:
    """Take `slots` out of the index and out of their families; their state is set already."""
    key_index.remove(tables, slots)
    parents = tables.slot_parent[slots]
    np.subtract.at(tables.slot_children, parents[parents >= 0], ONE)
    bereft = slots[tables.slot_children[slots] > 0]
    if len(bereft):
        # Only a writer that fails, or a block that proved corrupt, goes before its children.
        tables.slot_parent[np.isin(tables.slot_parent, bereft)] = -1
    tables.slot_children[slots] = 0
    tables.slot_parent[slots] = -1
    tables.slot_holder[slots] = 0


def _still_reserved(tables: Tables, reservation: Reservation, holder: int) -> Array:
    """Return a mask of the reservation's slots that nobody took from it."""
    slots = reservation.slots
    mine: Array = tables.slot_state[slots] == RESERVED
    mine &= tables.slot_holder[slots] == holder + 1
    mine &= tables.slot_checksum[slots] == reservation.number
    return mine


def _reserved_by(tables: Tables, holder: int) -> Array:
    mine = (tables.slot_state == RESERVED) & (tables.slot_holder == holder + 1)
    return np.flatnonzero(mine)


def _allocate(tables: Tables, count: int, block_bytes: int, protect: Array) -> Array:
    """Return up to `count` FREE slots for `block_bytes`, evicting where too few are free."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    found = slabs.free_slots(tables, block_bytes)
    if len(found) < count:
        slabs.take_spare(tables, count - len(found), block_bytes)
        found = slabs.free_slots(tables, block_bytes)
    if len(found) < count:
        found = _evict_own(tables, count - len(found), block_bytes, protect)
    while len(found) < count and _take_slab(tables, block_bytes, protect):
        found = slabs.free_slots(tables, block_bytes)
    return slabs.longest_runs_first(found, count)


def _evict_own(tables: Tables, count: int, block_bytes: int, protect: Array) -> Array:
    """Evict `count` blocks of `block_bytes`; return the slots of that size that are FREE now."""
    own = tables.slab_block_bytes == block_bytes
    evict(tables, count, within=slabs.slots_of(tables, block_bytes), protect=protect)
    # Evicting may have emptied a slab, which has then gone back to all block sizes.
    tables.slab_block_bytes[own] = block_bytes
    return slabs.free_slots(tables, block_bytes)


def _take_slab(tables: Tables, block_bytes: int, protect: Array) -> bool:
    """Empty a slab of another block size and take it; False if none can be emptied."""
    choice = slabs.choose_to_clear(tables, block_bytes, protect)
    if choice is None:
        return False
    slab, going = choice
    evict(tables, int(np.count_nonzero(going)), within=going, protect=protect)
    assert tables.slab_block_bytes[slab] == 0
    tables.slab_block_bytes[slab] = block_bytes
    return True
