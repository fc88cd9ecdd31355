"""Turns totals into increments; pure.

Ray's counters take increments and outlive the process that gave them. So every increment must be
given once, also after a restart: an engine's totals then start over, while those of a shard's
engines and arena go on.
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
        self._sources: dict[Hashable, _Source[K]] = {}

    def take(
        self,
        source: Hashable,
        totals: Mapping[K, float],
        *,
        life: Hashable = None,
        counted_before: bool = False,
    ) -> dict[K, float]:
        """Return the increments of `totals`, which are never negative.

        Within one life, a total that falls has no increment until it is higher than ever before.
        Another `life` counts from 0 again. `counted_before`: somebody else gave the first totals of
        a new source.
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
