"""Which blocks to evict: by their rank, or least recently used first; a prefix from its tail."""

from collections.abc import Callable

import numpy as np

from kvray.store.layout import READY
from kvray.store.tables import Array, Tables

Rank = Callable[[Array], Array]
"""Slots -> a number for each, f8: the lowest is to go first."""


def choose_victims(
    tables: Tables, count: int, *, within: Array, protect: Array, rank: Rank | None = None
) -> Array:
    """Return up to `count` slots to evict, children before their parents.

    Nothing is changed, and no lock is needed: what it returns is looked at again, under the lock,
    by `keep_evictable`. A slot qualifies if it is READY, nobody leases it, and every child that it
    has in the arena goes before it. Of those that qualify the lowest in rank goes, where a parent
    ranks no lower than any of its children: fewer than `count` are returned only when nothing else
    qualifies.

    Args:
        tables: the arena's tables.
        count: slots wanted.
        within: the slots to choose from.
        protect: slots that must stay (the chain that the caller is about to extend).
        rank: of slots; None: the order in which they were used last.
    """
    fit = within[is_fit(tables, within)]
    ranks = _ranks(tables, fit, rank)
    wanted = count
    while True:
        # Those that go are among the lowest, unless their children rank above them.
        low = np.arange(len(fit))
        if wanted < len(fit):
            low = np.argpartition(ranks, wanted - 1)[:wanted]
        victims = _keep_evictable(tables, fit[low], ranks[low], protect)
        if len(victims) >= count or wanted >= len(fit):
            return victims[:count]
        wanted *= 4


def keep_evictable(
    tables: Tables, chosen: Array, *, protect: Array, rank: Rank | None = None
) -> Array:
    """Return those of `chosen` that can go without any other, in the order in which they should.

    A block can go if it is fit itself and all its children are here and can go.
    """
    return _keep_evictable(tables, chosen, _ranks(tables, chosen, rank), protect)


def is_fit(tables: Tables, slots: Array) -> Array:
    """Return a mask of the `slots` with READY blocks that nobody leases."""
    fit: Array = (tables.slot_state.take(slots) == READY) & (tables.slot_leases.take(slots) == 0)
    return fit


def _keep_evictable(tables: Tables, chosen: Array, ranks: Array, protect: Array) -> Array:
    fits = is_fit(tables, chosen)
    if len(protect):
        fits &= ~np.isin(chosen, protect)
    order = np.argsort(chosen)
    order = order[fits[order]]
    fit, ranks = chosen[order], ranks[order]
    nowhere = len(fit)
    parent = tables.slot_parent[fit]
    at = np.searchsorted(fit, parent)
    here = np.append(fit, -2)[at] == parent
    above = np.append(np.where(here, at, nowhere), nowhere)
    children = np.bincount(above, minlength=nowhere + 1)[:nowhere]
    ranks = np.append(ranks, -np.inf)
    ranks[:nowhere][children != tables.slot_children[fit]] = np.inf
    # Each round hands every block's rank to the ancestor twice as far away as in the last one. The
    # rounds are counted, because without the lock parents may be seen to go in a circle.
    for _ in range(nowhere.bit_length()):
        if not (above < nowhere).any():
            break
        np.maximum.at(ranks, above, ranks)
        ranks[nowhere] = -np.inf
        above = above[above]
    ranks = ranks[:nowhere]
    # Equal ranks are common, because a request uses its whole prefix at once: deeper first.
    order = np.lexsort((-tables.slot_depth[fit].astype(np.int64), ranks))
    ordered: Array = fit[order[: np.count_nonzero(ranks != np.inf)]]
    return ordered


def _ranks(tables: Tables, slots: Array, rank: Rank | None) -> Array:
    """Return the rank of each of `slots`, f8."""
    ranks: Array = (tables.slot_tick[slots] if rank is None else rank(slots)).astype(np.float64)
    return ranks
