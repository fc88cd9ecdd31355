"""What a call of the lookup's actor costs, and a key in it, Ray's part included.

`python -m kvray.lab.bench.lookup_calls` starts a Ray of its own and takes half a minute. CPU is
that of the actor's process, which bounds what one actor can take.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray

from kvray.actors.lookup.actor import create_lookup
from kvray.actors.lookup.lookup import PART_BYTES, Announcement
from kvray.actors.names import namespace_of
from kvray.actors.ray_glue.arguments import packed
from kvray.identity.block import KEY_BYTES

_CALLS = 3000
_AT_ONCE = 8
_KEYS = 400_000
_SIZES = 500, 2_000, 6_000, 20_000


class Caller:
    """Announces to a lookup, several calls at a time as its shards do."""

    def __init__(self, lookup: Any) -> None:
        self._lookup = lookup
        status = ray.get(lookup.status.remote())
        assert status["entries"] == 0, "nobody else announces"
        self._process = psutil.Process(status["pid"])
        self._sequences: dict[str, int] = {}

    def heartbeats(self) -> tuple[float, float]:
        """Return seconds and CPU seconds of a call that brings nothing."""
        return self._timed(_CALLS, lambda number: ("idle", b""))

    def pieces(self, size: int) -> tuple[float, float]:
        """Return seconds and CPU seconds of a key, of which a call brings so many."""
        count = _KEYS // size
        keys = [random.Random(size + n).randbytes(size * KEY_BYTES) for n in range(count)]
        call = self._timed(count, lambda number: (f"{size}-{number % 4}", keys[number]))
        return call[0] / size, call[1] / size

    def _timed(self, count: int, said: Callable[[int], tuple[str, bytes]]) -> tuple[float, float]:
        began, cpu = time.perf_counter(), self._cpu_s()
        for first in range(0, count, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, count))
            answers = ray.get([self._announce(*said(number)) for number in numbers])
            assert not any(answer.resync for answer in answers)
        return (time.perf_counter() - began) / count, (self._cpu_s() - cpu) / count

    def _announce(self, shard: str, keys: bytes) -> Any:
        sequence = self._sequences[shard] = self._sequences.get(shard, 0) + 1
        one = Announcement(
            shard=shard,
            arena_id="bench",
            shard_epoch=1,
            sequence=sequence,
            full=sequence == 1,
            added_keys=keys,
            added_parts=bytes(PART_BYTES * (len(keys) // KEY_BYTES)),
            removed_keys=b"",
            removed_parts=b"",
        )
        return self._lookup.announce.remote(*packed(one))

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def rows(sizes: Sequence[int] = _SIZES) -> list[str]:
    """Return what was measured, a line each."""
    caller = Caller(create_lookup("bench", silent_s=3600.0))
    caller.heartbeats()  # the interpreter loads some code only at the first calls
    wall_s, cpu_s = caller.heartbeats()
    found = [f"a heartbeat: {1e6 * wall_s:.0f} us, {1e6 * cpu_s:.0f} us of CPU"]
    for size in sizes:
        wall_s, cpu_s = caller.pieces(size)
        found.append(
            f"a key in pieces of {size:,}: {1e6 * wall_s:.2f} us, {1e6 * cpu_s:.2f} us of CPU"
        )
    return found


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, namespace=namespace_of("bench"))
    print(*rows(), sep="\n")
    ray.shutdown()
