"""Where prompt tokens came from, in all and per second; the same in every command; pure."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from kvray.actors.names import node_of
from kvray.console.output import empty_table
from kvray.metrics import figure, places_of
from kvray.trace.reasons import MISS_PREFIX

SOURCES = {
    "own pool": places_of("own_tokens_total"),
    "host": places_of("hit_tokens_total", tier="host"),
    "disk": places_of("hit_tokens_total", tier="nvme"),
    "remote": places_of("hit_tokens_total", tier="remote"),
}
"""The counters of prompt tokens that were not computed: the engine had them itself, or the tier had
them in the node's memory, on its disk or on other nodes."""
COMPUTED = "computed"
"""All other prompt tokens."""
_REASONS_MAX = 3


def ranks_of(shards: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the ranks that shards know, connected or not."""
    return [rank for shard in shards for rank in shard.get("replicas", ())]


def ended_of(shards: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return each shard's sums of ranks that ended a while ago, if it has any."""
    return [shard["ended"] for shard in shards if shard.get("ended", {}).get("ranks")]


def total_counters(ranks: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the sums of all counters."""
    totals: Counter[str] = Counter()
    for rank in ranks:
        totals.update(rank["counters"])
    return totals


def token_sources(counters: Mapping[str, float]) -> dict[str, float]:
    """Return how many prompt tokens came from each source, and how many were computed."""
    found = {
        source: sum(counters.get(name, 0) for name in names) for source, names in SOURCES.items()
    }
    return {**found, COMPUTED: max(0, counters.get("prompt_tokens", 0) - sum(found.values()))}


def source_shares(counters: Mapping[str, float], *, digits: int = 0) -> dict[str, str]:
    """Return each source's share of the prompt tokens; empty texts if there were none."""
    prompt = counters.get("prompt_tokens", 0)
    return {
        source: f"{tokens / prompt:.{digits}%}" if prompt else ""
        for source, tokens in token_sources(counters).items()
    }


def sources_sentence(counters: Mapping[str, float]) -> str:
    """Return the shares as text; there must be prompt tokens."""
    return ", ".join(
        f"{source} {share}" for source, share in source_shares(counters, digits=1).items()
    )


def first_token_texts(found: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a status's median time to the first token, and the 90th percentile; None: unknown."""
    times = found.get("first_tokens_s")
    if not times:
        return None
    p50, p90 = (
        f"{one:.1f} s" if one >= 1 else f"{1000 * one:.0f} ms"
        for one in (times["p50"], times["p90"])
    )
    return p50, p90


def hit_share(counters: Mapping[str, float]) -> str:
    """Return the share of the prompt tokens that nobody computed; empty if there were none."""
    prompt = counters.get("prompt_tokens", 0)
    return f"{1 - token_sources(counters)[COMPUTED] / prompt:.0%}" if prompt else ""


def tier_share(counters: Mapping[str, float]) -> str:
    """Return the share of the prompt tokens that came from the tier; empty if there were none."""
    prompt = counters.get("prompt_tokens", 0)
    return f"{counters.get('hit_tokens', 0) / prompt:.1%}" if prompt else ""


Status = Mapping[str, Any]


class NodeRates(NamedTuple):
    """The work of one node in a second, and its shard's status."""

    shard: Status
    evicted: float  # blocks
    staged_bytes: float  # from other nodes and from disk
    written_bytes: float
    read_bytes: float


class ReplicaRates(NamedTuple):
    """The tokens of one rank in a second, and what its shard says of it."""

    rank: Status
    node: str
    """The one whose shard it asks."""
    counters: dict[str, float]
    """How much each counter grew in a second."""
    missed: dict[str, float]  # by reason, the largest first

    @property
    def prompt(self) -> float:
        """Prompt tokens."""
        return self.counters.get("prompt_tokens", 0.0)


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

    @property
    def seconds(self) -> float:
        """Time between the first and the last that are kept."""
        return self._kept[-1][0] - self._kept[0][0] if self._kept else 0.0

    def nodes(self) -> list[NodeRates]:
        """Return the rates of every node."""
        if not self._kept:
            return []
        before = {shard["shard"]: shard for shard in self._kept[0][1]["shards"]}
        found = []
        for shard in self._kept[-1][1]["shards"]:
            then = before.get(shard["shard"])
            found.append(
                NodeRates(
                    shard,
                    evicted=self._rate(shard, then, "evicted_blocks_total", tier="host"),
                    staged_bytes=self._rate(shard, then, "moved_bytes_total", direction="in"),
                    written_bytes=self._rate(shard, then, "nvme_written_bytes_total"),
                    read_bytes=self._rate(shard, then, "nvme_read_bytes_total"),
                )
            )
        return found

    def replicas(self) -> list[ReplicaRates]:
        """Return the rates of every rank that the shards know."""
        if not self._kept:
            return []
        first, last = (
            [(s["shard"], one) for s in kept["shards"] for one in ranks_of([s])]
            for kept in (self._kept[0][1], self._kept[-1][1])
        )
        # Nodes may have replicas of one name.
        before = {(node, one["replica"], one["rank"]): one["counters"] for node, one in first}
        found = []
        for node, one in last:
            then = before.get((node, one["replica"], one["rank"]), one["counters"])
            if one["counters"].get("uptime_s", 0) < then.get("uptime_s", 0):
                then = {}  # its engine was started again meanwhile
            rates = {
                name: self._per_s(value - then.get(name, 0))
                for name, value in one["counters"].items()
            }
            missed = {
                name.removeprefix(MISS_PREFIX): rate
                for name, rate in sorted(rates.items(), key=lambda pair: -pair[1])
                if name.startswith(MISS_PREFIX) and rate
            }
            found.append(ReplicaRates(one, node_of(node), rates, missed))
        return found

    def _rate(self, now: Status, before: Status | None, name: str, **labels: str) -> float:
        if before is None or "arena" not in now or "arena" not in before:
            return 0.0
        return self._per_s(figure(now, name, **labels) - figure(before, name, **labels))

    def _per_s(self, change: float) -> float:
        """Return a rate; 0 if a part was restarted, whose counters begin at 0."""
        return max(0.0, change) / self.seconds if self.seconds else 0.0


def replicas_table(replicas: Sequence[ReplicaRates]) -> Table:
    """Return one row for each rank."""
    numbers = ("prompt tok/s", *SOURCES, COMPUTED)
    table = empty_table("replica", "rank", "node", numbers=numbers, rest=["missed, tok/s"])
    for one in replicas:
        reasons = list(one.missed.items())[:_REASONS_MAX]
        because = ", ".join(f"{name.replace('_', ' ')} {rate:,.0f}" for name, rate in reasons)
        table.add_row(
            one.rank["replica"] + ("" if one.rank["connected"] else " gone"),
            str(one.rank["rank"]),
            one.node,
            f"{one.prompt:,.0f}",
            *source_shares(one.counters).values(),
            because,
        )
    return table
