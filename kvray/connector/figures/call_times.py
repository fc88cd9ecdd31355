"""How long the connector's calls take, in buckets that travel to the shard as counters; pure.

A bucket ends at a power of two nanoseconds: finding it is one shift, so that `observe` can stand
on the engine's own thread.
"""

_FIRST, _LAST = 15, 32
"""The least bucket that is told of ends at 2**15 ns (33 us), the last but one at 2**32 (4.3 s)."""


class TimeHistogram:
    """What one kind of call took. One thread observes, any thread asks."""

    __slots__ = ("_buckets", "_sum_ns")

    def __init__(self) -> None:
        self._buckets = [0] * 64
        self._sum_ns = 0

    def observe(self, nanoseconds: int) -> None:
        """Count one call, which took so long and less than 2**63."""
        self._buckets[nanoseconds.bit_length()] += 1
        self._sum_ns += nanoseconds

    def counters(self, name: str) -> dict[str, int]:
        """Return `<name>_us_sum`, and `<name>_ns_below_<bound>` for buckets that have any.

        A bucket has what took less than its bound and not less than the bound before; that
        without a bound is called "inf".
        """
        buckets = list(self._buckets)
        low, high = buckets[: _FIRST + 1], buckets[_LAST + 1 :]
        counts: dict[int | str, int] = {2**_FIRST: sum(low)}
        counts |= {2**bits: buckets[bits] for bits in range(_FIRST + 1, _LAST + 1)}
        counts["inf"] = sum(high)
        told = {f"{name}_ns_below_{bound}": count for bound, count in counts.items() if count}
        return told | {f"{name}_us_sum": round(self._sum_ns / 1000)} if told else {}


class CallTimes:
    """Those of one engine, whose executor thread observes."""

    __slots__ = ("lease", "match", "plan", "stage")

    def __init__(self) -> None:
        self.lease = TimeHistogram()  # of a prefix, in the node's arena
        self.stage = TimeHistogram()  # waits for the shard
        self.match = TimeHistogram()
        """The scheduler's half, for each request that is asked about."""
        self.plan = TimeHistogram()  # the scheduler's half, for each pass

    def counters(self) -> dict[str, int]:
        """Return the counters of all of them."""
        return {
            counter: count
            for name in self.__slots__
            for counter, count in getattr(self, name).counters(name).items()
        }
