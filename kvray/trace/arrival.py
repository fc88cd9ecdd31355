"""How the blocks of a prefix arrived in a node's arena; pure."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

HERE = "host"  # they were there already
NVME = "nvme"
"""They came from the node's own disk; all others are named by their transport."""

Source = Literal["host", "disk", "remote"]
"""The node's memory, its disk, or another node."""

ARRIVALS_MAX = 64  # runs that one prefix may have; further blocks count with the last run


class Arrival(NamedTuple):
    """A run of blocks that came the same way; it begins where the run before it ends."""

    stop: int
    way: str
    """`HERE`, `NVME`, or the transport between nodes that brought them. `HERE` with a source: the
    transport is not known."""
    source: str = ""
    """The shard that they came from; empty: this one."""


Arrivals = tuple[Arrival, ...]
"""In prefix order from the first block on; blocks after the last run were there."""


def arrivals_of(ways: Sequence[tuple[str, str] | None]) -> Arrivals:
    """Return the runs of blocks; each block came by (way, source), or was there if None."""
    runs: list[Arrival] = []
    for block, one in enumerate(ways):
        way, source = one or (HERE, "")
        if runs and (runs[-1][1:] == (way, source) or len(runs) == ARRIVALS_MAX):
            runs[-1] = runs[-1]._replace(stop=block + 1)
        else:
            runs.append(Arrival(block + 1, way, source))
    return tuple(runs) if any(run[1:] != (HERE, "") for run in runs) else ()


def runs_between(arrivals: Arrivals, first: int, end: int) -> Iterator[tuple[int, int, str, str]]:
    """Yield (start, stop, way, source) for the blocks from `first` to `end`."""
    start = first
    for stop, way, source in (*arrivals, Arrival(end, HERE)):
        stop = min(stop, end)  # noqa: PLW2901
        if stop > start:
            yield start, stop, way, source
            start = stop


def source_of(way: str, source: str) -> Source:
    """Return what the blocks of a run came from, whatever brought them."""
    if way == NVME:
        return "disk"
    return "host" if (way, source) == (HERE, "") else "remote"


def joined(before: Arrivals, after: Arrivals) -> Arrivals:
    """Return how blocks arrived in two stages; the second found the blocks of the first there."""
    if not before or not after:
        return before or after
    stops = sorted({run.stop for run in (*before, *after)})
    ways: list[Arrival] = []
    start = 0
    for stop in stops:
        ((_, _, way, source),) = runs_between(before, start, stop)
        if way == HERE:
            ((_, _, way, source),) = runs_between(after, start, stop)
        if ways and ways[-1][1:] == (way, source):
            ways.pop()
        ways.append(Arrival(stop, way, source))
        start = stop
    return tuple(ways[: ARRIVALS_MAX - 1] + ways[-1:] if len(ways) > ARRIVALS_MAX else ways)
