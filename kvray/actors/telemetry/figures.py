"""Values of metrics at one moment, on their way to `MetricsExport`."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

Series = tuple[str, tuple[str, ...]]
"""A metric's name without `kvray_`, and the values of its labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The totals of one source; see `Increments.take`."""

    source: Hashable
    totals: Mapping[Series, float]
    life: Hashable = None
    counted_before: bool = False


@dataclass(slots=True)
class Figures:
    """Gauges, and the totals of each source."""

    gauges: dict[Series, float] = field(default_factory=dict)
    totals: list[Totals] = field(default_factory=list)
