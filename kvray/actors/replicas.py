"""The replicas whose ranks have registered with a shard, and their figures."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvray.actors.openings import Origin
from kvray.block import Namespace
from kvray.errors import ConfigError, LayoutMismatch
from kvray.index import PARTS_MAX
from kvray.store import Membership, Wanted

_RANKS_MAX = 4096
_NAME_MAX = 256
_COUNTERS_MAX = 256
_WANTED_MAX = 256
_NAMESPACE_MAX = 64 * 2**10
"""Characters of all texts of a namespace: the lookup keeps it, and answers carry it."""

MODEL_KEY_PREFIX = "key:"
"""`Namespace.model` begins with this where a `model_key` was given instead of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What a rank has said of how it reads; what it has not said, nothing is staged for."""

    namespace: Namespace
    wanted: tuple[Wanted, ...] = ()
    """The parts that its leases must have."""
    num_ranks: int = 1
    """Ranks that it speaks for, itself included: all of the replica, or itself alone."""
    arena_id: str = ""
    """The arena in which it has its `member`ship."""
    member: Membership | None = None
    adapters: str | None = None
    """How its engine reads LoRA adapters; None if it has not said so."""
    tenants: str | None = None
    """`TenantSalts.check` of the secret that its salts are derived with; None: they are not."""

    def ranks(self, rank: int) -> list[int]:
        """Return whom it speaks for, being `rank` itself."""
        return [rank] if self.num_ranks == 1 else list(range(self.num_ranks))

    @property
    def part_bytes(self) -> int:
        """Bytes of one of its parts of a block, on average."""
        return max(1, _count_of(self.namespace, "part_bytes") // max(1, len(self.wanted)))

    @property
    def tokens_per_block(self) -> int:
        """Tokens that a block has."""
        return _count_of(self.namespace, "tokens_per_block")


@dataclass(slots=True)
class _Rank:
    reader: Reader
    digest: str
    connection: int | None
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def namespace(self) -> Namespace:
        return self.reader.namespace


class Replicas:
    """Who uses this shard, and who did; of too many the oldest goes, the disconnected first."""

    def __init__(self) -> None:
        """Start without any."""
        self._ranks: dict[tuple[str, int], _Rank] = {}

    def register(self, connection: int, replica: str, rank: int, reads: Namespace | Reader) -> None:
        """Enter a rank that speaks through `connection`.

        Args:
            connection: number of the connection.
            replica: name of its replica.
            rank: its number there.
            reads: its namespace, and how it reads if it has said so.

        Raises:
            ConfigError: no replica is called so, or its namespace has fields of wrong types.
            LayoutMismatch: a replica that is there gave the same `model_key` for another layout.
        """
        _check_name(replica, rank)
        reader = reads if isinstance(reads, Reader) else Reader(namespace=reads)
        namespace = reader.namespace
        # Now, and not when somebody asks for the status: one engine's defect is nobody else's.
        digest = namespace.digest().hex()[:8]
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
                _check_layout(replica, namespace, other, entry.namespace)
        self._ranks.pop((replica, rank), None)
        self._ranks[replica, rank] = _Rank(reader, digest, connection)
        if len(self._ranks) > _RANKS_MAX:
            gone = (key for key, entry in self._ranks.items() if entry.connection is None)
            del self._ranks[next(gone, next(iter(self._ranks)))]

    def report(
        self,
        connection: int,
        replica: str,
        rank: int,
        counters: dict[str, int],
        *,
        leaving: bool = False,
    ) -> Origin | None:
        """Keep a rank's latest figures and return who it is; None if it has to register first.

        With `leaving` they are its last ones: it counts as disconnected from then on.

        Raises:
            ConfigError: these are no figures.
        """
        _check_name(replica, rank)
        _check_counters(counters)
        entry = self._ranks.get((replica, rank))
        if entry is None or entry.connection != connection:
            return None
        entry.counters = dict(counters)
        if leaving:
            entry.connection = None
        return Origin(replica=replica, rank=rank, namespace=entry.namespace)

    def reader(self, replica: str, rank: int) -> Reader | None:
        """Return how a rank reads; None if it is not here now."""
        entry = self._ranks.get((replica, rank))
        return None if entry is None or entry.connection is None else entry.reader

    def readers(self, replica: str, ranks: Iterable[int]) -> dict[int, Reader]:
        """Return how those of `ranks` read that are here now."""
        found = ((rank, self.reader(replica, rank)) for rank in ranks)
        return {rank: reader for rank, reader in found if reader is not None}

    def first_reader(self, replica: str) -> tuple[int, Reader] | None:
        """Return the lowest rank of `replica` that is here now; None if there is none."""
        ranks = sorted(rank for name, rank in self.connected() if name == replica)
        reader = self.reader(replica, ranks[0]) if ranks else None
        return None if reader is None else (ranks[0], reader)

    def connected(self) -> list[tuple[str, int]]:
        """Return (replica, rank) of all that are here now; from any thread."""
        return [key for key, entry in list(self._ranks.items()) if entry.connection is not None]

    def disconnect(self, connection: int) -> None:
        """Note that whoever spoke through `connection` is gone."""
        for entry in self._ranks.values():
            if entry.connection == connection:
                entry.connection = None

    def status(self) -> list[dict[str, Any]]:
        """Return one entry a rank, in order of registration; from any thread."""
        return [
            {
                "replica": replica,
                "rank": rank,
                "connected": entry.connection is not None,
                "namespace": entry.digest,
                "counters": entry.counters,
            }
            for (replica, rank), entry in list(self._ranks.items())
        ]

    def namespace_of(self, replica: str, rank: int) -> Namespace | None:
        """Return the namespace that a rank has, or had; None if it is not known any more."""
        entry = self._ranks.get((replica, rank))
        return None if entry is None else entry.namespace

    def namespaces(self) -> dict[str, dict[str, object]]:
        """Return every namespace by the digest that `status` gives; from any thread."""
        return {entry.digest: entry.namespace.to_wire() for entry in list(self._ranks.values())}


def read_reader(
    namespace: Namespace,
    *,
    wanted: Any = (),
    num_ranks: Any = 1,
    holder: Any = None,
    adapters: Any = None,
    tenants: Any = None,
) -> Reader:
    """Return how a rank reads, from the fields of its registration.

    Args:
        namespace: of its blocks.
        wanted: [part, window or None] for each part that its leases must have.
        num_ranks: ranks that it speaks for.
        holder: [arena_id, row, generation], its membership in the node's arena.
        adapters: how its engine reads LoRA adapters.
        tenants: which secret its salts are derived with.

    Raises:
        ConfigError: these are no such fields.
    """
    if not (
        isinstance(wanted, list | tuple)
        and len(wanted) <= _WANTED_MAX
        and all(map(_is_wanted, wanted))
    ):
        raise ConfigError(f"wanted is a list of at most {_WANTED_MAX} [part, window or None].")
    if not _is_count(num_ranks) or not 1 <= num_ranks <= _RANKS_MAX:
        raise ConfigError(f"num_ranks is a number from 1 to {_RANKS_MAX}, not {num_ranks!r:.40}.")
    if holder is not None and not (
        isinstance(holder, list | tuple)
        and len(holder) == 3
        and isinstance(holder[0], str)
        and all(map(_is_count, holder[1:]))
    ):
        raise ConfigError("holder is [arena_id, row, generation].")
    if adapters is not None and not (isinstance(adapters, str) and len(adapters) <= _NAMESPACE_MAX):
        raise ConfigError(f"adapters is a text of at most {_NAMESPACE_MAX} characters.")
    if tenants is not None and not (isinstance(tenants, str) and len(tenants) <= _NAME_MAX):
        raise ConfigError(f"tenants is a text of at most {_NAME_MAX} characters.")
    return Reader(
        namespace=namespace,
        wanted=tuple(Wanted(part, window) for part, window in wanted),
        num_ranks=num_ranks,
        arena_id="" if holder is None else holder[0],
        member=None if holder is None else Membership(*holder[1:]),
        adapters=adapters,
        tenants=tenants,
    )


def _count_of(namespace: Namespace, name: str) -> int:
    """Return a number of a namespace, of which only texts and numbers are sure to be there."""
    value = getattr(namespace, name)
    if not _is_count(value) or value < 1:
        raise ConfigError(f"A namespace's {name} is a number from 1 on, not {value!r:.40}.")
    return int(value)


def _is_wanted(one: object) -> bool:
    return (
        isinstance(one, list | tuple)
        and len(one) == 2
        and _is_count(one[0])
        and one[0] < PARTS_MAX
        and (one[1] is None or (_is_count(one[1]) and one[1] > 0))
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _check_name(replica: object, rank: object) -> None:
    if not (isinstance(replica, str) and 0 < len(replica) <= _NAME_MAX):
        raise ConfigError(f"A replica's name is a text of 1 to {_NAME_MAX} characters.")
    if not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"A rank is a number from 0 on, not {rank!r}.")


def _check_counters(counters: object) -> None:
    if not isinstance(counters, Mapping) or len(counters) > _COUNTERS_MAX:
        raise ConfigError(f"Counters are a map of at most {_COUNTERS_MAX} numbers.")
    for name, value in counters.items():
        if not (isinstance(name, str) and len(name) <= _NAME_MAX and isinstance(value, int)):
            raise ConfigError(f"Counter {str(name)[:_NAME_MAX]!r} is no number with a name.")


def _check_layout(replica: str, mine: Namespace, other: str, theirs: Namespace) -> None:
    """Refuse two layouts under one `model_key`: one of them is meant to be another model's.

    Replicas of different tensor parallelism may be of one model; they do not share, and that is
    counted and explained as `incompatible`.
    """
    different = mine.difference(theirs)
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
