"""Turns totals that their owners count into what they have grown by; pure.

Ray's counters are given increments and outlive who gave them. So what grew must be given once, and
never a second time after a restart: of the engine, whose totals then start over, or of the shard,
whose engines and arena go on with totals that were given before.
"""

from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Source(Generic[K]):
    life: Hashable
    highs: dict[K, float] = field(default_factory=dict)


class Increments(Generic[K]):
    """The reported share of each source's totals."""

    def __init__(self) -> None:
        """Know no source."""
        self._sources: dict[Hashable, _Source[K]] = {}

    def take(
        self,
        source: Hashable,
        totals: Mapping[K, float],
        *,
        life: Hashable = None,
        counted_before: bool = False,
    ) -> dict[K, float]:
        """Return by how much each of `totals` has grown, which is never negative.

        Within one life a total that falls gives nothing until it is higher than it ever was.

        Args:
            source: who counts.
            totals: its totals now; one that is new has grown from 0.
            life: another one than before if it has begun to count again, from 0.
            counted_before: whether what a source has when it is seen for the first time was given
                by somebody else.
        """
        known = self._sources.get(source)
        if known is None and counted_before:
            self._sources[source] = _Source(life, dict(totals))
            return dict.fromkeys(totals, 0.0)
        if known is None or known.life != life:
            known = self._sources[source] = _Source(life)
        grown = {}
        for key, total in totals.items():
            high = known.highs.get(key, 0.0)
            grown[key] = max(0.0, total - high)
            known.highs[key] = max(high, total)
        return grown

    def retain(self, sources: Container[Hashable]) -> None:
        """Forget all sources but these."""
        self._sources = {name: one for name, one in self._sources.items() if name in sources}
