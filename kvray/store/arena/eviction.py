"""Chooses the blocks to evict, in their order; of a prefix the tail goes first.

Blocks that were given up go first, then those beyond a namespace's quota, then those of lower
retention priority. Among equals the lowest rank goes: a policy's, or the time of the last use.
"""

from collections.abc import Callable, Mapping

import numpy as np

from kvray.store.arena import quotas
from kvray.store.arena.layout import NO_SLOTS, PRIORITY_MAX, READY
from kvray.store.arena.tables import Array, Tables

Rank = Callable[[Array], Array]
"""Slots -> a number for each, f8: the lowest goes first."""

_GIVEN_UP = 0
_BEYOND_QUOTA = 1
_WITHIN_QUOTA = _BEYOND_QUOTA + PRIORITY_MAX + 1
"""Classes: a lower one goes first, whatever the rank. Priorities are added to them."""


def choose_victims(
    tables: Tables,
    count: int,
    *,
    within: Array,
    protect: Array = NO_SLOTS,
    rank: Rank | None = None,
) -> Array:
    """Return up to `count` of the slots `within` to evict, children before their parents.

    Changes nothing and needs no lock: `keep_evictable` checks the result again, under the lock. A
    slot qualifies if it is READY, nobody leases it, it is not in `protect`, and every child that it
    has in the arena goes before it. The lowest in the module's order go, where a parent comes no
    sooner than its children; without a `rank` those used longest ago. Fewer than `count` are
    returned only when nothing else qualifies.
    """
    fit = within[is_fit(tables, within)]
    ranks = _ranks(tables, fit, rank)
    classes = _classify(tables, fit, ranks, protect, by_use=rank is None)
    return _first(tables, fit, (ranks, classes), count, protect)


def choose_beyond_quotas(
    tables: Tables, most: int, rank: Rank | None = None, *, share: float = 1.0
) -> Array:
    """Return up to `most` slots, in order, of namespaces over a `share` of their quotas."""
    over = quotas.excess(tables, share)
    if not over:
        return NO_SLOTS
    fit = np.flatnonzero(is_fit(tables, np.arange(tables.num_backed)))
    order = _ranks(tables, fit, rank), by_priority(tables, fit)
    return _beyond(tables, over, (fit, *order), NO_SLOTS, most)[:most]


def keep_evictable(
    tables: Tables, chosen: Array, *, protect: Array = NO_SLOTS, rank: Rank | None = None
) -> Array:
    """Return those of `chosen` that can go without any other, in the order in which they go.

    A block can go if it is fit and all its children are here and can go. A `rank` alone decides the
    order; without one it is the module's, except quotas, which need a look at all blocks.
    """
    ranks = _ranks(tables, chosen, rank)
    if rank is None:
        ranks = _joined(ranks, _classes(tables, chosen, by_use=True))
    return _keep_evictable(tables, chosen, ranks, protect)


def is_fit(tables: Tables, slots: Array) -> Array:
    """Return a mask of the `slots` that have READY blocks which nobody leases."""
    fit: Array = (tables.slot_state.take(slots) == READY) & (tables.slot_leases.take(slots) == 0)
    return fit


def by_priority(tables: Tables, slots: Array) -> Array:
    """Return the class of each of `slots`, i8, without quotas: the lower goes first."""
    classes: Array = tables.slot_priority.take(slots).astype(np.int64) + _WITHIN_QUOTA
    classes[tables.slot_tick.take(slots) == 0] = _GIVEN_UP
    return classes


def _classify(
    tables: Tables, fit: Array, ranks: Array, protect: Array, *, by_use: bool
) -> Array | None:
    """Return the class of each of the slots `fit`, i8: the lower goes first. None: all are in one.

    `ranks` are theirs; `by_use` says that they are the times of last use. `protect` must stay.
    """
    over = quotas.excess(tables)
    if not over:
        return _classes(tables, fit, by_use=by_use)
    classes = by_priority(tables, fit)
    beyond = np.zeros(tables.num_backed, dtype=bool)
    beyond[_beyond(tables, over, (fit, ranks, classes), protect)] = True
    classes[beyond[fit] & (classes >= _WITHIN_QUOTA)] -= _WITHIN_QUOTA - _BEYOND_QUOTA
    return classes


def _classes(tables: Tables, slots: Array, *, by_use: bool) -> Array | None:
    """Return the class of each of `slots` without quotas; None if rank alone decides."""
    priority = tables.slot_priority.take(slots)
    is_one = not len(slots) or priority.min() == priority.max()
    # A block that was given up counts as never used.
    if is_one and (by_use or tables.slot_tick.take(slots).all()):
        return None
    return by_priority(tables, slots)


def _beyond(
    tables: Tables,
    over: Mapping[int, int],
    blocks: tuple[Array, Array, Array],
    protect: Array,
    most: int | None = None,
) -> Array:
    """Return the blocks that go so that namespaces lose so many bytes, in order for each namespace.

    `over` has the bytes by namespace, and `blocks` are (slots, ranks, classes) of those that may
    go. At most `most` blocks of one namespace are looked for.
    """
    fit, ranks, classes = blocks
    found = [NO_SLOTS]
    for namespace, num_bytes in over.items():
        mine = np.flatnonzero(tables.slot_namespace.take(fit) == namespace)
        if not len(mine):
            continue
        # Without the lock a slab may have lost its blocks since.
        smallest = max(1, int(tables.block_bytes(fit[mine]).min()))
        count = min(-(-num_bytes // smallest), len(mine) if most is None else most)
        victims = _first(tables, fit[mine], (ranks[mine], classes[mine]), count, protect)
        sums = np.cumsum(tables.block_bytes(victims))
        found.append(victims[: np.searchsorted(sums, num_bytes) + 1])
    return np.concatenate(found)


def _first(
    tables: Tables, fit: Array, order: tuple[Array, Array | None], count: int, protect: Array
) -> Array:
    """Return up to `count` of the slots `fit`, in the order of their (ranks, classes)."""
    ranks, classes = order
    wanted = 4 * count
    while True:
        # The victims are among the lowest, unless their children come after them.
        low = np.arange(len(fit))
        if wanted < len(fit):
            low = _lowest(ranks, classes, wanted)
        joined = _joined(ranks[low], None if classes is None else classes[low])
        victims = _keep_evictable(tables, fit[low], joined, protect)
        if len(victims) >= count or wanted >= len(fit):
            return victims[:count]
        wanted *= 4


def _lowest(ranks: Array, classes: Array | None, count: int) -> Array:
    """Return the rows of the `count` lowest, in no order; there are more rows than that."""
    if classes is None:
        return np.argpartition(ranks, count - 1)[:count]
    last = np.searchsorted(np.cumsum(np.bincount(classes)), count)
    below, at = np.flatnonzero(classes < last), np.flatnonzero(classes == last)
    missing = count - len(below)
    if missing < len(at):
        at = at[np.argpartition(ranks[at], missing - 1)[:missing]]
    return np.concatenate((below, at))


def _joined(ranks: Array, classes: Array | None) -> Array:
    """Return one rank, f8, that orders by class and then by rank."""
    if classes is None:
        return ranks
    order = np.lexsort((ranks, classes))
    ranks, classes = ranks[order], classes[order]
    is_next = (ranks[1:] != ranks[:-1]) | (classes[1:] != classes[:-1])
    joined = np.empty(len(ranks))
    joined[order] = np.concatenate(([0], np.cumsum(is_next)))[: len(ranks)]
    return joined


def _keep_evictable(tables: Tables, chosen: Array, ranks: Array, protect: Array) -> Array:
    fits = is_fit(tables, chosen)
    if len(protect):
        fits &= ~np.isin(chosen, protect)
    order = np.argsort(chosen)
    order = order[fits[order]]
    fit = chosen[order]
    return leaves_first(
        fit,
        ranks[order],
        parents=tables.slot_parent[fit],
        num_children=tables.slot_children[fit],
        depths=tables.slot_depth[fit],
    )


def leaves_first(
    slots: Array, ranks: Array, *, parents: Array, num_children: Array, depths: Array
) -> Array:
    """Return those of the ascending `slots` that can go without any other, the lowest rank first.

    A parent comes no sooner than its children. The other arrays are rows of the slots: `parents`
    are slots, `num_children` counts those that are here.
    """
    nowhere = len(slots)
    at = np.searchsorted(slots, parents)
    here = np.append(slots, -2)[at] == parents
    above = np.append(np.where(here, at, nowhere), nowhere)
    children = np.bincount(above, minlength=nowhere + 1)[:nowhere]
    ranks = np.append(ranks, -np.inf)
    ranks[:nowhere][children != num_children] = np.inf
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
    order = np.lexsort((-depths.astype(np.int64), ranks))
    ordered: Array = slots[order[: np.count_nonzero(ranks != np.inf)]]
    return ordered


def _ranks(tables: Tables, slots: Array, rank: Rank | None) -> Array:
    ranks: Array = (tables.slot_tick[slots] if rank is None else rank(slots)).astype(np.float64)
    return ranks
