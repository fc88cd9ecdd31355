"""Blocks that shards offer to a node that joins, and which of them it takes from whom; pure."""

from collections.abc import Sequence

import numpy as np

from kvray.actors.mover.orders import Span
from kvray.actors.shard.giving.choice import linked, names_of
from kvray.actors.staging.peers import mover_of
from kvray.identity.block import split_keys
from kvray.store.arena import quotas
from kvray.store.arena.tables import Array, Tables

ROW = np.dtype(
    [
        ("key", "<u8", 4),
        ("parent", "<u8", 4),
        ("part", "<u4"),
        ("namespace", "<u4"),
        ("depth", "<u4"),
        ("head", "<u4"),
        ("on_disk", "?"),
        ("num_bytes", "<i8"),
    ]
)
"""One block of an offer. A block without a parent has zeros there."""

_BEHIND_MEMORY = 2**60
_MIX, _STIR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def offered(tables: Tables, slots: Array, *, on_disk: bool) -> Array:
    """Return the blocks in `slots` as rows of an offer, in their order."""
    rows = np.zeros(len(slots), dtype=ROW)
    parents = tables.parents(slots)
    rows["key"] = tables.slot_key[slots]
    rows["parent"] = np.where(parents[:, None] >= 0, tables.slot_key[parents], 0)
    for name in ("part", "namespace", "depth", "head"):
        rows[name] = getattr(tables, f"slot_{name}")[slots]
    rows["on_disk"], rows["num_bytes"] = on_disk, tables.block_bytes(slots)
    return rows


def merged(offers: Sequence[Array]) -> tuple[Array, Array]:
    """Return each block of the `offers` once, hottest first, and the offer that it is taken from.

    Blocks in the memory of one come before those that are on disks only; else the bytes before a
    block in its offer say how hot it is, in the best of several. A chain that several have comes
    from one of them, and all of them give their share.
    """
    rows = np.concatenate(offers)
    sources = np.repeat(np.arange(len(offers)), [len(one) for one in offers])
    places = np.concatenate([np.cumsum(one["num_bytes"]) for one in offers])
    places[rows["on_disk"]] += _BEHIND_MEMORY
    lots = _lots(rows["head"], sources)
    names = names_of(rows["key"][:, 0], rows["part"])
    order = np.lexsort((lots, rows["on_disk"], names))
    starts = np.flatnonzero(np.diff(names[order], prepend=~names[order[:1]]))
    first = np.minimum.reduceat(places[order], starts) if len(rows) else places
    chosen = order[starts][np.argsort(first, kind="stable")]
    return rows[chosen], sources[chosen]


def within_quotas(rows: Array, tables: Tables) -> Array:
    """Return a mask of the `rows` that fit into the quotas of `tables`, the first of them first."""
    fits = np.ones(len(rows), dtype=bool)
    if tables.quota_bytes.any():
        used = quotas.used(tables)
        for number in np.unique(rows["namespace"]).tolist():
            if (quota := quotas.quota_of(tables, number)) is not None:
                its = np.flatnonzero(rows["namespace"] == number)
                ends = used.get(number, (0, 0))[1] + np.cumsum(rows["num_bytes"][its])
                fits[its[ends > quota]] = False
    return fits


def spans_of(rows: Array, shards: Sequence[str]) -> list[tuple[list[int], Span]]:
    """Return the places of each chain of `rows` with its span; `shards` has each row's source."""
    keys, parents = split_keys(rows["key"].tobytes()), split_keys(rows["parent"].tobytes())
    parts = rows["part"].tolist()
    own = list(zip(shards, parts, keys, strict=True))
    before = zip(shards, parts, parents, strict=True)
    return [
        (
            chain,
            Span(
                source=mover_of(shards[chain[0]]),
                part=parts[chain[0]],
                keys=b"".join(keys[at] for at in chain),
                parent=parents[chain[0]] if any(parents[chain[0]]) else b"",
                depth=int(rows["depth"][chain[0]]),
                head=int(rows["head"][chain[0]]),
                needs_parent=False,
            ),
        )
        for chain in linked(own, before)
    ]


def _lots(heads: Array, sources: Array) -> Array:
    """Return what is the same for all blocks of a chain in an offer, and by chance otherwise."""
    lots = (heads.astype(np.uint64) << np.uint64(16) | sources.astype(np.uint64)) * _MIX
    lots = (lots ^ lots >> np.uint64(32)) * _STIR
    return lots ^ lots >> np.uint64(29)
