"""Blocks that engines with another number of ranks have stored: which bytes of them a rank reads.

Ranks get the KV heads in turn, each as many as the others. A page is made of planes, such as the
keys of one layer, and a plane has the rank's heads one after the other. So the plane of a rank
among T is, end to end, those of k ranks among k * T. Blocks stay in the arena as they were stored;
a load gathers from each plane of a wider rank's part a run, or from parts of narrower ranks a run
for each plane.

The namespace of such blocks has their sizes, and tells where heads are not dealt so: with more
ranks than heads several ranks hold the same one, and all parts together are larger.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvray.engine.model.cache_layout import CacheLayout, Group, LayerRange, Part, Region
from kvray.identity.block import readable_ranks

_SIZES = (1, 2, 4, 8)
_PLAIN_DTYPES = frozenset(("float16", "bfloat16", "float32"))
"""With others there may be scales, which need not be the same for all heads."""


def readable_sizes(
    layout: CacheLayout, num_ranks: int, num_kv_heads: int | None
) -> tuple[int, ...]:
    """Return other numbers of ranks whose blocks a rank among `num_ranks` can read.

    `num_kv_heads` are those of a layer of the model, None if not known, 0 if layers differ.
    """
    if layout.dtype not in _PLAIN_DTYPES or not all(map(_has_planes, layout.groups)):
        return ()
    if num_kv_heads is not None and (not num_kv_heads or num_kv_heads % num_ranks):
        return ()
    return tuple(
        other
        for other in _SIZES
        if other != num_ranks
        and (other % num_ranks == 0 or num_ranks % other == 0)
        and (num_kv_heads is None or num_kv_heads % other == 0)
        and all(
            region.size * num_ranks % (region.num_planes * other) == 0
            for group in layout.groups
            for region in group.own
        )
    )


def layout_among(layout: CacheLayout, num_ranks: int, others: int) -> CacheLayout:
    """Return the layout, without pages, of one of `others` ranks if this is one of `num_ranks`."""
    return replace(
        layout,
        groups=tuple(
            replace(group, own=tuple(_resized(region, num_ranks, others) for region in group.own))
            for group in layout.groups
        ),
    )


def resliced_parts(
    layout: CacheLayout, rank: int, num_ranks: int, stored_by: int, tokens_per_block: int
) -> tuple[Part, ...]:
    """Return what `rank` reads of a block of `stored_by` ranks, in the order of its lease."""
    stored = layout_among(layout, num_ranks, stored_by)
    return tuple(
        replace(
            part,
            regions=tuple(
                piece
                for region in layout.groups[part.group].own
                for piece in _pieces(region, rank, num_ranks, other, stored_by)
            ),
            is_stored_here=False,
        )
        for other in readable_ranks(rank, num_ranks, stored_by)
        for part in stored.parts(other, stored_by, tokens_per_block)
    )


def _has_planes(group: Group) -> bool:
    is_plain = group.window is None and not group.shared
    return is_plain and all(region.num_planes for region in group.own)


def _resized(region: Region, num_ranks: int, others: int) -> Region:
    size = region.size * num_ranks // others
    return replace(
        region,
        pages=region.pages.new_empty((0, size)),
        steps=tuple(
            LayerRange(layers, start * num_ranks // others, stop * num_ranks // others)
            for layers, start, stop in region.steps
        ),
    )


def _pieces(
    region: Region, rank: int, num_ranks: int, other: int, stored_by: int
) -> Iterator[Region]:
    """Yield the pages' runs, and the gaps between them, that a page of rank `other` is made of."""
    plane = region.size // region.num_planes
    if stored_by > num_ranks:
        share = plane * num_ranks // stored_by
        at = (other - rank * stored_by // num_ranks) * share
        for start in range(0, region.size, plane):
            yield _run(region, start + at, share)
        return
    ratio = num_ranks // stored_by
    skipped = rank % ratio * plane
    for start in range(0, region.size, plane):
        if skipped:
            yield _gap(region, skipped)
        yield _run(region, start, plane)
        skipped = (ratio - 1) * plane
    if rest := (ratio - 1 - rank % ratio) * plane:
        yield _gap(region, rest)


def _run(region: Region, start: int, size: int) -> Region:
    layers = next(step.layers for step in region.steps if step.start <= start < step.stop)
    pages = region.pages[:, start : start + size]
    return Region(pages=pages, steps=(LayerRange(layers, 0, size),))


def _gap(region: Region, size: int) -> Region:
    return Region(pages=region.pages.new_empty((0, size)), steps=())
