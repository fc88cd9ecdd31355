"""Which blocks to evict: least recently used first, a prefix from its tail."""

from heapq import heapify, heappop, heappush

import numpy as np

from kvray.store.layout import READY
from kvray.store.tables import Array, Tables


def choose_victims(tables: Tables, count: int, *, within: Array, protect: Array) -> Array:
    """Return up to `count` slots to evict, children before their parents.

    Nothing is changed. A slot qualifies if it is READY, nobody leases it, and every child that it
    has in the arena goes before it. Of those that qualify the least recently used goes, where a
    parent counts as used when the last of its children was: fewer than `count` are returned only
    when nothing else qualifies.

    Args:
        tables: the arena's tables.
        count: slots wanted; each costs about a microsecond, because one victim decides the next.
        within: mask of the slots to choose from, shape [num_slots].
        protect: slots that must stay (the chain that the caller is about to extend).
    """
    fit = within & (tables.slot_state == READY) & (tables.slot_leases == 0)
    fit[protect] = False
    queue = _oldest_tails(tables, fit, count)
    parents, children, ticks = tables.slot_parent, tables.slot_children, tables.slot_tick
    gone: dict[int, int] = {}
    victims: list[int] = []
    while queue and len(victims) < count:
        tick, depth, slot = heappop(queue)
        victims.append(slot)
        parent = parents.item(slot)
        if parent < 0:
            continue
        gone[parent] = gone.get(parent, 0) + 1
        if gone[parent] == children.item(parent) and fit.item(parent):
            heappush(queue, (max(tick, ticks.item(parent)), depth + 1, parent))
    return np.array(victims, dtype=np.int64)


def _oldest_tails(tables: Tables, fit: Array, count: int) -> list[tuple[int, int, int]]:
    """Return a heap of (tick, -depth, slot) of the `count` oldest slots without children.

    Equal ticks are common, because a request touches its whole prefix at once; the deeper goes
    first. Younger tails than these cannot be reached: each victim takes one from the heap.
    """
    tails = np.flatnonzero(fit & (tables.slot_children == 0))
    if len(tails) > count > 0:
        tails = tails[np.argpartition(tables.slot_tick[tails], count - 1)[:count]]
    depths = -tables.slot_depth[tails].astype(np.int64)
    queue = list(
        zip(tables.slot_tick[tails].tolist(), depths.tolist(), tails.tolist(), strict=True)
    )
    heapify(queue)
    return queue
