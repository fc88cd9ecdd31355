"""What one engine counts and measures of itself, for its shard to show.

`Boundary` stops errors of the tier, and our own defects, so that the engine goes on without the
tier. An exception that leaves a connector's method ends its engine. So everything that may fail
without harm runs inside `Boundary.around`: all but what follows a promise.
"""

import logging
import threading
import time
from collections import Counter

from kvray.errors import KVRayError
from kvray.node import EngineLog
from kvray.trace.reasons import DROP_PREFIX, DropReason

_log = logging.getLogger("kvray.connector")

_FIRST, _LAST = 15, 32
"""The least bucket that is told of ends at 2**15 ns (33 us), the last but one at 2**32 (4.3 s)."""


SENTENCES = {
    DropReason.STORE_DOWN: "the tier is not there",
    DropReason.ARENA_BUSY: "the arena stayed locked",
    DropReason.NO_ROOM: "everything else in the arena is leased, or their parent block is missing",
    DropReason.TOO_MANY: "too many saves wait",
    DropReason.TOO_SLOW: "the copy took too long",
    DropReason.SHUT_DOWN: "the connector was shut down",
    DropReason.NO_PAGE: "the engine names no page for a block before them",
    DropReason.NO_POOL: "this rank does not have the pool that they were planned for",
    DropReason.VOID: "their pass did not get the blocks it was promised, so they may be wrong",
    DropReason.ERROR: "an error, which the log shows",
}


class EngineFigures:
    """Of one engine, both halves together."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.dropped = DroppedBlocks(self.totals)
        self.lease_times = TimeHistogram()  # of a prefix, in the node's arena
        self.stage_times = TimeHistogram()  # waits for the shard
        self.match_times = TimeHistogram()  # the scheduler's half, for each query
        self.plan_times = TimeHistogram()  # the scheduler's half, for each pass
        self.log = EngineLog()
        self._began_at = time.monotonic()

    def counters(self) -> dict[str, int]:
        """Return what the shard is told: totals, how long calls took, and since when."""
        return {
            **self.totals,
            **self.lease_times.counters("lease"),
            **self.stage_times.counters("stage"),
            **self.match_times.counters("match"),
            **self.plan_times.counters("plan"),
            "uptime_s": int(time.monotonic() - self._began_at),
        }


class TimeHistogram:
    """What one kind of call took, in buckets that end at powers of two; one thread observes."""

    __slots__ = ("_buckets", "_sum_ns")

    def __init__(self) -> None:
        self._buckets = [0] * 64
        self._sum_ns = 0

    def observe(self, nanoseconds: int) -> None:
        """Count one call, which took less than 2**63."""
        self._buckets[nanoseconds.bit_length()] += 1
        self._sum_ns += nanoseconds

    def counters(self, name: str) -> dict[str, int]:
        """Return `<name>_us_sum`, and `<name>_ns_below_<bound>` (or `inf`) of buckets with any."""
        buckets = list(self._buckets)
        low, high = buckets[: _FIRST + 1], buckets[_LAST + 1 :]
        counts: dict[int | str, int] = {2**_FIRST: sum(low)}
        counts |= {2**bits: buckets[bits] for bits in range(_FIRST + 1, _LAST + 1)}
        counts["inf"] = sum(high)
        told = {f"{name}_ns_below_{bound}": count for bound, count in counts.items() if count}
        return told | {f"{name}_us_sum": round(self._sum_ns / 1000)} if told else {}


class DroppedBlocks:
    """One engine's counts; any thread may count.

    `dropped_blocks` counts all of them, `dropped_blocks_<reason>` those of one reason. Each rank
    counts the blocks of its own parts; the leader alone counts blocks that are never planned.
    """

    def __init__(self, totals: Counter[str]) -> None:
        self._totals = totals
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def count(self, num_blocks: int, reason: DropReason) -> None:
        """Count blocks that are not saved, and log the first loss for each reason."""
        if num_blocks <= 0:
            return
        with self._lock:
            self._totals["dropped_blocks"] += num_blocks
            self._totals[f"{DROP_PREFIX}{reason.value}"] += num_blocks
            is_new = reason not in self._logged
            self._logged.add(reason)
        if is_new:
            _log.warning(
                "kvray: %d blocks and everything after them in their prompts were not saved: %s"
                " (said once)",
                num_blocks,
                SENTENCES[reason],
            )


_SAID_MAX = 256
_NO_DIGITS = str.maketrans("", "", "0123456789")


class Boundary:
    """Counts what it stops in `errors`, and logs each cause once; one for each engine."""

    def __init__(self, totals: Counter[str]) -> None:
        self._totals = totals
        self._said: set[str] = set()

    def around(self, what: str) -> "_Guard":
        """Return a context that stops any exception; the log says that `what` is lost."""
        return _Guard(self, what)

    def stop(self, what: str, error: BaseException) -> None:
        """Count `error`, and log it if its like was not logged before."""
        self._totals["errors"] += 1
        # Digits differ from request to request.
        cause = f"{what} {type(error).__name__} {error}".translate(_NO_DIGITS)
        if cause in self._said or len(self._said) >= _SAID_MAX:
            return
        self._said.add(cause)
        if isinstance(error, KVRayError):
            _log.warning("kvray: %s goes without the tier: %s (said once)", what, error)
        else:
            _log.error(
                "kvray: a defect; %s goes without the tier (said once)", what, exc_info=error
            )


class _Guard:
    def __init__(self, boundary: Boundary, what: str) -> None:
        self._boundary = boundary
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._boundary.stop(self._what, error)
        return True
