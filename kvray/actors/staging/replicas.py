"""The replicas whose ranks have registered with a shard, and their figures.

Values that engines and other shards send are checked here.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from kvray.actors.staging.plan import Prefix
from kvray.errors import ConfigError, LayoutMismatch
from kvray.identity.block import (
    KEY_BYTES,
    UNNAMED,
    BlockKey,
    Namespace,
    namespace_id,
    readable_parts,
    split_keys,
)
from kvray.index import PARTS_MAX
from kvray.store import Membership, PartRequest

T = TypeVar("T")

Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Name = Annotated[
    str,
    Field(
        strict=True,
        min_length=1,
        max_length=256,
        pattern=r"^[^\x00-\x1f\x7f-\x9f\x{2028}\x{2029}\x{202a}-\x{202e}\x{2066}-\x{2069}]*$",
    ),
]
"""Of a replica or a counter: logs, terminals and metrics get it as it is, so it is one line."""
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


def checked(kind: TypeAdapter[T], value: Any, name: str) -> T:
    """Return `value`, with tuples for lists; ConfigError if it is not of that kind."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(one) for one in (name, *first["loc"]))
        raise ConfigError(
            f"{place} cannot be {first['input']!r:.40}: {first['msg']}; engine and shard differ."
        ) from None


def keys_of(keys: object, *, keys_max: int | None = None) -> Sequence[BlockKey]:
    """Return the keys that lie end to end in `keys`; ConfigError if they are none, or too many."""
    if not isinstance(keys, bytes) or not keys or len(keys) % KEY_BYTES:
        raise ConfigError(f"keys are bytes, {KEY_BYTES} for each block and at least one.")
    if keys_max is not None and len(keys) > keys_max * KEY_BYTES:
        raise ConfigError(f"{len(keys) // KEY_BYTES} keys are too many; at most {keys_max}.")
    return split_keys(keys)


_RANKS_MAX = 4096
ENDED_S = 600.0  # how long an ended rank is known by name; then its counts go into a sum
ENDED_MAX = 32  # ended ranks known by name: pods have new names at each start
BACK_S = 15.0
"""How long each of them is: engines whose connection broke are back within seconds."""
_NAMESPACES_MAX = 64
_COUNTERS_MAX = 256
_AGE = "uptime_s"  # the one counter that the sum leaves out
_PARTS_MAX = 256
_NAMESPACE_MAX = 64 * 2**10
"""Characters of all texts of a namespace: the lookup keeps it, and answers carry it."""

_Part = Annotated[Count, Field(lt=PARTS_MAX)]
_Text = Annotated[str, Field(strict=True, max_length=_NAMESPACE_MAX)]
_Number = Annotated[int, Field(strict=True)]

MODEL_KEY_PREFIX = "key:"
"""`Namespace.model` begins with this where a `model_key` was given instead of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How a rank reads blocks; staging needs all of it. `Replicas` has checked its sizes."""

    namespace: Namespace
    part_requests: tuple[PartRequest, ...] = (PartRequest(0),)
    """The parts that its leases must have."""
    num_ranks: int = 1
    """Ranks that it asks for: all of the replica, or itself alone."""
    engine_ranks: int = 1
    """Ranks that its engine has, 0, 1, 2, ...; 1: nobody counts them."""
    arena_id: str = ""
    """The arena in which it has its `member`ship."""
    member: Membership | None = None
    adapters: str | None = None
    """How its engine reads LoRA adapters; None: it did not say."""
    tenants: str | None = None
    """`TenantSalts.check` of the secret behind its salts; None: no secret."""
    served: str = ""
    """What its engine's model is called, for people."""

    def ranks(self, rank: int) -> list[int]:
        """Return the ranks that it asks for as `rank`."""
        return [rank] if self.num_ranks == 1 else list(range(self.num_ranks))

    def resliced(self, stored_by: int) -> "Reader":
        """Return how it reads blocks whose bytes are dealt to `stored_by` ranks, without windows.

        ConfigError: they cannot be dealt from so many to its own.
        """
        own = [one.part for one in self.part_requests]
        num_ranks = max(1, self.namespace.num_parts // len(own))
        if stored_by % num_ranks and num_ranks % stored_by:
            raise ConfigError(
                f"{num_ranks} ranks cannot read the blocks of {stored_by}; update the engine's"
                " kvray."
            )
        parts = readable_parts(own, num_ranks, stored_by)
        if max(parts) >= PARTS_MAX:
            raise ConfigError(
                f"Blocks of {stored_by} ranks have more than {PARTS_MAX} parts; update the engine's"
                " kvray."
            )
        num_bytes = self.namespace.part_bytes * num_ranks // stored_by * len(parts) // len(own)
        return replace(
            self,
            namespace=replace(self.namespace, part_bytes=num_bytes),
            part_requests=tuple(map(PartRequest, parts)),
        )

    @property
    def part_bytes(self) -> int:
        """Bytes of one of its parts of a block, on average."""
        return max(1, self.namespace.part_bytes // len(self.part_requests))

    @property
    def block_bytes(self) -> dict[int, int]:
        """Part -> bytes of one block of it."""
        average = self.part_bytes
        return {part: size or average for part, _, size in self.part_requests}


def prefix_for(
    blocks: Sequence[BlockKey], readers: Iterable[Reader], tokens_per_s: float
) -> Prefix:
    """Return the prefix that `readers` need of `blocks`; an engine computes `tokens_per_s`."""
    requests, tokens_per_block, namespace = [], 0, 0
    block_bytes: dict[int, int] = {}
    for reader in readers:
        requests.append(reader.part_requests)
        block_bytes |= reader.block_bytes
        tokens_per_block = reader.namespace.tokens_per_block
        namespace = namespace_id(reader.namespace.digest())
    return Prefix(
        keys=tuple(blocks),
        readers=tuple(requests),
        block_bytes=block_bytes,
        namespace=namespace,
        seconds_per_block=tokens_per_block / tokens_per_s if tokens_per_s > 0 else 0.0,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class WeightsOrder:
    """What engines are told of their weights, until they have carried it out."""

    number: str  # no other order has it
    version: str | None  # None: they are being replaced
    waiting: set[int]  # ranks that have not said yet that they go by it


@dataclass(slots=True)
class _Rank:
    reader: Reader
    digest: str
    connection: int | None
    instance: str = ""
    ended_at: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    weights_order: WeightsOrder | None = None

    @property
    def fields(self) -> dict[str, object]:
        """Its namespace, and what the model is called."""
        return {**self.reader.namespace.to_wire(), "served": self.reader.served}


class _Reads(BaseModel):
    """The fields of a registration, as on the wire."""

    model_config = ConfigDict(extra="forbid")

    wanted: tuple[
        tuple[_Part, Positive | None] | tuple[_Part, Positive | None, Positive | None], ...
    ] = Field(default=((0, None),), min_length=1, max_length=_PARTS_MAX)
    """Part, window, and perhaps size, of each part that its leases must have."""
    num_ranks: Annotated[Positive, Field(le=_RANKS_MAX)] = 1
    engine_ranks: Annotated[Positive, Field(le=_RANKS_MAX)] = 1
    holder: tuple[_Text, Count, Count] | None = None
    """Arena, row and generation of its membership."""
    adapters: _Text | None = None
    tenants: Name | None = None
    served: Annotated[Name, Field(min_length=0)] = ""


_READS = TypeAdapter(_Reads)
_COUNTERS: TypeAdapter[dict[str, int]] = TypeAdapter(
    Annotated[dict[Name, _Number], Field(max_length=_COUNTERS_MAX)]
)
_NAME, _RANK, _SIZE = TypeAdapter(Name), TypeAdapter(Count), TypeAdapter(Positive)
_INSTANCE: TypeAdapter[str] = TypeAdapter(Annotated[Name, Field(min_length=0, max_length=64)])
_READABLE, _SUFFIX = 200, 8  # characters of a taken name, and of the instance behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The rank that a report is of."""

    replica: str
    rank: int
    namespace: Namespace


class Replicas:
    """The ranks that use this shard or did lately; the counts of earlier ones are a sum.

    Of too many the oldest goes into the sum, a disconnected one first. One thread changes it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._num_ended = 0
        self._ended: Counter[str] = Counter()
        # By digest; blocks of ranks that ended, or changed theirs, are still there and need them.
        self._namespaces: dict[str, dict[str, object]] = {}

    def register(
        self,
        connection: int,
        replica: str,
        rank: int,
        reads: Namespace | Reader,
        *,
        instance: str = "",
    ) -> str:
        """Enter the rank of a connection, with its namespace or how it reads.

        `instance` tells an engine that connects again from another one of the same name. Returns
        the name that the rank goes by: another one while another instance with this name lives.
        Under one name the figures of two engines would look like one that restarts all the time.

        Raises:
            ConfigError: the name is invalid, or the namespace has fields of wrong types.
            LayoutMismatch: a connected replica gave the same `model_key` for another layout.
        """
        _check_name(replica, rank)
        instance = checked(_INSTANCE, instance, "instance")
        holder = self._ranks.get((replica, rank))
        if holder is not None and holder.connection is not None and holder.instance != instance:
            replica = f"{replica[:_READABLE]}-{instance[:_SUFFIX] or connection}"
        reader = reads if isinstance(reads, Reader) else Reader(namespace=reads)
        namespace = reader.namespace
        # Computed now: a bad namespace must fail its own engine, not a later status.
        digest = namespace.digest().hex()[:8]
        for name in ("tokens_per_block", "part_bytes", "num_parts"):
            checked(_SIZE, getattr(namespace, name), name)
        if not isinstance(namespace.model, str):
            raise ConfigError(f"A namespace's model must be a text, not {namespace.model!r}.")
        length = sum(len(str(value)) for value in namespace.to_wire().values())
        if length > _NAMESPACE_MAX:
            raise ConfigError(
                f"A namespace of {length} characters exceeds the {_NAMESPACE_MAX} that a shard"
                " takes; shorten the overrides of the checkpoint's configuration."
            )
        for (other, _), entry in self._ranks.items():
            if other != replica and entry.connection is not None:
                _check_layout(replica, namespace, other, entry.reader.namespace)
        former = self._ranks.pop((replica, rank), None)
        if former is not None:
            self._remember(former)
        entry = self._ranks[replica, rank] = _Rank(reader, digest, connection, instance)
        if former is not None and former.connection == connection:
            entry.weights_order = former.weights_order  # else it is another engine
        if len(self._ranks) > _RANKS_MAX:
            gone = (key for key, entry in self._ranks.items() if entry.connection is None)
            self._add_up(next(gone, next(iter(self._ranks))))
        return replica

    def report(
        self,
        connection: int,
        replica: str,
        rank: int,
        counters: dict[str, int],
        *,
        leaving: bool = False,
    ) -> Origin | None:
        """Keep a rank's latest figures and return its origin; None if it has to register first.

        With `leaving` they are its last ones, and it counts as disconnected from then on. Invalid
        figures raise ConfigError.
        """
        _check_name(replica, rank)
        counters = checked(_COUNTERS, counters, "counters")
        entry = self._ranks.get((replica, rank))
        if entry is None or entry.connection != connection:
            return None
        entry.counters = counters
        if leaving:
            entry.connection, entry.ended_at = None, self._clock()
        return Origin(replica=replica, rank=rank, namespace=entry.reader.namespace)

    def order_weights(self, replica: str, version: str | None) -> WeightsOrder:
        """Have the connected ranks of `replica` told the version of their weights.

        The order takes the place of an earlier one. A rank whose engine ends, or is started again,
        never carries it out: it says nothing of the new engine's weights.
        """
        ranks = {rank for name, rank in self.connected() if name == replica}
        order = WeightsOrder(number=secrets.token_hex(8), version=version, waiting=ranks)
        for rank in ranks:
            self._ranks[replica, rank].weights_order = order
        return order

    def call_off(self, order: WeightsOrder) -> None:
        """Tell the order to nobody from now on: what the engine does meanwhile may outdate it."""
        for entry in self._ranks.values():
            if entry.weights_order is order:
                entry.weights_order = None

    def weights_order(self, replica: str, rank: int, done: str) -> list[str | None] | None:
        """Return number and version of the order for a rank that has carried out `done` at last.

        None: there is none. It is given until it is done, as an answer may be lost.
        """
        entry = self._ranks[replica, rank]
        order = entry.weights_order
        if order is not None and order.number == done:
            order.waiting.discard(rank)
            order = entry.weights_order = None
        return None if order is None else [order.number, order.version]

    def reader(self, replica: str, rank: int, connection: int | None = None) -> Reader | None:
        """Return how a rank reads; None if it is not connected, or not on that `connection`."""
        entry = self._ranks.get((replica, rank))
        if entry is None or entry.connection is None:
            return None
        return entry.reader if connection in (None, entry.connection) else None

    def readers(self, replica: str, ranks: Iterable[int]) -> dict[int, Reader]:
        """Return how the connected ones of `ranks` read."""
        found = ((rank, self.reader(replica, rank)) for rank in ranks)
        return {rank: reader for rank, reader in found if reader is not None}

    def block_bytes(self, replica: str, slot_bytes: Callable[[int], int]) -> int:
        """Return what a block of a replica takes of this node's memory, part by part."""
        parts: dict[int, int] = {}
        for (name, _), one in self._ranks.items():
            if name == replica:
                parts |= one.reader.block_bytes
        return max(1, sum(map(slot_bytes, parts.values())))

    def connected(self) -> list[tuple[str, int]]:
        """Return (replica, rank) of all that are connected; from any thread."""
        return [key for key, entry in self._ranks.copy().items() if entry.connection is not None]

    def numbers(self) -> set[int]:
        """Return the numbers that arenas have for the namespaces of ranks, ended ones included."""
        digests = {one.digest for one in self._ranks.values()} | self._namespaces.keys()
        return {namespace_id(bytes.fromhex(digest)) for digest in digests}

    def disconnect(self, connection: int) -> None:
        """Note that the ranks of `connection` are gone."""
        for entry in self._ranks.values():
            if entry.connection == connection:
                entry.connection, entry.ended_at = None, self._clock()

    def add_up(self) -> None:
        """Put ranks that ended long ago, or are too many, into the sum."""
        now = self._clock()
        ended = [(one.ended_at, key) for key, one in self._ranks.items() if one.connection is None]
        for nth, (at, key) in enumerate(sorted(ended)):
            kept_s = ENDED_S if nth >= len(ended) - ENDED_MAX else BACK_S
            if at <= now - kept_s:
                self._add_up(key)

    def ended(self) -> dict[str, Any]:
        """Return the number of "ranks" in the sum, and their "counters"."""
        return {"ranks": self._num_ended, "counters": dict(self._ended)}

    def _add_up(self, key: tuple[str, int]) -> None:
        entry = self._ranks.pop(key)
        self._num_ended += 1
        for name, value in entry.counters.items():
            if name != _AGE and (name in self._ended or len(self._ended) < _COUNTERS_MAX):
                self._ended[name] += value
        self._remember(entry)

    def _remember(self, entry: _Rank) -> None:
        if entry.reader.namespace.model == UNNAMED:
            return  # it has no blocks
        self._namespaces.pop(entry.digest, None)
        self._namespaces[entry.digest] = entry.fields
        if len(self._namespaces) > _NAMESPACES_MAX:
            del self._namespaces[next(iter(self._namespaces))]

    def status(self) -> list[dict[str, Any]]:
        """Return one entry a rank, in order of registration; from any thread."""
        return [
            {
                "replica": replica,
                "rank": rank,
                "connected": entry.connection is not None,
                "namespace": entry.digest,
                "is_named": entry.reader.namespace.model != UNNAMED,
                "counters": entry.counters,
            }
            for (replica, rank), entry in self._ranks.copy().items()
        ]

    def namespace_of(self, replica: str, rank: int) -> Namespace | None:
        """Return the namespace of a rank, connected or not; None if it is forgotten."""
        entry = self._ranks.get((replica, rank))
        return None if entry is None else entry.reader.namespace

    def namespaces(self) -> dict[str, dict[str, object]]:
        """Return every namespace by the digest that `status` gives; from any thread."""
        # Not of a copy: before Python 3.12 garbage collection may let others change what it copies.
        return self._namespaces | {one.digest: one.fields for one in list(self._ranks.values())}


def read_reader(namespace: Namespace, **fields: Any) -> Reader:
    """Return how a rank reads, from the `fields` of its registration; ConfigError if one is bad."""
    reads = checked(_READS, fields, "registration")
    arena_id, *member = reads.holder or ("",)
    return Reader(
        namespace=namespace,
        part_requests=tuple(PartRequest(*one) for one in reads.wanted),
        arena_id=arena_id,
        member=Membership(*member) if member else None,
        **reads.model_dump(exclude={"wanted", "holder"}),
    )


def _check_name(replica: Any, rank: Any) -> None:
    checked(_NAME, replica, "replica")
    checked(_RANK, rank, "rank")


def _check_layout(replica: str, mine: Namespace, other: str, theirs: Namespace) -> None:
    """Refuse two layouts under one `model_key`: one of them belongs to another model.

    Replicas of one model may differ in tensor parallelism, and in the version of their weights;
    `kvray status --wide` shows in what they differ.
    """
    different = replace(mine, weights=theirs.weights).difference(theirs)
    if mine.model != theirs.model or not mine.model.startswith(MODEL_KEY_PREFIX) or not different:
        return
    if mine.tp_layout != theirs.tp_layout:
        return
    what = ", ".join(
        f"{name} {own!r} here, {its!r} there" for name, (own, its) in different.items()
    )
    raise LayoutMismatch(
        f"Replicas {replica} and {other} both claim model_key"
        f" {mine.model.removeprefix(MODEL_KEY_PREFIX)!r} but hold different blocks ({what}); give"
        " them different connector.model_key values, or the same engine settings."
    )
