"""How fast things happen in a tier, from two of its statuses; pure."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvray.cli.reasons import MISS_PREFIX

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRates:
    """What one rank did in a second; tokens."""

    replica: str
    rank: int
    is_connected: bool
    prompt: float
    hit: float
    missed: dict[str, float] = field(default_factory=dict)
    """By reason, the largest first."""

    @property
    def hit_share(self) -> float | None:
        """Share of the prompt tokens that hit; None: there were none."""
        return self.hit / self.prompt if self.prompt else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRates:
    """What one node did in a second."""

    shard: Mapping[str, Any]
    """Its status."""
    evicted: float = 0.0
    """Blocks."""
    staged_bytes: float = 0.0
    """That came from other nodes and from disk."""
    written_bytes: float = 0.0
    """To disk."""
    read_bytes: float = 0.0
    """From disk."""


class History:
    """The latest statuses of a tier; rates are over all that are kept."""

    def __init__(self, window_s: float) -> None:
        """Keep those of the last `window_s`, and two at least."""
        self._window_s = window_s
        self._kept: deque[tuple[float, Status]] = deque()

    def add(self, now: float, status: Status) -> None:
        """Take a status that was got at `now`, in seconds."""
        self._kept.append((now, status))
        while len(self._kept) > 2 and now - self._kept[0][0] > self._window_s:
            self._kept.popleft()

    def forget(self) -> None:
        """Start anew: there was a time of which nothing is known."""
        self._kept.clear()

    @property
    def latest(self) -> Status | None:
        """The latest status; None: there is none."""
        return self._kept[-1][1] if self._kept else None

    @property
    def seconds(self) -> float:
        """Time between the first and the last that are kept."""
        return self._kept[-1][0] - self._kept[0][0] if self._kept else 0.0

    def nodes(self) -> list[NodeRates]:
        """Return the rates of every node."""
        if not self._kept:
            return []
        before = {shard["shard"]: shard for shard in self._kept[0][1]["shards"]}
        return [
            NodeRates(
                shard=shard,
                evicted=self._rate(shard, before.get(shard["shard"]), "arena", "evicted"),
                staged_bytes=self._rate(
                    shard, before.get(shard["shard"]), "staging", "staged_bytes"
                ),
                written_bytes=self._rate(
                    shard, before.get(shard["shard"]), "nvme", "written_bytes"
                ),
                read_bytes=self._rate(shard, before.get(shard["shard"]), "nvme", "read_bytes"),
            )
            for shard in self._kept[-1][1]["shards"]
        ]

    def replicas(self) -> list[ReplicaRates]:
        """Return the rates of every rank that is there, or has done something."""
        if not self._kept:
            return []
        before = {(one["replica"], one["rank"]): one for one in _replicas(self._kept[0][1])}
        found = []
        for one in _replicas(self._kept[-1][1]):
            then = before.get((one["replica"], one["rank"]), one)
            rates = {
                name: self._per_s(value - then["counters"].get(name, 0))
                for name, value in one["counters"].items()
            }
            missed = {
                name.removeprefix(MISS_PREFIX): rate
                for name, rate in sorted(rates.items(), key=lambda pair: -pair[1])
                if name.startswith(MISS_PREFIX) and rate
            }
            found.append(
                ReplicaRates(
                    replica=one["replica"],
                    rank=one["rank"],
                    is_connected=one["connected"],
                    prompt=rates.get("prompt_tokens", 0.0),
                    hit=rates.get("hit_tokens", 0.0),
                    missed=missed,
                )
            )
        return found

    def _rate(self, now: Status, before: Status | None, section: str, name: str) -> float:
        if before is None or section not in now or section not in before:
            return 0.0
        return self._per_s(now[section].get(name, 0) - before[section].get(name, 0))

    def _per_s(self, change: float) -> float:
        """Return a rate; what was started anew counts from 0, which is no rate."""
        return max(0.0, change) / self.seconds if self.seconds else 0.0


def _replicas(status: Status) -> Iterator[Mapping[str, Any]]:
    for shard in status["shards"]:
        yield from shard.get("replicas", ())
