"""What a rank's KV cache is made of: layer groups, the byte ranges of their pages, and parts.

A block of the engine is one page in each of its layer groups. A *part* of the block is what one
rank, or all ranks alike, hold of one group's page; it takes one slot of the arena.

Engines of one model with other numbers of ranks read each other's blocks. Ranks get the KV heads in
turn, each as many as the others. A page is made of planes, such as the keys of one layer, and a
plane has the rank's heads one after the other. So the plane of a rank among T is, end to end, those
of k ranks among k * T. Blocks stay in the arena as they were stored; a load gathers from each plane
of a wider rank's part a run, or from parts of narrower ranks a run for each plane.

The namespace of such blocks has their sizes, and tells where heads are not dealt so: with more
ranks than heads several ranks hold the same one, and all parts together are larger.

A `Reading` is what an engine reads of a namespace: which blocks, and which parts of them for each
of its ranks. It reads its own namespace, which it stores as well, and, where heads are dealt alike,
those of engines of the same model with more or fewer ranks.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from kvray.engine.engine_args import EngineArgs
from kvray.identity.block import UNNAMED, Namespace, namespace_id, readable_ranks
from kvray.store import PartRequest


class LayerRange(NamedTuple):
    """Bytes of a page that some layers read, in place before the first of these runs."""

    layers: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of bytes that repeats once per page."""

    pages: torch.Tensor
    """u8 [num_pages, size]; rows may lie apart, bytes of a row may not. The engine's memory."""
    steps: tuple[LayerRange, ...]  # the bytes of a page in order, without gap
    num_planes: int = 0
    """Equal shares of a page, each with the rank's KV heads one after the other, such as the keys
    of one layer; 0: it is not known to be made of such."""
    view: tuple[tuple[int, int], ...] = ()
    """(Length, stride) of each dimension that the engine's kernels see in a layer's page, in
    elements; empty: that is not told."""

    @property
    def is_gap(self) -> bool:
        """Whether it stands for bytes of a slot that this rank does not read: it has no page."""
        return not len(self.pages)

    @property
    def size(self) -> int:
        """Bytes of one page."""
        return self.pages.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers whose pages are counted together."""

    layers: tuple[int, ...]
    window: int | None  # tokens that its attention looks back; None: all
    own: tuple[Region, ...]  # what differs from rank to rank
    shared: tuple[Region, ...] = ()  # what is the same on all ranks


@dataclass(frozen=True, kw_only=True)
class Part:
    """What this rank copies of one group's pages from or to one slot each."""

    index: int  # among the parts of a block
    num_ranks: int  # ranks that the block's bytes are dealt to
    group: int
    regions: tuple[Region, ...]  # end to end they are the slot's bytes
    window_blocks: int | None
    is_stored_here: bool  # whether this rank stores it; every rank that has it reads it

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one slot."""
        return sum(region.size for region in self.regions)

    @cached_property
    def request(self) -> PartRequest:
        """What a lease must have of it."""
        return PartRequest(self.index, self.window_blocks, self.block_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The KV cache of one rank."""

    groups: tuple[Group, ...]
    dtype: str
    kv_factor: int
    """2 for separate keys and values, 1 for a latent (MLA) cache, 0 if groups tell."""
    tokens_per_block: int | None
    """As the layout has it; None: the engine's arguments have it."""
    is_flat: bool  # whether it came as one tensor

    @property
    def is_host(self) -> bool:
        """Whether its pages lie in host memory."""
        group = self.groups[0]
        return (group.own or group.shared)[0].pages.device.type == "cpu"

    def num_parts(self, num_ranks: int) -> int:
        """Return how many parts make a block of an engine of `num_ranks` whole."""
        return len(_places(self.groups, num_ranks))

    def parts(
        self, rank: int, num_ranks: int, tokens_per_block: int, *, ranks_per_node: int = 0
    ) -> tuple[Part, ...]:
        """Return what `rank` reads of a block, in the order in which its lease has them.

        The first rank on each node stores what is the same on all; `ranks_per_node` 0: one node.
        """
        return tuple(
            Part(
                index=index,
                num_ranks=num_ranks,
                group=group,
                regions=self.groups[group].shared if owner is None else self.groups[group].own,
                window_blocks=_blocks(self.groups[group].window, tokens_per_block),
                is_stored_here=owner == rank
                or (owner is None and rank % (ranks_per_node or num_ranks) == 0),
            )
            for index, (group, owner) in enumerate(_places(self.groups, num_ranks))
            if owner in (rank, None)
        )

    def describe(self) -> str:
        """Return what distinguishes it from other layouts, as one canonical text."""
        groups = [
            {
                "layers": group.layers,
                "window": group.window,
                "own": [_describe(region) for region in group.own],
                "shared": [_describe(region) for region in group.shared],
            }
            for group in self.groups
        ]
        return json.dumps(groups, sort_keys=True, separators=(",", ":"))


def _places(groups: Sequence[Group], num_ranks: int) -> list[tuple[int, int | None]]:
    """Return (group, rank) of every part of a block; rank None: the same on all ranks."""
    places: list[tuple[int, int | None]] = []
    for index, group in enumerate(groups):
        if group.own:
            places += [(index, rank) for rank in range(num_ranks)]
        if group.shared:
            places.append((index, None))
    return places


def _blocks(window: int | None, tokens_per_block: int) -> int | None:
    """Return how many trailing blocks a window needs at most; None: all."""
    return None if window is None else max(1, -(-window // tokens_per_block))


def _describe(region: Region) -> list[object]:
    return [
        region.size,
        [[*step] for step in region.steps],
        *([region.view] if region.view else ()),
    ]


_SIZES = (1, 2, 4, 8)
_PLAIN_DTYPES = frozenset(("float16", "bfloat16", "float32"))
"""With others there may be scales, which need not be the same for all heads."""


def readable_sizes(
    layout: CacheLayout, num_ranks: int, num_kv_heads: int | None
) -> tuple[int, ...]:
    """Return other numbers of ranks whose blocks a rank among `num_ranks` can read.

    `num_kv_heads` are those of a layer of the model, None if not known, 0 if layers differ.
    """
    are_plain = all(
        group.window is None and not group.shared and all(one.num_planes for one in group.own)
        for group in layout.groups
    )
    if layout.dtype not in _PLAIN_DTYPES or not are_plain:
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
    if stored_by == num_ranks:
        return layout.parts(rank, num_ranks, tokens_per_block)
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
    wider, narrower = max(1, stored_by // num_ranks), max(1, num_ranks // stored_by)
    size = plane // wider  # of a run, which is a share of our plane or all of it
    at, before = other % wider * size, rank % narrower * plane
    after = (narrower - 1) * plane - before
    skipped = before
    for start in range(at, region.size, plane):
        if skipped:
            yield Region(pages=region.pages.new_empty((0, skipped)), steps=())
        layers = next(step.layers for step in region.steps if step.start <= start < step.stop)
        pages = region.pages[:, start : start + size]
        yield Region(pages=pages, steps=(LayerRange(layers, 0, size),))
        skipped = after + before
    if after:
        yield Region(pages=region.pages.new_empty((0, after)), steps=())


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Of blocks whose bytes are dealt to `stored_by` ranks; small and picklable."""

    namespace: Namespace
    stored_by: int
    part_requests: list[list[PartRequest]]
    """For each rank that the leader speaks for, the parts that its lease must have."""
    digest: bytes = b""
    """Of the namespace; empty while the model or its weights have no name."""

    @cached_property
    def number(self) -> int:
        """What arenas know the namespace by."""
        return namespace_id(self.digest)

    def named(self, model: str, weights: str | None = "") -> "Reading":
        """Return it under the names of `Namespace.named`."""
        namespace = self.namespace.named(model, weights)
        is_unnamed = namespace.model == UNNAMED
        return replace(self, namespace=namespace, digest=b"" if is_unnamed else namespace.digest())


@dataclass(frozen=True, kw_only=True)
class EngineIdentity:
    """What an engine's blocks go by, and how they lie in its pool; small and picklable.

    A rank makes it of its pool, a leader without one is given it. It is replaced whole when the
    model gets its name, or its weights another one. By default it is that of no pool.
    """

    readings: tuple[Reading, ...] = ()
    """What is read: the engine's own blocks, then those of engines with other numbers of ranks."""
    windowed: tuple[bool, ...] = (False,)  # for each layer group, whether it has a window
    is_host: bool = True
    is_flat: bool = True
    """Whether it came as one tensor: such engines take all of an offer or nothing."""
    model: str = ""  # empty: it has no name yet
    weights: tuple[int, str | None] = (0, None)  # how often they have changed, and their version
    digest: bytes = b""
    """Of the engine's own namespace; empty while there is none, or it is not complete."""
    common: bytes = b""
    """Digest of what all ranks have in common: the namespace without the weights' version. Empty
    while no pool is registered or the model has no name."""

    @classmethod
    def of(cls, args: EngineArgs, layout: CacheLayout) -> "EngineIdentity":
        """Return that of the pool that `layout` describes; the model has no name."""
        return cls(
            readings=tuple(_reading(args, layout, size) for size in sizes_read(args, layout)),
            # A pool of one window says nothing of it, and its manager lets front blocks go, too.
            windowed=tuple(one.window is not None or bool(args.windows) for one in layout.groups),
            is_host=layout.is_host,
            is_flat=layout.is_flat,
        )

    @property
    def own(self) -> Reading:
        """What is read of the engine's own blocks; a pool is registered."""
        return self.readings[0]

    @cached_property
    def has_windows(self) -> bool:
        """Whether some layers look back over a window only."""
        return any(self.windowed)

    def named(self, model: str, weights: tuple[int, str | None]) -> "EngineIdentity":
        """Return it under the names that its model and its weights have now."""
        readings = tuple(one.named(model, weights[1]) for one in self.readings)
        return replace(
            self,
            readings=readings,
            model=model,
            weights=weights,
            digest=readings[0].digest,
            common=self.own.named(model).digest,
        )


def sizes_read(args: EngineArgs, layout: CacheLayout) -> tuple[int, ...]:
    """Return the numbers of ranks whose blocks the engine's ranks read, its own first.

    Ranks of one request are on one node: no shard leases other engines' blocks for ranks elsewhere.
    """
    own = args.num_parts_ranks
    if args.attention_dp or args.is_spread:
        return (own,)
    return (own, *readable_sizes(layout, own, args.checkpoint.num_kv_heads))


def _reading(args: EngineArgs, layout: CacheLayout, stored_by: int) -> Reading:
    """Return what the engine's ranks, of this layout, read of blocks of `stored_by` ranks."""
    own, size = args.num_parts_ranks, args.tokens_per_block
    stored = layout if stored_by == own else layout_among(layout, own, stored_by)
    namespace = Namespace(
        model=UNNAMED,
        quantization=args.quantization,
        overrides=args.overrides,
        kv_dtype=layout.dtype,
        num_layers=sum(len(group.layers) for group in layout.groups),
        kv_factor=layout.kv_factor,
        tokens_per_block=size,
        part_bytes=sum(part.block_bytes for part in stored.parts(0, stored_by, size)),
        num_parts=stored.num_parts(stored_by),
        tp_layout=_tp_layout(args, layout, stored_by),
        layer_groups=stored.describe(),
        attention_backend=args.attention_backend,
        engine=args.engine,
    )
    requests = [
        [part.request for part in resliced_parts(layout, rank, own, stored_by, size)]
        for rank in range(own)
    ]
    return Reading(namespace=namespace, stored_by=stored_by, part_requests=requests)


def _tp_layout(args: EngineArgs, layout: CacheLayout, stored_by: int) -> str:
    if not any(group.own for group in layout.groups):
        return "tp1"  # a latent cache: each rank has all of a block, however many there are
    return f"dp{args.num_ranks}" if args.attention_dp else f"tp{stored_by}"
