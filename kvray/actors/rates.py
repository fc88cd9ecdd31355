"""How fast blocks came from each node, by transport, as measured while they came; pure."""

from collections.abc import Container
from dataclasses import dataclass

_WEIGHT = 0.3
"""Of the newest measurement."""
_SMALL = 2**20
"""Below this many bytes a fetch tells of the time before the first byte, above it of the rate."""
_FORGET_S = 30.0
"""What is older says nothing of now: else a node once found slow would never be tried again."""
_WAYS_MAX = 1024


@dataclass(slots=True)
class Way:
    """What was measured of one transport from one node."""

    source: str
    transport: str
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    """None: no fetch was large enough to tell."""
    at: float = 0.0


class Rates:
    """The ways to other nodes; of too many the one that was used longest ago goes."""

    def __init__(self) -> None:
        """Know none."""
        self._ways: dict[tuple[str, str], Way] = {}
        self._latest: dict[str, str] = {}

    def note(
        self, source: str, transport: str, *, num_bytes: int, seconds: float, now: float
    ) -> None:
        """Take the measurement of a fetch that brought something."""
        if num_bytes <= 0 or seconds <= 0:
            return
        way = self._ways.pop((source, transport), None) or Way(source, transport)
        if num_bytes < _SMALL:
            way.latency_s = _blend(way.latency_s or None, seconds)
        else:
            moving = max(seconds - way.latency_s, seconds / 2)
            way.bytes_per_s = _blend(way.bytes_per_s, num_bytes / moving)
        way.at = now
        self._ways[source, transport] = way
        self._latest[source] = transport
        if len(self._ways) > _WAYS_MAX:
            oldest = next(iter(self._ways))
            del self._ways[oldest]
            if self._latest.get(oldest[0]) == oldest[1]:
                del self._latest[oldest[0]]

    def retain(self, sources: Container[str]) -> None:
        """Forget all ways but those from `sources`."""
        self._ways = {way: one for way, one in self._ways.items() if way[0] in sources}
        self._latest = {way[0]: way[1] for way in self._latest.items() if way[0] in sources}

    def of(self, source: str, now: float) -> Way | None:
        """Return the way that was used last from `source`; None if that is too long ago."""
        way = self._ways.get((source, self._latest.get(source, "")))
        return None if way is None or now - way.at > _FORGET_S else way

    def latest(self) -> dict[str, Way]:
        """Return the way that was used last from each node, however long ago; from any thread."""
        ways = dict(self._ways)
        return {way[0]: ways[way] for way in dict(self._latest).items() if way in ways}


def _blend(before: float | None, measured: float) -> float:
    return measured if before is None else before + _WEIGHT * (measured - before)
