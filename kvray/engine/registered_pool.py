"""The pool that the worker registers with the shard, and what its blocks go by now.

A namespace needs the pool's layout, which only the worker knows, the model's name, which may take
minutes to find out, and the version of its weights, which may change while the engine runs.

A `Reading` is what an engine reads of a namespace: which blocks, and which parts of them for each
of its ranks. It reads its own namespace, which it stores as well, and, where heads are dealt alike,
those of engines of the same model with more or fewer ranks (`model.cache_layout`).
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

from kvray.engine.figures import EngineFigures
from kvray.engine.meta import ConnectorMeta, PrefixLease
from kvray.engine.model.cache_layout import (
    CacheLayout,
    layout_among,
    readable_sizes,
    resliced_parts,
)
from kvray.engine.model.engine_args import EngineArgs
from kvray.engine.model.model_name import ModelName, Weights, fingerprints_dir
from kvray.identity.block import UNNAMED, Namespace, namespace_id
from kvray.node import NodeLink, Registration
from kvray.store import PartRequest
from kvray.trace.reasons import EngineReason


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


_REST = 50
"""Times as long as a look at the arena takes is waited before the next one."""

_REST_MAX_S = 0.02

_NAME_WAIT_S = 1.0
"""How long the engine's start waits for the model's name; a known checkpoint takes no time."""


class RegisteredPool:
    """What both halves must know of one rank's pool; empty until the worker registers it."""

    def __init__(
        self,
        args: EngineArgs,
        link: NodeLink,
        figures: EngineFigures,
        *,
        model_key: str | None,
        weights_version: str | None,
        replica: str | None,
        tenants_check: str | None,
    ) -> None:
        """The texts are settings; `tenants_check` is that of the tenants' secret, if any."""
        self._args = args
        self._link = link
        self._figures = figures
        self._tenants_check = tenants_check
        self._registration: Registration | None = None
        self._replica = replica or link.process_name
        self.model_name = ModelName(args.model, model_key, cache_dir=fingerprints_dir())
        unnamed = None if args.weights_may_change else ""
        self.weights = Weights(unnamed if weights_version is None else weights_version)
        self._renewing = threading.Lock()
        self.identity = EngineIdentity(weights=self.weights.state)
        """As it was when the engine's thread last looked for new names."""
        self._seen: set[int] = set()  # numbers of namespaces that the arena had slots of
        self._look_at = 0.0
        self.rank = args.rank  # as the shard knows it

    @property
    def replica(self) -> str:
        """The replica's name: the shard gives another one if it is taken on this node."""
        return self._replica if self._registration is None else self._registration.replica

    @property
    def own(self) -> Reading:
        """What is read of the engine's own blocks; a pool is registered."""
        own = self.identity.own
        assert own is not None, "the caller has seen that a pool is registered"
        return own

    def is_own(self, read: "Reading | PrefixLease") -> bool:
        """Whether it is of blocks as the engine itself stores them."""
        return read.stored_by == self._args.num_parts_ranks

    def stored_by_others(self) -> list[Reading]:
        """Return those of the identity's `others` of which there are blocks.

        The shard tells of those on all nodes with each report. What is new in this node's arena is
        looked for as well, for so short a share of the time that no request feels it.
        """
        began, arena, registration = time.monotonic(), self._link.arena, self._registration
        if registration is None:
            return []
        known, others = registration.stored | self._seen, self.identity.others
        unseen = [one.number for one in others if one.number not in known]
        if unseen and arena is not None and began >= self._look_at:
            found = set(compress(unseen, arena.has_slots_of(unseen)))
            self._seen |= found
            known |= found
            now = time.monotonic()
            self._look_at = now + min(_REST * (now - began), _REST_MAX_S)
        return [one for one in others if one.number in known]

    @property
    def is_registered(self) -> bool:
        """Whether the worker has registered it."""
        return self._registration is not None

    @property
    def has_peers(self) -> bool:
        """Whether the shard has said that blocks may be staged, from other nodes or from disk."""
        return self._registration is not None and self._registration.has_peers

    def register(self, layout: CacheLayout) -> None:
        """Tell the shard of this rank, and complete the namespace if the model has a name.

        ConfigError: the model cannot be told from others. LayoutMismatch: another replica claims
        the same `model_key` with another layout.
        """
        args = self._args
        identity = EngineIdentity.of(args, layout)
        assert identity.own is not None, "it is of a pool"
        requests = identity.own.part_requests[args.part_rank]
        self._take(identity, rank=args.rank, part_requests=requests)

    def lead(self, identity: EngineIdentity) -> None:
        """Take what a rank has said of its pool, and tell the shard of a leader without a pool.

        It reads what all its ranks read, which are on this node, and has the number after theirs.
        Raises as `register`.
        """
        assert identity.own is not None, "it is of a pool"
        every = {one.part: one for requests in identity.own.part_requests for one in requests}
        parts = [every[part] for part in sorted(every)]
        self._take(identity, rank=self._args.num_ranks, part_requests=parts, num_ranks=1)

    def _take(
        self,
        identity: EngineIdentity,
        *,
        rank: int,
        part_requests: Sequence[PartRequest],
        num_ranks: int | None = None,
    ) -> None:
        figures = self._figures
        named = identity.named(self.model_name.find(_NAME_WAIT_S), self.weights.state)
        assert named.own is not None, "it is of a pool"
        self.unregister()
        registration = Registration(
            replica=self.replica,
            rank=rank,
            namespace=named.own.namespace,
            counters=lambda: {**figures.counters(), **self.model_name.counters()},
            log=figures.log,
            part_requests=tuple(part_requests),
            num_ranks=num_ranks or self._args.num_parts_ranks,
            engine_ranks=self._args.num_ranks,
            adapters=self._args.adapters,
            tenants=self._tenants_check,
            name_weights=self.name_weights,
        )
        self._link.register(registration)
        self._registration, self.rank, self.identity = registration, rank, named
        self._name()

    def unregister(self) -> None:
        """Take this rank off the shard's list; nothing is promised in its name any more."""
        if self._registration is not None:
            self._link.unregister(self._registration)
            self._registration = None
            self.identity = EngineIdentity(weights=self.identity.weights)

    def complete_namespace(self) -> bool:
        """Return whether the namespace is complete: its model and its weights have names now.

        Only the engine's thread calls this, once a request or pass, so no two reads there differ.
        """
        identity = self.identity
        is_old = identity.model != self.model_name.name or identity.weights != self.weights.state
        if is_old and self._registration is not None:
            self._name()
        return bool(self.identity.digest)

    @property
    def unnamed(self) -> EngineReason:
        """Why the namespace is not complete."""
        return "fingerprinting" if not self.identity.model else "weights_unnamed"

    def name_weights(self, version: str | None) -> None:
        """Take the version of the engine's weights, as `Weights.name`; from any thread.

        The shard hears of it with the next report. The engine's thread goes by it from its next
        request or pass on.
        """
        self.weights.name(version)
        self._renew()

    def _names(self) -> tuple[str, tuple[int, str | None]]:
        return self.model_name.name, self.weights.state

    def _name(self) -> None:
        """Have everything here called as it is called now."""
        self.identity = self.identity.named(*self._names())
        self._renew()

    def _renew(self) -> None:
        """Tell the shard of the present names; the last of several threads tells the last names."""
        with self._renewing:
            registration, own = self._registration, self.identity.own
            if registration is not None and own is not None:
                model, (_, weights) = self._names()
                registration.renew(own.named(model, weights).namespace)

    def may_load(self, meta: ConnectorMeta) -> bool:
        """Whether the leader's promises belong to this rank's pool.

        The leader may know the model's name before this rank does. This rank takes it from the
        leader for loads, as all ranks have one model, and saves nothing until it knows it itself.
        All ranks have the same weights as well, so their version is the leader's alone to know.
        """
        self.complete_namespace()
        identity = self.identity
        if identity.common or identity.own is None or not meta.model:
            return meta.namespace == identity.common
        return identity.own.named(meta.model).digest == meta.namespace

    def follow(self, replica: str) -> None:
        """Take the leader's name for the replica: the shard must know which ranks belong to it."""
        if replica != self.replica and self._registration is not None:
            self._replica = replica
            self._registration.rename(replica)
