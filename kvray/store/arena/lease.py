"""Leases: records of the slots that a holder may read, kept in pages of the arena.

The records give a slot's lease count. A record ends by release or with its holder.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from kvray.store.arena import key_index
from kvray.store.arena.layout import PAGE_SLOTS, READY
from kvray.store.arena.tables import Array, Tables

_NAMED = 1 << 63
"""Set in the ids that come from a name; counted ids never get there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to read some slots; small enough to travel to other ranks."""

    lease_id: int
    """Never given twice in an arena's life, except to the leases of one name; see `id_of`."""
    page: int
    """First page of the record."""
    num_slots: int
    check: int
    """xxh3 of the `words` of the leased blocks: shows readers whether damaged tables name others.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A prefix that is leased for several readers."""

    num_blocks: int
    leases: tuple[Lease, ...]
    """One a reader."""
    slots: tuple[Array, ...] = field(default=(), compare=False)
    """Those of each lease, in prefix order, for who took it: others read the record."""


class PartRequest(NamedTuple):
    """A part that a block must have to count."""

    part: int
    window: int | None = None
    """Only so many trailing blocks of a prefix must have it; None: all."""
    block_bytes: int | None = None
    """Its size; a block that has another one there counts as missing. None: any."""


class Membership(NamedTuple):
    """A process's place among the holders; the row may be another's once it has left."""

    row: int
    generation: int


def is_member(tables: Tables, member: Membership) -> bool:
    """Return whether this very process is still a holder; a dead one is until it is buried."""
    row, generation = member
    return (
        0 <= row < tables.geometry.holders_max
        and bool(tables.holder_live[row])
        and int(tables.holder_generation[row]) == generation
    )


def id_of(name: str) -> int:
    """Return the lease id of `name`, which is known without the record."""
    return _NAMED | xxhash.xxh3_64_intdigest(name.encode())


def match(
    tables: Tables, keys: Array, requests: Iterable[PartRequest]
) -> tuple[int, dict[PartRequest, Array]]:
    """Return the length of the longest prefix of `keys` that has every requested part READY.

    With it, for each part its slots in prefix order: one a block, or the last `window` of them.
    """
    found: dict[PartRequest, Array] = {}
    whole, parts, windowed = list[PartRequest](), list[int](), list[PartRequest]()
    for one in requests:
        if one.window is None:
            whole.append(one)
            parts.append(one.part)
        else:
            windowed.append(one)
    run = len(keys)
    if whole:
        slots = key_index.find_run(tables, keys, parts)
        found, run = dict(zip(whole, slots, strict=True)), slots.shape[1]
        for one in whole:
            if one.block_bytes is not None:
                fits = tables.serve(tables.geometry.slab_of(found[one]), one.block_bytes)
                run = run if fits.all() else min(run, int(fits.argmin()))
    if windowed and run:
        everywhere = {one: key_index.find(tables, keys[:run], one.part) for one in windowed}
        windows = [
            (one.window, _ready(tables, slots) & _fits(tables, one, slots))
            for one, slots in everywhere.items()
        ]
        run = int(usable_lengths(run, windows)[-1])
        found.update(everywhere)
    for one, each in found.items():
        found[one] = each[max(0, run - (one.window or run)) : run]
    return run, found


def _fits(tables: Tables, request: PartRequest, slots: Array) -> Array:
    """Return a mask of the `slots` that have blocks of the requested size.

    Looked at here, not when they are read: then their tokens are promised.
    """
    if request.block_bytes is None:
        return np.ones(len(slots), dtype=bool)
    return tables.serve(tables.geometry.slab_of(slots), request.block_bytes)


def usable_lengths(num_blocks: int, parts: Iterable[tuple[int | None, Array]]) -> Array:
    """Return the lengths, ascending from 0, of all prefixes that have every part.

    `parts` has for each part its window, and a mask of the `num_blocks` blocks that it has.
    """
    lengths = np.arange(1, num_blocks + 1)
    fits = np.ones(num_blocks, dtype=bool)
    for window, here in parts:
        # The number of blocks in a row that are here up to each.
        in_a_row = lengths - np.maximum.accumulate(np.where(here, 0, lengths))
        fits &= in_a_row >= (lengths if window is None else np.minimum(lengths, window))
    return np.append(0, lengths[fits])


def present(tables: Tables, keys: Array, part: int) -> Array:
    """Return a mask of `keys`: those whose `part` is READY."""
    return _ready(tables, key_index.find(tables, keys, part))


def reader_of(
    keys: Array, run: int, found: Mapping[PartRequest, Array], parts: Sequence[PartRequest]
) -> tuple[Array, Array]:
    """Return the slots that `match` has found of `parts`, one part after the other.

    With them the `words` of the blocks that were asked for, arranged alike.
    """
    slots, asked = list[Array](), list[Array]()
    for one in parts:
        slots.append(found[one])
        asked.append(key_index.words(keys[run - len(found[one]) : run, 0], one.part))
    if len(parts) == 1:
        return slots[0], asked[0]
    return np.concatenate(slots), np.concatenate(asked)


def places(
    parts: Sequence[PartRequest], num_blocks: int, *, first: int, stop: int
) -> list[tuple[int, slice]]:
    """Return where a lease has blocks `first` to `stop` of its prefix of `num_blocks` blocks.

    `parts` were leased one after the other. For each, returns the first of those blocks that is
    leased, and their places in the lease; a window may have none of them.
    """
    found, before = [], 0
    for one in parts:
        skipped = 0 if one.window is None else max(0, num_blocks - one.window)
        begin = max(first, skipped)
        end = max(begin, stop)
        found.append((begin, slice(before + begin - skipped, before + end - skipped)))
        before += num_blocks - skipped
    return found


def take(
    tables: Tables,
    readers: Sequence[Array],
    *,
    holder: int,
    now: float,
    asked: Sequence[Array] | None = None,
    lease_id: int | None = None,
    is_use: bool = True,
) -> list[Lease] | None:
    """Lease slots to `holder` for each of `readers`; None if the records' pages are used up.

    The whole prefix is leased, from its root, so that no ancestor of a leased block can go.
    `readers` have the slots of each lease in prefix order, and `asked` the `words` of the blocks
    that it asked for; None: those in the slots. Without a `lease_id` each gets a number of its own.
    `is_use` makes the blocks the last to be evicted.
    """
    counts = [max(1, -(-len(slots) // PAGE_SLOTS)) for slots in readers]
    pages = _free_pages(tables, sum(counts))
    if pages is None:
        return None
    leases, at = [], 0
    if asked is None:
        asked = [key_index.words_in(tables, slots) for slots in readers]
    for slots, words, count in zip(readers, asked, counts, strict=True):
        known_by = lease_id
        if known_by is None:
            known_by = tables.counts.next_lease = tables.counts.next_lease + 1
        _record(tables, slots, pages[at : at + count], known_by, now)
        leases.append(
            Lease(lease_id=known_by, page=pages[at], num_slots=len(slots), check=check_of(words))
        )
        at += count
    everything = readers[0] if len(readers) == 1 else np.concatenate(readers)
    if is_use:
        note_use(tables, everything)
    tables.put(np.array(pages), page_holder=holder + 1)
    tables.add(everything, slot_leases=1)
    return leases


def note_use(tables: Tables, slots: Array) -> None:
    """Make the blocks in `slots`, a prefix of a prompt, the last to be evicted."""
    tables.slot_tick[slots] = tables.next_tick()
    tables.note_event(slots)


def leased_slots(tables: Tables, lease: Lease) -> Array | None:
    """Return the slots of `lease` in prefix order; None if it has ended.

    Needs no lock: a record does not change while it is held, and a second look tells whether
    somebody has ended it meanwhile.
    """
    pages = _pages(tables, lease)
    if pages is None:
        return None
    rows = tables.page_slots[pages if len(pages) > 1 else pages[0]]
    slots = rows.ravel()[: lease.num_slots].astype(np.int64)
    return slots if _pages(tables, lease) == pages else None


def release(tables: Tables, lease: Lease) -> bool:
    """End `lease`; False if it had ended before."""
    pages = _pages(tables, lease)
    if pages is None:
        return False
    _end(tables, pages)
    return True


def records(tables: Tables, lease_id: int) -> Array:
    """Return the pages of all leases of the id `lease_id`.

    Needs no lock where nobody takes one of that id meanwhile.
    """
    return np.flatnonzero((tables.page_lease == np.uint64(lease_id)) & (tables.page_holder > 0))


def release_records(tables: Tables, lease_id: int, pages: Array) -> int:
    """End the leases in `pages`, from `records`; return how many slots they still named."""
    still = (tables.page_lease[pages] == np.uint64(lease_id)) & (tables.page_holder[pages] > 0)
    return _end(tables, pages[still])


def release_holder(tables: Tables, holder: int) -> int:
    """End every lease of `holder`; return how many slots they named."""
    pages = np.flatnonzero(tables.page_holder == holder + 1)
    return _end(tables, pages) if len(pages) else 0


def count_leases(tables: Tables) -> Array:
    """Return the lease count of every slot as the records have it; needs no lock."""
    # Compared first: numpy objects to what changes under a search.
    pages = np.flatnonzero(tables.page_holder != 0)
    return np.bincount(_named(tables, pages), minlength=tables.num_backed)


def long_leases(tables: Tables, *, before: float) -> list[tuple[int, int]]:
    """Return (holder, slots) of the holders with leases taken before then."""
    taken, is_long = tables.page_holder, tables.page_since < before
    pages = np.flatnonzero((taken > 0) & (taken <= tables.geometry.holders_max) & is_long)
    holders = np.unique(tables.page_holder[pages])
    counts = tables.page_count[pages]
    return [(int(h) - 1, int(counts[tables.page_holder[pages] == h].sum())) for h in holders]


def _pages(tables: Tables, lease: Lease) -> list[int] | None:
    pages: list[int] = []
    page = lease.page
    num_pages = len(tables.page_holder)
    while page >= 0:
        if page >= num_pages or len(pages) == num_pages or tables.page_holder[page] == 0:
            return None
        if tables.page_lease[page] != lease.lease_id:
            return None
        pages.append(page)
        page = int(tables.page_next[page])
    return pages or None


def _ready(tables: Tables, slots: Array) -> Array:
    ready: Array = (slots >= 0) & (tables.slot_state.take(slots, mode="clip") == READY)
    return ready


def _record(tables: Tables, slots: Array, pages: list[int], lease_id: int, now: float) -> None:
    """Write a lease's record into free pages, which get their holder later."""
    for place, page in enumerate(pages):
        named = slots[place * PAGE_SLOTS : (place + 1) * PAGE_SLOTS]
        tables.page_slots[page, : len(named)] = named
        tables.page_count[page] = len(named)
        tables.page_next[page] = pages[place + 1] if place + 1 < len(pages) else -1
        tables.page_lease[page] = lease_id
        tables.page_since[page] = now


def _free_pages(tables: Tables, count: int) -> list[int] | None:
    # Where the last search ended pages are mostly free; all are looked at only if they are not.
    start, end = tables.counts.next_page, tables.counts.next_page + count
    if end <= len(tables.page_holder) and not any(tables.page_holder[start:end].tolist()):
        pages = list(range(start, end))
    else:
        pages = (tables.page_holder == 0).nonzero()[0][:count].tolist()
    if len(pages) < count:
        return None
    tables.counts.next_page = pages[-1] + 1
    return pages


def _named(tables: Tables, pages: "Array | list[int]") -> Array:
    """Return every slot that `pages` name, with repetitions, without what is no slot."""
    if len(pages) == 1:  # as most leases have
        named = tables.page_slots[pages[0], : tables.page_count[pages[0]]]
        return named[named < tables.num_backed].astype(np.int64)
    filled = np.arange(PAGE_SLOTS) < tables.page_count[pages][:, None]
    named = tables.page_slots[pages][filled]
    return named[named < tables.num_backed].astype(np.int64)


def check_of(words: Array) -> int:
    """Return what a `Lease` says of the `words` of its blocks."""
    return xxhash.xxh3_64_intdigest(words.tobytes())


def _end(tables: Tables, pages: "Array | list[int]") -> int:
    slots = _named(tables, pages)
    tables.put(np.asarray(pages), page_holder=0)
    tables.add(slots, slot_leases=-1)
    return len(slots)
