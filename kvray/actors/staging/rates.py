"""Measured rates of the sources of blocks; pure."""

from collections.abc import Container
from dataclasses import dataclass

from kvray.actors.mover.orders import SourceReport
from kvray.actors.staging.plan import Peer

_WEIGHT = 0.3  # weight of the newest measurement
_SMALL = 2**20
"""A fetch below this many bytes measures the latency, one above it the rate."""
_FORGET_S = 30.0
"""Older measurements do not count, or a node once found slow would never be tried again."""
_RATES_MAX = 1024


@dataclass(slots=True)
class Rate:
    """The measurements of one source, by the transport that it used last."""

    transport: str
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    """None: no fetch was large enough to measure it."""
    at: float = 0.0


class Rates:
    """The rates of all sources; of too many the one that was used longest ago goes."""

    def __init__(self) -> None:
        self._rates: dict[str, Rate] = {}

    def note(self, source: str, report: SourceReport, *, now: float) -> None:
        """Take the measurement of a fetch that brought blocks."""
        if report.num_bytes <= 0 or report.seconds <= 0:
            return
        rate = self._rates.pop(source, None)
        if rate is None or rate.transport != report.transport:
            rate = Rate(report.transport)
        if report.num_bytes < _SMALL:
            rate.latency_s = _blend(rate.latency_s or None, report.seconds)
        else:
            moving_s = max(report.seconds - rate.latency_s, report.seconds / 2)
            rate.bytes_per_s = _blend(rate.bytes_per_s, report.num_bytes / moving_s)
        rate.at = now
        self._rates[source] = rate
        if len(self._rates) > _RATES_MAX:
            del self._rates[next(iter(self._rates))]

    def retain(self, sources: Container[str]) -> None:
        """Forget all rates but those of `sources`."""
        self._rates = {name: rate for name, rate in self._rates.items() if name in sources}

    def peer(self, source: str, now: float, *, has_failed: bool = False) -> Peer:
        """Return a source as the planner sees it; a measurement that is too old does not count."""
        rate = self._rates.get(source)
        if rate is None or now - rate.at > _FORGET_S:
            return Peer(has_failed=has_failed)
        return Peer(latency_s=rate.latency_s, bytes_per_s=rate.bytes_per_s, has_failed=has_failed)

    def latest(self) -> dict[str, Rate]:
        """Return the rate of each source, however old; from any thread."""
        return dict(self._rates)


def _blend(before: float | None, measured: float) -> float:
    return measured if before is None else before + _WEIGHT * (measured - before)
