"""Measured rates of each node and transport; pure."""

from collections.abc import Container
from dataclasses import dataclass

_WEIGHT = 0.3
"""Weight of the newest measurement."""
_SMALL = 2**20
"""A fetch below this many bytes measures the latency, one above it the rate."""
_FORGET_S = 30.0
"""Older measurements do not count, or a node once found slow would never be tried again."""
_RATES_MAX = 1024


@dataclass(slots=True)
class Rate:
    """The measurements of one transport from one node."""

    source: str
    transport: str
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    """None: no fetch was large enough to measure it."""
    at: float = 0.0


class Rates:
    """The rates of all nodes; of too many the one that was used longest ago goes."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, str], Rate] = {}
        self._latest: dict[str, str] = {}

    def note(
        self, source: str, transport: str, *, num_bytes: int, seconds: float, now: float
    ) -> None:
        """Take the measurement of a fetch that brought blocks."""
        if num_bytes <= 0 or seconds <= 0:
            return
        rate = self._rates.pop((source, transport), None) or Rate(source, transport)
        if num_bytes < _SMALL:
            rate.latency_s = _blend(rate.latency_s or None, seconds)
        else:
            moving = max(seconds - rate.latency_s, seconds / 2)
            rate.bytes_per_s = _blend(rate.bytes_per_s, num_bytes / moving)
        rate.at = now
        self._rates[source, transport] = rate
        self._latest[source] = transport
        if len(self._rates) > _RATES_MAX:
            oldest = next(iter(self._rates))
            del self._rates[oldest]
            if self._latest.get(oldest[0]) == oldest[1]:
                del self._latest[oldest[0]]

    def retain(self, sources: Container[str]) -> None:
        """Forget all rates but those of `sources`."""
        self._rates = {key: rate for key, rate in self._rates.items() if key[0] in sources}
        self._latest = {key[0]: key[1] for key in self._latest.items() if key[0] in sources}

    def of(self, source: str, now: float) -> Rate | None:
        """Return the rate of the transport that `source` used last; None if it is too old."""
        rate = self._rates.get((source, self._latest.get(source, "")))
        return None if rate is None or now - rate.at > _FORGET_S else rate

    def latest(self) -> dict[str, Rate]:
        """Return the rate of each node's last transport, however old; from any thread."""
        rates = dict(self._rates)
        return {key[0]: rates[key] for key in dict(self._latest).items() if key in rates}


def _blend(before: float | None, measured: float) -> float:
    return measured if before is None else before + _WEIGHT * (measured - before)
