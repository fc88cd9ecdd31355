"""Many shards that announce to one lookup, in a time that is counted.

Real announcers and a real lookup. Calls wait in one line, as they do before Ray's actor, and each
takes what it took when it was measured. `python -m kvray.lab.bench.lookup_scale FILE.png` draws how
long a restarted lookup is told by tiers of up to 10,000 nodes; it takes some minutes.
"""

import heapq
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from kvray.actors.lookup.lookup import Announcement, Answer, Lookup
from kvray.actors.shard import announcer as announcer_module
from kvray.actors.shard.announcer import Announcer
from kvray.actors.shard.tier_delta import Entries
from kvray.console.picture import write_picture
from kvray.index import PARTS_MAX

CALL_S = 0.0005
"""A call of the lookup, whatever it is for: its serialization, Ray's part included."""
KEY_S = 27e-3 / 16_000
"""What one of 150 shards took for each of its 16,000 keys, Ray's part included."""
WAIT_S = 2.0
"""How long a shard's thread waits for an answer before it has something else to do."""
ANNOUNCE_S, HEARTBEAT_S = 0.05, 0.5
"""A shard's pauses; see `shard.announce_s` and `shard.heartbeat_s`."""


class Clock:
    """The time that counts; stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the seconds since some time."""
        return self.now

    time = monotonic


@contextmanager
def counted_time() -> Iterator[Clock]:
    """Have announcers go by the clock that it yields; the same happens each time."""
    clock = Clock()
    with patch.object(announcer_module, "time", clock):
        yield clock


class CountingIndex:
    """Counts keys in place of an index, of which the time is known."""

    def __init__(self) -> None:
        self.keys: Counter[str] = Counter()
        self.num_taken = 0

    def restart(self, shard: str) -> None:
        """Forget what it counted."""
        self.keys[shard] = 0

    def add(self, shard: str, keys: bytes, parts: list[int]) -> None:
        """Count keys."""
        self.keys[shard] += len(parts)
        self.num_taken += len(keys) // 32

    def remove(self, shard: str, keys: bytes, parts: list[int]) -> list[Any]:
        """Nothing leaves a full tier."""
        return []

    def purge(self, slots_max: int) -> list[Any]:
        """Nothing is left over."""
        return []

    def settle(self, shard: str) -> None:
        """Nothing is left over."""

    def set_silent(self, shard: str, is_silent: bool) -> None:
        """Nobody asks."""


class FullTier:
    """A tier that holds so many blocks, and keeps them."""

    num_held = np.zeros(PARTS_MAX, dtype=np.int64)

    def __init__(self, keys: np.ndarray[Any, Any]) -> None:
        nothing = np.zeros(len(keys), dtype=np.uint32)
        self._entries = Entries(keys=keys, parts=nothing, heads=nothing)

    def collect(self) -> None:
        """Return that nothing has changed."""

    def held(self) -> Entries:
        """Return all blocks."""
        return self._entries


class Idle:
    """The owner of an arena in which nothing changes."""

    def __init__(self, shard: str) -> None:
        self.arena = SimpleNamespace(arena_id=shard)

    def give_up(self, partial_keys: bytes, parts: list[int]) -> None:
        """Nothing is partial."""
        assert partial_keys == b""


def announcer_of(shard: str, tier: FullTier, announce: Any) -> Announcer:
    """Return the announcer of a shard that holds the blocks of `tier`."""
    made = Announcer(shard, announce)
    made._arena_id = shard
    made._deltas = [tier]  # type: ignore[list-item]
    return made


def is_in_step(announcer: Announcer) -> bool:
    """Return whether the lookup has answered, and knows all of this shard."""
    return bool(announcer.num_shards) and not announcer.status()["lag_s"]


class Tier:
    """Shards that announce to one lookup, in the clock's time."""

    def __init__(self, clock: Clock, *, num_shards: int, num_keys: int, key_s: float) -> None:
        """Have the lookup just started; a key takes it `key_s`."""
        self._clock, self._key_s = clock, key_s
        self._num_shards, self._num_keys = num_shards, num_keys
        self._free_at = clock.now
        self._answers: dict[str, tuple[Announcement, float, Answer]] = {}
        self.lookup = Lookup()
        self.index = self.lookup.index = CountingIndex()  # type: ignore[assignment]
        self.num_calls = 0
        self.busy_s = 0.0
        """How long the lookup has worked."""
        self.longest_wait_s = 0.0
        """How long a call waited in the line, at most."""
        # One key many times costs no memory, and is counted as often.
        full = FullTier(np.broadcast_to(np.zeros(4, dtype="<u8"), (num_keys, 4)))
        names = [f"s{n}" for n in range(num_shards)]
        self._shards = {s: (announcer_of(s, full, self._announce), Idle(s)) for s in names}
        self._in_step: set[str] = set()
        due = [(clock.now + HEARTBEAT_S * n / num_shards, s) for n, s in enumerate(names)]
        self._due = due

    @property
    def num_in_step(self) -> int:
        """Shards whose last answer said that the lookup has all of them."""
        return len(self._in_step)

    @property
    def is_told(self) -> bool:
        """Whether the lookup has all, and every shard knows that."""
        return len(self._in_step) == self._num_shards == len(self.index.keys) and set(
            self.index.keys.values()
        ) == {self._num_keys}

    def run_until_told(self, limit_s: float) -> float:
        """Return the seconds until the lookup knows all; or `limit_s`, when it gives up."""
        began = self._clock.now
        while not self.is_told and self._due[0][0] < began + limit_s:
            self._step()
        return self._clock.now - began if self.is_told else limit_s

    def run(self, for_s: float) -> None:
        """Go on for so many seconds."""
        until = self._clock.now + for_s
        while self._due[0][0] < until:
            self._step()

    def _step(self) -> None:
        """Have the next shard do what a shard does in one round."""
        at, shard = heapq.heappop(self._due)
        self._clock.now = at
        announcer, owner = self._shards[shard]
        announcer.collect(owner)  # type: ignore[arg-type]
        announcer.send(1)
        goes_on = announcer.collect(owner)  # type: ignore[arg-type]
        (self._in_step.add if is_in_step(announcer) else self._in_step.discard)(shard)
        pause_s = ANNOUNCE_S if goes_on else HEARTBEAT_S
        heapq.heappush(self._due, (max(self._clock.now, at + pause_s), shard))

    def _announce(self, announcement: Announcement) -> Answer | None:
        """Wait for the answer as a shard does; the clock goes on meanwhile."""
        shard, began = announcement.shard, self._clock.now
        waited_for = self._answers.get(shard)
        if waited_for is None or waited_for[0] is not announcement:
            # Whoever waits before it in the line goes first: when it is done is known at once.
            began_at = max(began, self._free_at)
            before = self.index.num_taken
            answer = self.lookup.announce(announcement, began_at)
            took_s = CALL_S + self._key_s * (self.index.num_taken - before)
            self._free_at = began_at + took_s
            self.num_calls += 1
            self.busy_s += took_s
            self.longest_wait_s = max(self.longest_wait_s, began_at - began)
            waited_for = announcement, self._free_at, replace(answer, took_s=took_s)
            self._answers[shard] = waited_for
        _, done_at, answer = waited_for
        if done_at > began + WAIT_S:
            self._clock.now = began + WAIT_S
            return None
        self._clock.now = max(began, done_at)
        return answer


NODES = 100, 300, 1_000, 3_000, 10_000
LOOKUPS = 1, 2, 4, 8
BLOCKS = 16_000
_LIMIT_S = 3600.0


def told_s(num_shards: int, num_keys: int) -> tuple[float, float]:
    """Return the seconds until a restarted lookup knows all, and its load once it does."""
    with counted_time() as clock:
        tier = Tier(clock, num_shards=num_shards, num_keys=num_keys, key_s=KEY_S)
        took_s = tier.run_until_told(_LIMIT_S)
        tier.run(10)
        before = tier.busy_s
        tier.run(10)
    return took_s, (tier.busy_s - before) / 10


def draw(path: Path) -> None:
    """Print and draw the times of one lookup, and of several that share the blocks evenly."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for num_lookups in LOOKUPS:
        times = []
        for num_shards in NODES:
            took_s, load = told_s(num_shards, BLOCKS // num_lookups)
            times.append(took_s)
            print(f"{num_lookups} lookups, {num_shards} nodes: {took_s:.1f} s, then {load:.0%}")
        one = "one lookup" if num_lookups == 1 else f"a share of 1/{num_lookups}"
        axes.plot(NODES, times, marker="o", markersize=4, label=one)
    axes.set_title(f"A lookup that restarts, nodes with {BLOCKS:,} blocks each", loc="left")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(NODES, [f"{nodes:,}" for nodes in NODES])
    axes.minorticks_off()
    axes.set_xlabel("nodes")
    axes.set_ylabel("seconds until it knows all")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    write_picture(figure, path)


if __name__ == "__main__":
    logging.disable()  # thousands of shards would say that they wait
    draw(Path(sys.argv[1]))
