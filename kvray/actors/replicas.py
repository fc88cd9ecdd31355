"""The replicas whose ranks have registered with a shard, and their figures."""

from dataclasses import dataclass, field
from typing import Any

from kvray.block import Namespace
from kvray.errors import LayoutMismatch

_RANKS_MAX = 4096

MODEL_KEY_PREFIX = "key:"
"""`Namespace.model` begins with this where a `model_key` was given instead of a checkpoint."""


@dataclass(slots=True)
class _Rank:
    namespace: Namespace
    connection: int | None
    counters: dict[str, int] = field(default_factory=dict)


class Replicas:
    """Who uses this shard, and who did; the oldest entry goes when there are too many."""

    def __init__(self) -> None:
        """Start without any."""
        self._ranks: dict[tuple[str, int], _Rank] = {}

    def register(self, connection: int, replica: str, rank: int, namespace: Namespace) -> None:
        """Enter a rank that speaks through `connection`.

        Raises:
            LayoutMismatch: a replica that is there gave the same `model_key` for another layout.
        """
        for (other, _), entry in self._ranks.items():
            if other != replica and entry.connection is not None:
                _check_layout(replica, namespace, other, entry.namespace)
        self._ranks.pop((replica, rank), None)
        self._ranks[replica, rank] = _Rank(namespace, connection)
        if len(self._ranks) > _RANKS_MAX:
            del self._ranks[next(iter(self._ranks))]

    def report(self, connection: int, replica: str, rank: int, counters: dict[str, int]) -> bool:
        """Keep a rank's latest figures; False if it has to register first."""
        entry = self._ranks.get((replica, rank))
        if entry is None or entry.connection != connection:
            return False
        entry.counters = dict(counters)
        return True

    def disconnect(self, connection: int) -> None:
        """Note that whoever spoke through `connection` is gone."""
        for entry in self._ranks.values():
            if entry.connection == connection:
                entry.connection = None

    def status(self) -> list[dict[str, Any]]:
        """Return one entry a rank, in order of registration."""
        return [
            {
                "replica": replica,
                "rank": rank,
                "connected": entry.connection is not None,
                "namespace": entry.namespace.digest().hex()[:8],
                "counters": entry.counters,
            }
            for (replica, rank), entry in self._ranks.items()
        ]


def _check_layout(replica: str, mine: Namespace, other: str, theirs: Namespace) -> None:
    """Refuse two layouts under one `model_key`: they could never share, and nobody would know."""
    different = mine.difference(theirs)
    if mine.model != theirs.model or not mine.model.startswith(MODEL_KEY_PREFIX) or not different:
        return
    what = ", ".join(
        f"{name} {own!r} here, {its!r} there" for name, (own, its) in different.items()
    )
    raise LayoutMismatch(
        f"Replicas {replica} and {other} both claim model_key"
        f" {mine.model.removeprefix(MODEL_KEY_PREFIX)!r} but hold different blocks ({what}); give"
        " them different connector.model_key values, or the same engine settings."
    )
