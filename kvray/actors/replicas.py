"""The replicas whose ranks have registered with a shard, and their figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvray.actors.openings import Origin
from kvray.block import Namespace
from kvray.errors import ConfigError, LayoutMismatch

_RANKS_MAX = 4096
_NAME_MAX = 256
_COUNTERS_MAX = 256
_NAMESPACE_MAX = 64 * 2**10
"""Characters of all texts of a namespace: the lookup keeps it, and answers carry it."""

MODEL_KEY_PREFIX = "key:"
"""`Namespace.model` begins with this where a `model_key` was given instead of a checkpoint."""


@dataclass(slots=True)
class _Rank:
    namespace: Namespace
    digest: str
    connection: int | None
    counters: dict[str, int] = field(default_factory=dict)


class Replicas:
    """Who uses this shard, and who did; of too many the oldest goes, the disconnected first."""

    def __init__(self) -> None:
        """Start without any."""
        self._ranks: dict[tuple[str, int], _Rank] = {}

    def register(self, connection: int, replica: str, rank: int, namespace: Namespace) -> None:
        """Enter a rank that speaks through `connection`.

        Raises:
            ConfigError: no replica is called so, or its namespace has fields of wrong types.
            LayoutMismatch: a replica that is there gave the same `model_key` for another layout.
        """
        _check_name(replica, rank)
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
        self._ranks[replica, rank] = _Rank(namespace, digest, connection)
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

    def namespaces(self) -> dict[str, dict[str, object]]:
        """Return every namespace by the digest that `status` gives; from any thread."""
        return {entry.digest: entry.namespace.to_wire() for entry in list(self._ranks.values())}


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
