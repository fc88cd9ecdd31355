"""Which blocks to evict: least recently used first, a prefix from its tail."""

import numpy as np

from kvray.store.layout import READY
from kvray.store.tables import Array, Tables

_STAYS = np.uint64(2**64 - 1)
"""In place of the time of use of a block that cannot go."""


def choose_victims(tables: Tables, count: int, *, within: Array, protect: Array) -> Array:
    """Return up to `count` slots to evict, children before their parents.

    Nothing is changed, and no lock is needed: what it returns is looked at again, under the lock,
    by `keep_evictable`. A slot qualifies if it is READY, nobody leases it, and every child that it
    has in the arena goes before it. Of those that qualify the least recently used goes, where a
    parent counts as used when the last of its children was: fewer than `count` are returned only
    when nothing else qualifies.

    Args:
        tables: the arena's tables.
        count: slots wanted.
        within: the slots to choose from.
        protect: slots that must stay (the chain that the caller is about to extend).
    """
    wanted = count
    while True:
        # A block cannot have been used last before itself: those that go are among the oldest,
        # unless their children are younger than they are.
        oldest = _choose_oldest(tables, wanted, within=within)
        victims = keep_evictable(tables, oldest, protect=protect)
        if len(victims) >= count or len(oldest) < wanted:
            return victims[:count]
        wanted *= 4


def keep_evictable(tables: Tables, chosen: Array, *, protect: Array) -> Array:
    """Return those of `chosen` that can go without any other, in the order in which they should.

    A block can go if it is fit itself and all its children are here and can go.
    """
    fit = np.sort(chosen[_is_fit(tables, chosen) & ~np.isin(chosen, protect)])
    nowhere = len(fit)
    parent = tables.slot_parent[fit]
    at = np.searchsorted(fit, parent)
    here = np.append(fit, -2)[at] == parent
    above = np.append(np.where(here, at, nowhere), nowhere)
    children = np.bincount(above, minlength=nowhere + 1)[:nowhere]
    used = np.append(tables.slot_tick[fit], np.uint64(0))
    used[:nowhere][children != tables.slot_children[fit]] = _STAYS
    # Each round hands every block's time to the ancestor twice as far away as in the last one. The
    # rounds are counted, because without the lock parents may be seen to go in a circle.
    for _ in range(nowhere.bit_length()):
        if not (above < nowhere).any():
            break
        np.maximum.at(used, above, used)
        used[nowhere] = 0
        above = above[above]
    used = used[:nowhere]
    # Equal times are common, because a request touches its whole prefix at once: deeper first.
    order = np.lexsort((-tables.slot_depth[fit].astype(np.int64), used))
    ordered: Array = fit[order[: np.count_nonzero(used != _STAYS)]]
    return ordered


def _choose_oldest(tables: Tables, count: int, *, within: Array) -> Array:
    """Return the `count` unleased READY slots of `within` that were used longest ago."""
    fit = within[_is_fit(tables, within)]
    if len(fit) <= count:
        return fit
    return fit[np.argpartition(tables.slot_tick[fit], count - 1)[:count]]


def _is_fit(tables: Tables, slots: Array) -> Array:
    fit: Array = (tables.slot_state[slots] == READY) & (tables.slot_leases[slots] == 0)
    return fit
