"""Leases: records of which holder may read which slots, kept in pages of the arena.

A slot's lease count is derived from the records; a record ends by release or with its holder.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvray.store import key_index
from kvray.store.layout import PAGE_SLOTS, QUARANTINED, READY
from kvray.store.tables import Array, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to read some slots; small, so that it travels to other ranks."""

    lease_id: int
    """Never given twice in an arena's life."""
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


def match(tables: Tables, keys: Array, wanted: Iterable[Wanted]) -> tuple[int, dict[Wanted, Array]]:
    """Return the longest prefix of `keys` that has every part that is wanted of it, READY.

    Returns:
        Its number of blocks, and for each part its slots in prefix order: as many as there are
        blocks, or the last `window` of them.
    """
    found: dict[Wanted, Array] = {}
    windowed: list[Wanted] = []
    run = len(keys)
    for one in wanted:
        if one.window is not None:
            windowed.append(one)
            continue
        found[one] = _ready_run(tables, keys[:run], one.part)
        run = len(found[one])
    if windowed and run:
        everywhere = {one: key_index.find(tables, keys[:run], one.part) for one in windowed}
        run = _longest([(one.window or 0, _ready(tables, everywhere[one])) for one in windowed])
        found.update(everywhere)
    return run, {
        one: slots[max(0, run - (one.window or run)) : run] for one, slots in found.items()
    }


def joined(slots: dict[Wanted, Array], parts: Sequence[Wanted]) -> Array:
    """Return the slots of `parts`, one part after the other."""
    return slots[parts[0]] if len(parts) == 1 else np.concatenate([slots[one] for one in parts])


def take(
    tables: Tables, slots: Array, *, holder: int, now: float, is_use: bool = True
) -> Lease | None:
    """Lease `slots` to `holder`; None if the record's pages are used up.

    The whole prefix is leased, from its root, so that no ancestor of a leased block can go. That
    counts as use of its blocks, unless `is_use` says that it is none.
    """
    pages = _free_pages(tables, max(1, -(-len(slots) // PAGE_SLOTS)))
    if pages is None:
        return None
    lease_id = tables.next_lease + 1
    tables.next_lease = lease_id
    if is_use:
        tables.slot_tick[slots] = tables.next_tick()
    starts = range(0, len(pages) * PAGE_SLOTS, PAGE_SLOTS)
    for page, following, start in zip(pages, [*pages[1:], -1], starts, strict=True):
        named = slots[start : start + PAGE_SLOTS]
        tables.page_slots[page, : len(named)] = named
        tables.page_count[page] = len(named)
        tables.page_next[page] = following
        tables.page_lease[page] = lease_id
        tables.page_since[page] = now
    tables.put(np.array(pages), page_holder=holder + 1)
    tables.add(slots, slot_leases=1)
    return Lease(lease_id=lease_id, page=pages[0], num_slots=len(slots))


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


def _ready_run(tables: Tables, keys: Array, part: int) -> Array:
    slots = key_index.find_run(tables, keys, part)
    ready = tables.slot_state.take(slots) == READY
    return slots if np.count_nonzero(ready) == len(slots) else slots[: ready.argmin()]


def _free_pages(tables: Tables, count: int) -> list[int] | None:
    """Return `count` free pages; None if there are fewer."""
    # Where the last search ended pages are mostly free; all are looked at only if they are not.
    start = tables.next_page
    free = tables.page_holder[start : start + 2 * count] == 0
    if np.count_nonzero(free) < count:
        start, free = 0, tables.page_holder == 0
    pages: list[int] = (free.nonzero()[0][:count] + start).tolist()
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
