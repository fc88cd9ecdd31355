"""Leases: records of which holder may read which slots, kept in pages of the arena.

A slot's lease count is derived from the records; a record ends by release or with its holder.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from kvray.store import key_index
from kvray.store.layout import PAGE_SLOTS, QUARANTINED, READY
from kvray.store.tables import Array, Tables

_NAMED = 1 << 63
"""Set in the ids that come from a name; what is counted never gets there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to read some slots; small, so that it travels to other ranks."""

    lease_id: int
    """Never given twice in an arena's life, but to the leases of one name; see `id_of`."""
    page: int
    """First page of the record."""
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A prefix that is leased for several readers."""

    num_blocks: int
    leases: tuple[Lease, ...]
    """One a reader."""


class Wanted(NamedTuple):
    """A part that a block must have to count."""

    part: int
    window: int | None = None
    """Of a prefix, only this many trailing blocks must have it; None: all."""


def id_of(name: str) -> int:
    """Return the lease id that stands for `name`: it is known without the record."""
    return _NAMED | xxhash.xxh3_64_intdigest(name.encode())


def match(tables: Tables, keys: Array, wanted: Iterable[Wanted]) -> tuple[int, dict[Wanted, Array]]:
    """Return the longest prefix of `keys` that has every part that is wanted of it, READY.

    Returns:
        Its number of blocks, and for each part its slots in prefix order: as many as there are
        blocks, or the last `window` of them.
    """
    found: dict[Wanted, Array] = {}
    whole: list[Wanted] = []
    windowed: list[Wanted] = []
    for one in wanted:
        (whole if one.window is None else windowed).append(one)
    run = len(keys)
    if whole:
        found = dict(zip(whole, _ready_run(tables, keys, [one.part for one in whole]), strict=True))
        run = len(found[whole[0]])
    if windowed and run:
        everywhere = {one: key_index.find(tables, keys[:run], one.part) for one in windowed}
        run = _longest([(one.window or 0, _ready(tables, everywhere[one])) for one in windowed])
        found.update(everywhere)
    return run, {
        one: slots[max(0, run - (one.window or run)) : run] for one, slots in found.items()
    }


def present(tables: Tables, keys: Array, part: int) -> Array:
    """Return a mask of `keys`: those of which `part` is READY."""
    return _ready(tables, key_index.find(tables, keys, part))


def joined(slots: dict[Wanted, Array], parts: Sequence[Wanted]) -> Array:
    """Return the slots of `parts`, one part after the other."""
    return slots[parts[0]] if len(parts) == 1 else np.concatenate([slots[one] for one in parts])


def places(
    parts: Sequence[Wanted], num_blocks: int, *, first: int, stop: int
) -> list[tuple[int, slice]]:
    """Return where a lease has blocks of its prefix, part by part.

    Args:
        parts: what was leased, one after the other.
        num_blocks: of the prefix.
        first: the first block that is asked for.
        stop: the one after the last.

    Returns:
        For each part, the first of those blocks that is leased, and their places in the lease; a
        window may have none of them.
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
    lease_id: int | None = None,
    is_use: bool = True,
) -> list[Lease] | None:
    """Lease slots to `holder` for each of `readers`; None if the records' pages are used up.

    The whole prefix is leased, from its root, so that no ancestor of a leased block can go. That
    counts as use of its blocks, unless `is_use` says that it is none.

    Args:
        tables: the arena's tables.
        readers: the slots of each lease, in prefix order.
        holder: row in the holder table.
        now: monotonic seconds.
        lease_id: what all of them are known by; None: each by a number of its own.
        is_use: whether the blocks become the last to be evicted.
    """
    counts = [max(1, -(-len(slots) // PAGE_SLOTS)) for slots in readers]
    pages = _free_pages(tables, sum(counts))
    if pages is None:
        return None
    leases, at = [], 0
    for slots, count in zip(readers, counts, strict=True):
        if lease_id is None:
            tables.next_lease += 1
        known_by = tables.next_lease if lease_id is None else lease_id
        leases.append(_record(tables, slots, pages[at : at + count], known_by, now))
        at += count
    everything = readers[0] if len(readers) == 1 else np.concatenate(readers)
    if is_use:
        tables.slot_tick[everything] = tables.next_tick()
    tables.put(np.array(pages), page_holder=holder + 1)
    tables.add(everything, slot_leases=1)
    return leases


def leased_slots(tables: Tables, lease: Lease) -> Array | None:
    """Return the slots of `lease` in prefix order; None if it has ended.

    Needs no lock: a record does not change while it is held. One that somebody ends meanwhile is
    told by looking twice.
    """
    pages = _pages(tables, lease)
    if pages is None:
        return None
    slots = tables.page_slots[pages].ravel()[: lease.num_slots].astype(np.int64)
    return slots if _pages(tables, lease) == pages else None


def release(tables: Tables, lease: Lease) -> bool:
    """End `lease`; False if it had ended before."""
    pages = _pages(tables, lease)
    if pages is None:
        return False
    _end(tables, pages)
    return True


def records(tables: Tables, lease_id: int) -> Array:
    """Return the pages of all leases that are known by `lease_id`.

    Needs no lock where nobody takes one of that id meanwhile: all pages are looked at.
    """
    return np.flatnonzero((tables.page_lease == np.uint64(lease_id)) & (tables.page_holder > 0))


def release_records(tables: Tables, lease_id: int, pages: Array) -> int:
    """End those leases of which `records` gave `pages`; return how many slots they still named."""
    still = (tables.page_lease[pages] == np.uint64(lease_id)) & (tables.page_holder[pages] > 0)
    return _end(tables, pages[still])


def release_holder(tables: Tables, holder: int) -> int:
    """End every lease of `holder`; return how many slots they named."""
    pages = np.flatnonzero(tables.page_holder == holder + 1)
    return _end(tables, pages) if len(pages) else 0


def count_leases(tables: Tables) -> Array:
    """Return the lease count of every slot as the records have it."""
    return np.bincount(
        _named(tables, np.flatnonzero(tables.page_holder)), minlength=tables.geometry.num_slots
    )


def long_leases(tables: Tables, *, before: float) -> list[tuple[int, int]]:
    """Return (holder, slots) of the holders with leases taken before then."""
    pages = np.flatnonzero((tables.page_holder > 0) & (tables.page_since < before))
    holders = np.unique(tables.page_holder[pages])
    counts = tables.page_count[pages]
    return [(int(h) - 1, int(counts[tables.page_holder[pages] == h].sum())) for h in holders]


def drop_unsound(tables: Tables) -> None:
    """Forget the pages that cannot be part of a lease, whatever wrote them."""
    pages = np.flatnonzero(tables.page_holder)
    holders, counts = tables.page_holder[pages], tables.page_count[pages]
    bad = (holders < 0) | (holders > tables.geometry.holders_max) | (counts > PAGE_SLOTS)
    slots = tables.page_slots[pages]
    inside = slots < tables.geometry.num_slots
    states = tables.slot_state[np.where(inside, slots, 0)]
    readable = inside & ((states == READY) | (states == QUARANTINED))
    bad |= ((np.arange(PAGE_SLOTS) < counts[:, None]) & ~readable).any(axis=1)
    tables.page_holder[pages[bad]] = 0


def _pages(tables: Tables, lease: Lease) -> list[int] | None:
    """Return the pages of the record of `lease`; None if it has ended or never was."""
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


def _longest(windows: "Sequence[tuple[int, Array]]") -> int:
    """Return the length of the longest prefix whose trailing blocks are all there.

    Args:
        windows: for each part how many trailing blocks it needs, and which blocks it has.
    """
    places = np.arange(1, len(windows[0][1]) + 1)
    fits = np.ones(len(places), dtype=bool)
    for window, here in windows:
        # How many blocks in a row are here up to each place.
        in_a_row = places - np.maximum.accumulate(np.where(here, 0, places))
        fits &= in_a_row >= np.minimum(places, window)
    return int(places[fits].max(initial=0))


def _ready(tables: Tables, slots: Array) -> Array:
    """Return a mask of `slots` (-1: none) that are READY."""
    ready: Array = (slots >= 0) & (tables.slot_state.take(slots, mode="clip") == READY)
    return ready


def _ready_run(tables: Tables, keys: Array, parts: Sequence[int]) -> Array:
    slots = key_index.find_run(tables, keys, parts)
    ready = tables.slot_state.take(slots) == READY
    if np.count_nonzero(ready) == ready.size:
        return slots
    return slots[:, : ready.all(axis=0).argmin()]


def _record(tables: Tables, slots: Array, pages: list[int], lease_id: int, now: float) -> Lease:
    """Write the record of a lease into free pages; it is none before they get their holder."""
    for place, page in enumerate(pages):
        named = slots[place * PAGE_SLOTS : (place + 1) * PAGE_SLOTS]
        tables.page_slots[page, : len(named)] = named
        tables.page_count[page] = len(named)
        tables.page_next[page] = pages[place + 1] if place + 1 < len(pages) else -1
        tables.page_lease[page] = lease_id
        tables.page_since[page] = now
    return Lease(lease_id=lease_id, page=pages[0], num_slots=len(slots))


def _free_pages(tables: Tables, count: int) -> list[int] | None:
    """Return `count` free pages; None if there are fewer."""
    # Where the last search ended pages are mostly free; all are looked at only if they are not.
    start, end = tables.next_page, tables.next_page + count
    if end <= len(tables.page_holder) and not tables.page_holder[start:end].any():
        pages = list(range(start, end))
    else:
        pages = (tables.page_holder == 0).nonzero()[0][:count].tolist()
    if len(pages) < count:
        return None
    tables.next_page = pages[-1] + 1
    return pages


def _named(tables: Tables, pages: "Array | list[int]") -> Array:
    """Return every slot that `pages` name, with repetitions."""
    filled = np.arange(PAGE_SLOTS) < tables.page_count[pages][:, None]
    return tables.page_slots[pages][filled].astype(np.int64)


def _end(tables: Tables, pages: "Array | list[int]") -> int:
    slots = _named(tables, pages)
    tables.put(np.asarray(pages), page_holder=0)
    tables.add(slots, slot_leases=-1)
    return len(slots)
