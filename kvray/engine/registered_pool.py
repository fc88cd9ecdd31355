"""The pool that the worker registers with the shard, and the namespace of its blocks.

A namespace needs the pool's layout, which only the worker knows, the model's name, which may take
minutes to find out, and the version of its weights, which may change while the engine runs.

A `Reading` is what an engine reads of a namespace: which blocks, and which parts of them for each
of its ranks. It reads its own namespace, which it stores as well, and, where heads are dealt alike,
those of engines of the same model with more or fewer ranks (`model.reslicing`).
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

from kvray.engine.figures import EngineFigures
from kvray.engine.meta import ConnectorMeta, PrefixLease
from kvray.engine.model.adapters import fingerprints_dir
from kvray.engine.model.cache_layout import CacheLayout
from kvray.engine.model.engine_args import EngineArgs
from kvray.engine.model.model_name import ModelName, Weights
from kvray.engine.model.reslicing import layout_among, readable_sizes, resliced_parts
from kvray.identity.block import UNNAMED, Namespace, namespace_id
from kvray.node import NodeLink, Registration
from kvray.store import PartRequest
from kvray.trace.reasons import EngineReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Of blocks whose bytes are dealt to `stored_by` ranks; small and picklable."""

    namespace: Namespace
    stored_by: int
    part_requests: list[list[PartRequest]]
    """For each rank that the leader speaks for, the parts that its lease must have."""
    digest: bytes = b""
    """Of the namespace; empty while the model or its weights have no name."""

    @property
    def number(self) -> int:
        """What arenas know the namespace by."""
        return namespace_id(self.digest)

    def named(self, model: str, weights: str | None = "") -> "Reading":
        """Return it under the names of `Namespace.named`."""
        namespace = self.namespace.named(model, weights)
        is_unnamed = namespace.model == UNNAMED
        return replace(self, namespace=namespace, digest=b"" if is_unnamed else namespace.digest())


def own_reading(args: EngineArgs, layout: CacheLayout) -> Reading:
    """Return what is read of the blocks that the engine stores itself; the model has no name."""
    return _reading(args, layout, args.num_parts_ranks)


def other_readings(args: EngineArgs, layout: CacheLayout) -> tuple[Reading, ...]:
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
        self._own: Reading | None = None
        self._named_as: tuple[str, tuple[int, str | None]] = ("", self.weights.state)
        """The model's name, and the state of its weights, that `own` goes by."""
        self.identity = b""
        """Digest of what all ranks have in common: the namespace without the weights' version.
        Empty while no pool is registered or the model has no name."""
        self.others: tuple[Reading, ...] = ()
        """What is read of the blocks of engines with other numbers of ranks."""
        self._seen: set[int] = set()  # numbers of namespaces that the arena had slots of
        self._look_at = 0.0
        self.windowed: tuple[bool, ...] = (False,)
        """For each layer group, whether it has a window."""
        self.rank = args.rank  # as the shard knows it
        self.part_bytes = 0  # bytes of the first part of a block
        self.is_host = True
        self.is_flat = True
        """Whether it came as one tensor: such engines take all of an offer or nothing."""

    @property
    def replica(self) -> str:
        """The replica's name: the shard gives another one if it is taken on this node."""
        return self._replica if self._registration is None else self._registration.replica

    @property
    def own(self) -> Reading:
        """What is read of the engine's own blocks; a pool is registered."""
        assert self._own is not None, "the caller has seen that a pool is registered"
        return self._own

    def is_own(self, read: "Reading | PrefixLease") -> bool:
        """Whether it is of blocks as the engine itself stores them."""
        return read.stored_by == self._args.num_parts_ranks

    def stored_by_others(self) -> list[Reading]:
        """Return those of `others` of which there are blocks.

        The shard tells of those on all nodes with each report. What is new in this node's arena is
        looked for as well, for so short a share of the time that no request feels it.
        """
        began, arena, registration = time.monotonic(), self._link.arena, self._registration
        if registration is None:
            return []
        known = registration.stored | self._seen
        unseen = [one.number for one in self.others if one.number not in known]
        if unseen and arena is not None and began >= self._look_at:
            found = set(compress(unseen, arena.has_slots_of(unseen)))
            self._seen |= found
            known |= found
            now = time.monotonic()
            self._look_at = now + min(_REST * (now - began), _REST_MAX_S)
        return [one for one in self.others if one.number in known]

    @property
    def namespace_digest(self) -> bytes:
        """Empty while no pool is registered, or the model or its weights have no name."""
        return b"" if self._own is None else self._own.digest

    @property
    def is_registered(self) -> bool:
        """Whether the worker has registered it."""
        return self._registration is not None

    @property
    def has_peers(self) -> bool:
        """Whether the shard has said that blocks may be staged, from other nodes or from disk."""
        return self._registration is not None and self._registration.has_peers

    @property
    def has_windows(self) -> bool:
        """Whether some layers look back over a window only."""
        return any(self.windowed)

    def register(self, layout: CacheLayout) -> None:
        """Tell the shard of this rank, and complete the namespace if the model has a name.

        ConfigError: the model cannot be told from others. LayoutMismatch: another replica claims
        the same `model_key` with another layout.
        """
        args = self._args
        facts = PoolFacts.of(args, layout)
        self._take(facts, rank=args.rank, part_requests=facts.own.part_requests[args.part_rank])

    def lead(self, facts: "PoolFacts") -> None:
        """Take what a rank has said of its pool, and tell the shard of a leader without a pool.

        It reads what all its ranks read, which are on this node, and has the number after theirs.
        Raises as `register`.
        """
        every = {one.part: one for requests in facts.own.part_requests for one in requests}
        parts = [every[part] for part in sorted(every)]
        self._take(facts, rank=self._args.num_ranks, part_requests=parts, num_ranks=1)

    def _take(
        self,
        facts: "PoolFacts",
        *,
        rank: int,
        part_requests: Sequence[PartRequest],
        num_ranks: int | None = None,
    ) -> None:
        figures, name = self._figures, self.model_name.find(_NAME_WAIT_S)
        own = facts.own.named(name, self.weights.version)
        self.unregister()
        registration = Registration(
            replica=self.replica,
            rank=rank,
            namespace=own.namespace,
            counters=lambda: {**figures.counters(), **self.model_name.counters()},
            requests=figures.request_notes,
            block_tokens=figures.block_tokens,
            prompts=figures.prompts,
            part_requests=tuple(part_requests),
            num_ranks=num_ranks or self._args.num_parts_ranks,
            engine_ranks=self._args.num_ranks,
            adapters=self._args.adapters,
            tenants=self._tenants_check,
            name_weights=self.name_weights,
        )
        self._link.register(registration)
        self._registration, self.rank = registration, rank
        self.is_host, self.is_flat = facts.is_host, facts.is_flat
        self.windowed, self.part_bytes = facts.windowed, facts.part_bytes
        self._own, self.others = own, facts.others
        self._name()

    def unregister(self) -> None:
        """Take this rank off the shard's list; nothing is promised in its name any more."""
        if self._registration is not None:
            self._link.unregister(self._registration)
            self._registration = self._own = None
            self.others, self.identity = (), b""

    def complete_namespace(self) -> bool:
        """Return whether the namespace is complete: its model and its weights have names now.

        Only the engine's thread calls this, once a request or pass, so no two reads there differ.
        """
        if self._own is not None and self._named_as != self._names():
            self._name()
        return bool(self.namespace_digest)

    @property
    def changes(self) -> int:
        """How often the weights had changed when the namespace got its present names."""
        return self._named_as[1][0]

    @property
    def unnamed(self) -> EngineReason:
        """Why the namespace is not complete."""
        return "fingerprinting" if not self._named_as[0] else "weights_unnamed"

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
        model, (_, weights) = self._named_as = self._names()
        self._own = self.own.named(model, weights)
        self.others = tuple(one.named(model, weights) for one in self.others)
        self.identity = self._own.named(model).digest
        self._renew()

    def _renew(self) -> None:
        """Tell the shard of the present names; the last of several threads tells the last names."""
        with self._renewing:
            registration, own = self._registration, self._own
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
        if self.identity or self._own is None or not meta.model:
            return meta.namespace == self.identity
        return self._own.named(meta.model).digest == meta.namespace

    def follow(self, replica: str) -> None:
        """Take the leader's name for the replica: the shard must know which ranks belong to it."""
        if replica != self.replica and self._registration is not None:
            self._replica = replica
            self._registration.rename(replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What a leader must know of a rank's pool; small and picklable."""

    own: Reading  # the model has no name yet
    others: tuple[Reading, ...]
    windowed: tuple[bool, ...]  # for each layer group, whether it has a window
    part_bytes: int  # bytes of the first part of a block
    is_host: bool
    is_flat: bool

    @classmethod
    def of(cls, args: EngineArgs, layout: CacheLayout) -> "PoolFacts":
        """Return the facts of the pool that `layout` describes."""
        first, *_ = layout.parts(args.part_rank, args.num_parts_ranks, args.tokens_per_block)
        return cls(
            own=own_reading(args, layout),
            others=other_readings(args, layout),
            windowed=tuple(group.window is not None for group in layout.groups),
            part_bytes=first.block_bytes,
            is_host=layout.is_host,
            is_flat=layout.is_flat,
        )
