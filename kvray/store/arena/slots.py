"""Slots of an arena: reserve, write, commit or abort; evict; and recovery after a death.

Every function changes only the tables, in steps that can be undone; the caller holds the arena's
lock. Payloads are written between `reserve` and `commit`, outside the lock.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from kvray.errors import ConfigError
from kvray.identity.block import BlockKey, head_number
from kvray.store.arena import key_index, slabs, victims
from kvray.store.arena.eviction import choose_victims, keep_evictable
from kvray.store.arena.layout import (
    DEFAULT_PRIORITY,
    FREE,
    LIMBO,
    NO_SLOTS,
    PRIORITY_MAX,
    QUARANTINED,
    READY,
    RESERVED,
)
from kvray.store.arena.tables import Array, Tables

_HINT = 2
"""Candidates per block that must go: some turn out to be in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Slots that one writer may fill."""

    rows: Array
    """Index of each reserved slot in the requested keys; ascending."""
    slots: Array
    """The slots, one a row."""
    words: Array = field(repr=False)
    """`key_index.words` of the block that each slot will have."""
    existing: int
    """Keys that needed no slot: the arena has them, or somebody is writing them."""
    dropped: int
    """Keys that got no slot: no room, or their parent is not here."""
    number: int = 0
    """Never given twice in an arena's life. A commit counts only for slots that still have it, so
    that a late one cannot hit slots that somebody else has reserved since."""

    def only(self, chosen: "Array | slice") -> "Reservation":
        """Return the part of this reservation that the mask or slice `chosen` selects."""
        return replace(
            self, rows=self.rows[chosen], slots=self.slots[chosen], words=self.words[chosen]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Blocks that may go for others: found without the lock, checked again under it."""

    own: Array = field(default_factory=lambda: NO_SLOTS)
    """Blocks of the size to be stored, the first to go first."""
    others: Array = field(default_factory=lambda: NO_SLOTS)
    """Blocks of other sizes, enough to make slabs spare."""
    others_first: bool = False
    """Whether those were used before all of `own`."""
    tick: int = 0
    """The arena's logical time when they were found."""

    def __bool__(self) -> bool:
        return bool(len(self.own) or len(self.others))


def checked(
    keys: Array, *, depth: int, part: int, block_bytes: int, priority: int | Array
) -> int | Array:
    """Refuse arguments of `reserve` that would otherwise fail in a half-done step: ConfigError.

    Returns `priority` as `reserve` takes it: one, or one a key as u8.
    """
    words = keys[:, 0].tolist()
    if len(set(words)) < len(words) and len(np.unique(keys, axis=0)) < len(keys):
        raise ConfigError("The keys to reserve are not all different; give each block once.")
    if not (0 <= part < 2**31 and 0 <= depth < 2**31):
        raise ConfigError(f"A block cannot be part {part} at depth {depth}; both count from 0.")
    if block_bytes < 1:
        raise ConfigError(f"A block must have at least 1 byte, not {block_bytes}.")
    if isinstance(priority, int) and 0 <= priority <= PRIORITY_MAX:
        return priority
    asked = np.asarray(priority)
    if asked.shape not in ((), (len(keys),)) or ((asked < 0) | (asked > PRIORITY_MAX)).any():
        raise ConfigError(
            f"A retention priority is a number from 0 to {PRIORITY_MAX}, one for all blocks or one"
            f" for each of the {len(keys)}."
        )
    return asked.astype(np.uint8) if asked.shape else int(asked)


def find_candidates(
    tables: Tables, keys: Array, *, parent: Array | None, part: int, block_bytes: int
) -> Candidates:
    """Return blocks that may go for `keys`; arguments as for `reserve`; needs no lock.

    For when the blocks that were chosen ahead are too few. It looks at a part of a large arena, at
    another one each time. A slab of another size goes for want of blocks of this one, or if it was
    not used since the first of those that would go.
    """
    short = len(keys) - slabs.num_available(tables, block_bytes)
    if short <= 0 or not slabs.has_rows(tables, block_bytes):
        return Candidates()
    tick = tables.counts.tick
    before, chain = _find(tables, keys, parent, part)
    protect = chain[chain >= 0]
    if before >= 0:
        protect = np.append(protect, before)
    within = slabs.some_of(tables, block_bytes, turn=tick)
    own = choose_victims(tables, _HINT * short, within=within, protect=protect)
    is_enough = len(own) >= short

    def clear(among: Array) -> Array:
        if not len(among) or (is_enough and not _is_older(tables, among[:1], own[:1])):
            return NO_SLOTS
        missing = short if is_enough else short - len(own)
        count = -(-missing // slabs.usable(tables, block_bytes))
        return slabs.choose_to_clear(tables, count, among=among, protect=protect)

    others = clear(victims.next_slabs(tables, block_bytes))
    if not len(others):
        among = slabs.some_others(tables, block_bytes, turn=tick)
        others = clear(slabs.coldest_first(tables, among)[:, 0]) if len(among) else NO_SLOTS
    return Candidates(own=own, others=others, others_first=is_enough, tick=tick)


def _is_older(tables: Tables, slab: Array, victim: Array) -> bool:
    """Return whether all blocks of the one slab were used before the one `victim`, and may go."""
    last = slabs.coldest_first(tables, slab)
    return bool(len(last)) and bool(last[0, 1] < slabs.use_order(tables, victim)[0])


def reserve(
    tables: Tables,
    keys: Array,
    *,
    parent: Array | None,
    depth: int,
    part: int,
    block_bytes: int,
    holder: int,
    candidates: Candidates,
    namespace: int = 0,
    priority: int | Array = DEFAULT_PRIORITY,
    head: int = 0,
    needs_parent: bool = True,
    is_last: bool = True,
) -> Reservation | None:
    """Reserve a slot for each key of a chain that the arena does not have.

    Arguments as for `Arena.reserve`, but `keys` are u64 of shape [num_keys, 4] and `parent` is [1,
    4]; a parent that is here knows depth and head better. `holder` is the writer's row, and
    `candidates` come from `find_candidates`. With `is_last` it makes do with fewer slots.

    Returns the slots; None if there are too few and it is not the last try. Reserved keys are a
    prefix of the missing ones: a block whose parent is not here could never be matched.
    """
    before, chain = _find(tables, keys, parent, part)
    if parent is not None and before < 0 and needs_parent:
        tables.counts.dropped += len(keys)
        none = NO_SLOTS.astype("<u8")
        return Reservation(rows=NO_SLOTS, slots=NO_SLOTS, words=none, existing=0, dropped=len(keys))
    if before >= 0:
        depth = int(tables.slot_depth[before]) + 1
        head = int(tables.slot_head[before]) or head
    elif parent is None and depth == 0:  # else its parent is lost, and `head` is all that is known
        head = head_number(BlockKey(keys[:1].tobytes()))
    number = tables.next_tick()
    here = chain >= 0
    found = chain[here]
    protect = found if before < 0 else np.concatenate((found, [before]))
    tables.slot_tick[protect] = number
    if len(found):
        # A block takes the higher priority. Not undone: the same request later has the same result.
        asked = priority if isinstance(priority, int) else priority[here]
        if ((held := tables.slot_priority.take(found)) < asked).any():
            tables.slot_priority[found] = np.maximum(held, asked)
    wanted = (~here).nonzero()[0]
    taken = _allocate(tables, len(wanted), block_bytes, protect=protect, candidates=candidates)
    if len(taken) < len(wanted) and not is_last:
        tables.undo.roll_back()
        return None
    rows = wanted[: len(taken)]
    chain[rows] = taken
    keys = keys[rows]
    _fill(tables, taken, keys, depth=depth + rows, part=part, holder=holder)
    tables.slot_namespace[taken], tables.slot_head[taken] = namespace, head
    tables.slot_priority[taken] = priority if isinstance(priority, int) else priority[rows]
    if len(rows) and not len(found):
        _chain(tables, taken, before)
    tables.put(taken, slot_state=RESERVED)
    slabs.note_taken(tables, taken)
    if len(found):
        _link(tables, chain, before)
    full = key_index.insert(tables, taken, keys, part)
    if full.any():  # cut the chain before the first block without a place in the index
        cut = int(full.argmax())
        free(tables, taken[cut:])
        rows, taken = rows[:cut], taken[:cut]
    dropped = len(wanted) - len(rows)
    tables.counts.dropped += dropped
    return Reservation(
        rows=rows,
        slots=taken,
        words=key_index.words(keys[: len(rows), 0], part),
        existing=len(found),
        dropped=dropped,
        number=number,
    )


def _find(tables: Tables, keys: Array, parent: Array | None, part: int) -> tuple[int, Array]:
    if parent is None:
        return -1, key_index.find(tables, keys, part)
    found = key_index.find(tables, np.concatenate((parent, keys)), part)
    return int(found[0]), found[1:]


def _fill(
    tables: Tables, slots: Array, keys: Array, *, depth: Array, part: int, holder: int
) -> None:
    """Write what FREE slots will hold, and for whom; nobody looks before they are RESERVED."""
    tables.slot_key[slots] = keys
    tables.slot_part[slots] = part
    tables.slot_depth[slots] = depth
    tables.slot_parent[slots] = -1
    tables.slot_holder[slots] = holder + 1
    tables.slot_tick[slots] = tables.slot_number[slots] = tables.counts.tick


def _chain(tables: Tables, slots: Array, before: int) -> None:
    """Link the slots that will hold a chain below `before`, which is here, or -1."""
    if len(slots) == 1 and before < 0:
        return
    parents, children = np.empty_like(slots), np.ones(len(slots), dtype=np.int32)
    parents[0], parents[1:], children[-1] = before, slots[:-1], 0
    tables.put(slots, slot_parent=parents, slot_children=children)
    if before >= 0:
        tables.add(parents[:1], slot_children=1)


def _link(tables: Tables, chain: Array, before: int) -> None:
    """Link each block of `chain` (-1: not here) that has no parent to the one before it.

    These are the new blocks, and blocks that outlived a parent which is back now.
    """
    parents = np.concatenate(([before], chain[:-1]))
    alone = (chain >= 0) & (parents >= 0) & (tables.slot_parent[chain] < 0)
    blocks, parents = chain[alone], parents[alone]
    # The depth must agree, so that no order of keys can make a block its own ancestor.
    below = tables.slot_depth[blocks] == tables.slot_depth[parents] + 1
    tables.put(blocks[below], slot_parent=parents[below])
    tables.add(parents[below], slot_children=1)


def commit(tables: Tables, reservation: Reservation, checksums: Array) -> int:
    """Make reserved slots READY; return how many were still this reservation's to commit."""
    mine = _still_reserved(tables, reservation)
    # A checksum has no say in this: a slot must claim the block that it was reserved for.
    other = mine & (key_index.words_in(tables, reservation.slots) != reservation.words)
    if np.count_nonzero(other):
        free(tables, reservation.slots[other])
        mine &= ~other
    slots = reservation.slots
    if np.count_nonzero(mine) < len(slots):
        slots, checksums = slots[mine], checksums[mine]
    # The state last: a reader without the lock never sees a READY slot without its checksum.
    tables.slot_checksum[slots] = checksums
    tables.put(slots, slot_state=READY)
    tables.changed(slots)
    tables.counts.stored += len(slots)
    return len(slots)


def abort(tables: Tables, reservation: Reservation) -> None:
    """Give back reserved slots that will not be written."""
    free(tables, reservation.slots[_still_reserved(tables, reservation)])


def abort_holder(tables: Tables, holder: int) -> None:
    """Give back all reservations of `holder`, which has stopped writing."""
    free(tables, _reserved_by(tables, holder))


def evict(tables: Tables, chosen: Array) -> None:
    """Evict `chosen`, which `eviction` found fit to go, as a step of its own."""
    free(tables, chosen)
    tables.counts.evicted += len(chosen)
    tables.undo.settle()


def free(tables: Tables, slots: Array) -> None:
    """Make `slots` FREE from any state, and unlink them from parents and children."""
    if not len(slots):
        return
    ready = slots[tables.slot_state[slots] == READY]
    tables.put(slots, slot_state=FREE)
    unlink(tables, slots)
    tables.changed(ready)
    slabs.give_back(tables, slots)


def quarantine(tables: Tables, slots: Array) -> None:
    """Take READY slots whose bytes are wrong out of service; they no longer hold a block."""
    bad = np.unique(slots[tables.slot_state[slots] == READY])
    tables.put(bad, slot_state=QUARANTINED)
    unlink(tables, bad)
    tables.changed(bad)
    tables.counts.corrupt += len(bad)


def strand(tables: Tables, holder: int, *, now: float) -> int:
    """Send to LIMBO what a dead holder had reserved: a late copy may still land there."""
    slots = _reserved_by(tables, holder)
    tables.slot_since[slots] = now
    tables.put(slots, slot_state=LIMBO)
    unlink(tables, slots)
    return len(slots)


def reclaim(tables: Tables, *, before: float) -> int:
    """Free the slots that went to LIMBO before then, and unleased QUARANTINED ones."""
    limbo, bad = tables.slots_in(LIMBO), tables.slots_in(QUARANTINED)
    limbo, bad = limbo[tables.slot_since[limbo] <= before], bad[tables.slot_leases[bad] == 0]
    slots = np.concatenate((limbo, bad))
    tables.put(slots, slot_state=FREE)
    slabs.give_back(tables, slots)
    return len(slots)


def unlink(tables: Tables, slots: Array) -> None:
    """Take `slots`, whose state is set already, out of the index and their families."""
    key_index.remove(tables, slots)
    parents = tables.parents(slots)
    tables.add(parents[parents >= 0], slot_children=-1)
    bereft = slots[tables.slot_children[slots] > 0]
    if len(bereft):
        # Only the block of a failed writer, or a corrupt block, goes before its children.
        children = np.flatnonzero(np.isin(tables.slot_parent[tables.backed], bereft))
        tables.put(children, slot_parent=-1)
    tables.put(slots, slot_children=0, slot_parent=-1)


def _still_reserved(tables: Tables, reservation: Reservation) -> Array:
    """Return a mask of the reservation's slots that nobody took from it."""
    mine: Array = tables.slot_number.take(reservation.slots) == reservation.number
    mine &= tables.slot_state.take(reservation.slots) == RESERVED
    return mine


def _reserved_by(tables: Tables, holder: int) -> Array:
    reserved = tables.slots_in(RESERVED)
    mine: Array = reserved[tables.slot_holder[reserved] == holder + 1]
    return mine


def _allocate(
    tables: Tables, count: int, block_bytes: int, *, protect: Array, candidates: Candidates
) -> Array:
    """Return up to `count` FREE slots for `block_bytes`, evicting candidates if there are fewer."""
    found = slabs.free_slots(tables, block_bytes, count)
    if len(found) < count and slabs.has_rows(tables, block_bytes):
        _make_room(tables, count, block_bytes, protect=protect, candidates=candidates)
        slabs.take_spare(tables, count, block_bytes)
        found = slabs.free_slots(tables, block_bytes, count)
    return found


def _make_room(
    tables: Tables, count: int, block_bytes: int, *, protect: Array, candidates: Candidates
) -> None:
    """Evict what goes next, then candidates, until `count` slots can be had, in own steps."""

    def short() -> int:
        return count - slabs.num_available(tables, block_bytes)

    if (num := short()) > 0:
        evict(tables, victims.take(tables, block_bytes, num, protect=protect))
    turns = ("others", "own") if candidates.others_first else ("own", "others")
    for turn in turns if candidates else ():
        if (num := short()) <= 0:
            break
        if turn == "own":
            evict(tables, _own_in_order(tables, candidates, protect)[:num])
        else:
            evict(tables, keep_evictable(tables, candidates.others, protect=protect))
            victims.pass_slabs(tables)


def _own_in_order(tables: Tables, candidates: Candidates, protect: Array) -> Array:
    """Return the candidates of the size to be stored that still can go, as they were chosen."""

    def rank(own: Array) -> Array:
        """Keep the order; but what was used since goes last."""
        return np.arange(len(own)) + len(own) * (tables.slot_tick[own] > candidates.tick)

    return keep_evictable(tables, candidates.own, protect=protect, rank=rank)
