"""What an engine's blocks go by, and how they lie in its pool.

A namespace needs the pool's layout, which only the worker knows, the model's name, which may take
minutes to find out, and the version of its weights, which may change while the engine runs.

A `Reading` is what an engine reads of a namespace: which blocks, and which parts of them for each
of its ranks. It reads its own namespace, which it stores as well, and, where heads are dealt alike,
those of engines of the same model with more or fewer ranks (`model.reslicing`).
"""

from dataclasses import dataclass, replace
from functools import cached_property

from kvray.engine.model.cache_layout import CacheLayout
from kvray.engine.model.engine_args import EngineArgs
from kvray.engine.model.reslicing import layout_among, readable_sizes, resliced_parts
from kvray.identity.block import UNNAMED, Namespace, namespace_id
from kvray.store import PartRequest


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

    own: Reading | None = None  # what is read of the engine's own blocks
    others: tuple[Reading, ...] = ()
    """What is read of the blocks of engines with other numbers of ranks."""
    windowed: tuple[bool, ...] = (False,)  # for each layer group, whether it has a window
    is_host: bool = True
    is_flat: bool = True
    """Whether it came as one tensor: such engines take all of an offer or nothing."""
    model: str = ""  # empty: it has no name yet
    weights: tuple[int, str | None] = (0, None)  # how often they have changed, and their version
    common: bytes = b""
    """Digest of what all ranks have in common: the namespace without the weights' version. Empty
    while no pool is registered or the model has no name."""

    @classmethod
    def of(cls, args: EngineArgs, layout: CacheLayout) -> "EngineIdentity":
        """Return that of the pool that `layout` describes; the model has no name."""
        return cls(
            own=_reading(args, layout, args.num_parts_ranks),
            others=_other_readings(args, layout),
            windowed=tuple(group.window is not None for group in layout.groups),
            is_host=layout.is_host,
            is_flat=layout.is_flat,
        )

    @cached_property
    def digest(self) -> bytes:
        """Digest of the namespace; empty while there is none, or it is not complete."""
        return b"" if self.own is None else self.own.digest

    @cached_property
    def has_windows(self) -> bool:
        """Whether some layers look back over a window only."""
        return any(self.windowed)

    def named(self, model: str, weights: tuple[int, str | None]) -> "EngineIdentity":
        """Return it under the names that its model and its weights have now."""
        if self.own is None:
            return self
        return replace(
            self,
            own=self.own.named(model, weights[1]),
            others=tuple(one.named(model, weights[1]) for one in self.others),
            model=model,
            weights=weights,
            common=self.own.named(model).digest,
        )


def _other_readings(args: EngineArgs, layout: CacheLayout) -> tuple[Reading, ...]:
    """Return what is read of the blocks of engines with other numbers of ranks."""
    own, size = args.num_parts_ranks, args.tokens_per_block
    return tuple(
        replace(
            _reading(args, layout_among(layout, own, other), other),
            part_requests=[
                [part.request for part in resliced_parts(layout, rank, own, other, size)]
                for rank in range(own)
            ],
        )
        for other in other_sizes(args, layout)
    )


def other_sizes(args: EngineArgs, layout: CacheLayout) -> tuple[int, ...]:
    """Return other numbers of ranks whose blocks the engine's ranks read.

    Those of one request are on one node: no shard leases such blocks for ranks elsewhere.
    """
    if args.attention_dp or args.is_spread:
        return ()
    return readable_sizes(layout, args.num_ranks, args.checkpoint.num_kv_heads)


def _reading(args: EngineArgs, layout: CacheLayout, num_ranks: int) -> Reading:
    """Return what each of `num_ranks` ranks with this layout reads of their own blocks."""
    parts = layout.parts(0, num_ranks, args.tokens_per_block)
    namespace = Namespace(
        model=UNNAMED,
        quantization=args.quantization,
        overrides=args.overrides,
        kv_dtype=layout.dtype,
        num_layers=sum(len(group.layers) for group in layout.groups),
        kv_factor=layout.kv_factor,
        tokens_per_block=args.tokens_per_block,
        part_bytes=sum(part.block_bytes for part in parts),
        num_parts=layout.num_parts(num_ranks),
        tp_layout=_tp_layout(args, layout, num_ranks),
        layer_groups=layout.describe(),
        attention_backend=args.attention_backend,
        engine=args.engine,
    )
    return Reading(
        namespace=namespace,
        stored_by=num_ranks,
        part_requests=layout.part_requests(num_ranks, args.tokens_per_block),
    )


def _tp_layout(args: EngineArgs, layout: CacheLayout, num_ranks: int) -> str:
    if not any(group.own for group in layout.groups):
        return "tp1"  # a latent cache: each rank has all of a block, however many there are
    return f"dp{args.num_ranks}" if args.attention_dp else f"tp{num_ranks}"
