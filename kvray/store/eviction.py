"""Which blocks to evict: least recently used first, a prefix from its tail."""

import numpy as np

from kvray.store.layout import READY
from kvray.store.tables import Array, Tables

_ROUNDS_MAX = 64
"""Bound on the passes of one call; what is not found by then is left to the next."""


def choose_victims(tables: Tables, count: int, *, within: Array, protect: Array) -> Array:
    """Return up to `count` slots to evict, children before their parents.

    Nothing is changed. A slot qualifies if it is READY, nobody leases it, and every child it has
    in the arena goes with it: so a parent never goes before its children.

    Args:
        tables: the arena's tables.
        count: slots wanted.
        within: slots to choose from.
        protect: slots that must stay (the chain that the caller is about to extend).
    """
    fit = (tables.slot_state[within] == READY) & (tables.slot_leases[within] == 0)
    candidates = np.setdiff1d(within[fit], protect)
    # A request touches its whole prefix at once: equal ticks, so depth puts tails first.
    recency = np.lexsort(
        (-tables.slot_depth[candidates].astype(np.int64), tables.slot_tick[candidates])
    )
    candidates = candidates[recency]
    chosen = np.empty(0, dtype=np.int64)
    for _ in range(_ROUNDS_MAX):
        missing = count - len(chosen)
        if missing <= 0 or not len(candidates):
            break
        batch = _closed(tables, np.concatenate((chosen, candidates[:missing])))[len(chosen) :]
        if not len(batch):
            batch = _tails(tables, candidates, chosen)[:missing]
            if not len(batch):
                break
        chosen = np.concatenate((chosen, batch))
        candidates = candidates[~np.isin(candidates, batch)]
    return chosen


def _closed(tables: Tables, slots: Array) -> Array:
    """Return `slots` less those with a child that is not among them, order kept."""
    for _ in range(_ROUNDS_MAX):
        stays = tables.slot_children[slots] > _children_among(tables, slots)
        if not stays.any():
            return slots
        slots = slots[~stays]
    return slots[tables.slot_children[slots] == 0]


def _tails(tables: Tables, candidates: Array, chosen: Array) -> Array:
    """Return the candidates whose children, if any, are all in `chosen`, order kept."""
    among = np.zeros(tables.geometry.num_slots, dtype=np.int32)
    np.add.at(among, _parents(tables, chosen), 1)
    return candidates[tables.slot_children[candidates] <= among[candidates]]


def _children_among(tables: Tables, slots: Array) -> Array:
    """Return for each slot how many of `slots` are its children."""
    order = np.sort(_parents(tables, slots))
    return np.searchsorted(order, slots, "right") - np.searchsorted(order, slots, "left")


def _parents(tables: Tables, slots: Array) -> Array:
    parents = tables.slot_parent[slots]
    return parents[parents >= 0]
