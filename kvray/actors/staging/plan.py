"""Plans which blocks to fetch, from which shards, and whether that is worth it; pure."""

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.identity.block import BlockKey
from kvray.index import Run
from kvray.store import PartRequest
from kvray.store.arena.lease import usable_lengths
from kvray.trace.reasons import StageReason

Mask = npt.NDArray[np.bool_]

CHUNK_BLOCKS = 64
"""A run up to this long comes from one shard; a longer one is dealt out to all that have it."""
_ENDS_MAX = 8  # ends of a prefix to compare the costs of
_RUNS_MAX = 64
"""Runs of all parts that one plan considers, so that it takes milliseconds in any tier; the next
plan considers what follows."""
_RUNS_MIN = 4
_SHARDS_MAX = 8  # shards that one plan chooses from, for each part of a run
_CHUNKS_MAX = 32  # chunks of one prefix; a longer prefix has larger chunks
_UNMEASURED_BYTES_PER_S = 10e9
"""Faster than any measured node, so that unmeasured ones are tried."""

_Stops = dict[int, dict[str, npt.NDArray[np.int64]]]
"""Part -> shard -> for each block, the end of the run that the shard has from it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A shard that has blocks, and how fast it gives them."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    """None: not measured; counts as free when costs are compared."""
    has_failed: bool = False
    """Its last fetch failed: it is used only for blocks that no other shard has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The blocks to stage, and the ranks that read them here."""

    keys: tuple[BlockKey, ...]
    readers: tuple[tuple[PartRequest, ...], ...]
    """For each rank that reads here, the parts that its lease must have."""
    block_bytes: Mapping[int, int]
    """Part -> bytes of one block of it."""
    namespace: int = 0
    """Their namespace, see `block.namespace_id`; 0: not known."""
    seconds_per_block: float = 0.0
    """The cost of computing a block; 0: unknown, and a fetch is always worth it."""

    @property
    def num_blocks(self) -> int:
        """Number of its blocks."""
        return len(self.keys)

    @property
    def parts(self) -> tuple[PartRequest, ...]:
        """The parts that make a block whole for all readers together."""
        return tuple(dict.fromkeys(one for reader in self.readers for one in reader))

    @property
    def windowed(self) -> frozenset[int]:
        """The parts of which a block is useful without the one before it."""
        return frozenset(one.part for one in self.parts if one.window is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStep:
    """Blocks `start` to `stop` of one part, to fetch from one shard."""

    shard: str
    part: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingPlan:
    """The blocks to fetch, parents before their children."""

    num_blocks: int
    """Length of the prefix that is here after all steps."""
    steps: tuple[FetchStep, ...] = ()
    reason: StageReason = "none"
    """Why the prefix is not longer."""
    seconds: float = 0.0
    """Expected time of the fetch."""


def plan_staging(
    prefix: Prefix, here: Mapping[int, Mask], runs: Sequence[Run], peers: Mapping[str, Peer]
) -> StagingPlan:
    """Return which missing blocks to fetch from where.

    The prefix ends before the first block without a holder, or where going on costs more time than
    it saves. Of a part with a window it needs the last blocks only. Where the holders change very
    often the plan ends after some runs: once those are here, the next plan has the rest.

    `here` has for each part a mask of its blocks that are here, and `runs` the holders from the
    first block on; blocks after the last run have none. Only `peers` may be asked; of equal ones
    the first is preferred.
    """
    begin = longest_prefix(prefix, here)
    runs_max = max(_RUNS_MIN, _RUNS_MAX // max(1, len(prefix.block_bytes)))
    first = bisect.bisect_right(runs, begin, key=lambda run: run.stop)
    plan = _plan(prefix, begin, here, _slice(runs, first, first + runs_max), peers)
    if prefix.windowed and not plan.steps and first + runs_max < len(runs):
        # A prefix may be of use at its end only.
        plan = _plan(prefix, begin, here, _slice(runs, len(runs) - runs_max, len(runs)), peers)
    return plan


def longest_prefix(prefix: Prefix, here: Mapping[int, Mask]) -> int:
    """Return how many leading blocks are usable with the blocks `here` of each part."""
    return int(_ends(prefix, here)[-1])


def _slice(runs: Sequence[Run], first: int, last: int) -> Sequence[Run]:
    """Return some of the runs, as if the blocks before and after had no holders."""
    before = [Run(stop=runs[first - 1].stop, holders={})] if first else []
    return [*before, *runs[first:last]]


def _plan(
    prefix: Prefix,
    begin: int,
    here: Mapping[int, Mask],
    runs: Sequence[Run],
    peers: Mapping[str, Peer],
) -> StagingPlan:
    """Return the plan for all of `runs`; the first `begin` blocks are here."""
    everywhere = {one.part: here[one.part].copy() for one in prefix.parts}
    stops: _Stops = {}
    for shard, part, mask in _held(prefix, runs, _chosen(prefix, runs, peers)):
        everywhere[part] |= mask
        stops.setdefault(part, {})[shard] = _stops(mask)
    ends = _ends(prefix, everywhere)
    plans = [
        StagingPlan(num_blocks=begin),
        *(
            _plan_until(prefix, end, here, stops, peers)
            for end in _candidates(ends[ends > begin], runs, prefix.seconds_per_block > 0)
        ),
    ]
    best = max(plans, key=lambda plan: (_saved(prefix, begin, plan), plan.num_blocks))
    reason: StageReason = "cheaper_to_recompute" if best.num_blocks < ends[-1] else "not_stored"
    if best.num_blocks == prefix.num_blocks:
        reason = "none"
    return replace(best, reason=reason)


def _ends(prefix: Prefix, here: Mapping[int, Mask]) -> npt.NDArray[np.int64]:
    parts = [(one.window, here[one.part]) for one in prefix.parts]
    return usable_lengths(prefix.num_blocks, parts)


def _chosen(prefix: Prefix, runs: Sequence[Run], peers: Mapping[str, Peer]) -> list[str]:
    """Return the shards to choose from: some for each part of each run, the preferred first."""
    order = sorted(peers, key=lambda shard: peers[shard].has_failed)
    places = {shard: place for place, shard in enumerate(order)}
    chosen: dict[str, None] = {}
    for run in runs:
        ranked = sorted(run.holders.keys() & places.keys(), key=places.__getitem__)
        for part in prefix.block_bytes:
            having = (shard for shard in ranked if run.holders[shard] >> part & 1)
            chosen.update(dict.fromkeys(itertools.islice(having, _SHARDS_MAX)))
    return list(chosen)


def _held(
    prefix: Prefix, runs: Sequence[Run], shards: Sequence[str]
) -> Iterator[tuple[str, int, Mask]]:
    """Yield shard, part and the mask of its blocks, for the requested parts that a shard has."""
    lengths = np.diff([0, *(min(run.stop, prefix.num_blocks) for run in runs)])
    for shard in shards:
        by_run = [run.holders.get(shard, 0) for run in runs]
        for part in prefix.block_bytes:
            has = np.array([bits >> part & 1 for bits in by_run], dtype=bool)
            if has.any():
                mask = np.zeros(prefix.num_blocks, dtype=bool)
                mask[: lengths.sum()] = np.repeat(has, lengths)
                yield shard, part, mask


def _candidates(ends: Any, runs: Sequence[Run], has_price: bool) -> list[int]:
    """Return the ends to compare: the last and, where costs count, those where holders change."""
    if not len(ends):
        return []
    last = int(ends[-1])
    if not has_price:
        return [last]
    stops = sorted({run.stop for run in runs if run.stop < last}, reverse=True)
    reachable = set(ends.tolist())
    return [last, *(stop for stop in stops if stop in reachable)][:_ENDS_MAX]


def _saved(prefix: Prefix, begin: int, plan: StagingPlan) -> float:
    """Return the seconds that fetching saves over computing; 0 if the costs are not known."""
    if not prefix.seconds_per_block:
        return 0.0
    return (plan.num_blocks - begin) * prefix.seconds_per_block - plan.seconds


def _plan_until(
    prefix: Prefix,
    end: int,
    here: Mapping[int, Mask],
    stops: _Stops,
    peers: Mapping[str, Peer],
) -> StagingPlan:
    """Return the plan that makes the first `end` blocks whole; each has a holder."""
    deal = _Deal(prefix, stops, peers)
    missing = sorted(
        (start, part, stop)
        for part, first in _first_needed(prefix, end).items()
        for start, stop in _gaps(here[part], first, end)
    )
    steps = [step for start, part, stop in missing for step in deal.steps(part, start, stop)]
    steps.sort(key=lambda step: (step.start, step.part))
    return StagingPlan(num_blocks=end, steps=tuple(steps), seconds=deal.seconds())


def _first_needed(prefix: Prefix, end: int) -> dict[int, int]:
    """Return for each part the first block that a prefix of `end` blocks needs of it."""
    first: dict[int, int] = {}
    for part, window, _ in prefix.parts:
        start = 0 if window is None else max(0, end - window)
        first[part] = min(start, first.get(part, start))
    return first


def _gaps(here: Mask, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of blocks from `start` to `stop` that are not here."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], here[start:stop], [True]))))
    for begin, end in edges.reshape(-1, 2).tolist():
        yield start + begin, start + end


class _Deal:
    """Deals blocks out to their holders; the bytes that a shard was dealt count against it."""

    def __init__(self, prefix: Prefix, stops: _Stops, peers: Mapping[str, Peer]) -> None:
        self._prefix = prefix
        self._stops = stops
        self._peers = peers
        self._dealt: dict[str, int] = {}
        self._chunk = max(CHUNK_BLOCKS, prefix.num_blocks // _CHUNKS_MAX)

    def steps(self, part: int, start: int, stop: int) -> list[FetchStep]:
        """Return the steps that fetch blocks `start` to `stop` of `part`."""
        dealt: list[FetchStep] = []
        while start < stop:
            shard, end = self._choose(part, start, stop)
            num_bytes = (end - start) * self._prefix.block_bytes[part]
            self._dealt[shard] = self._dealt.get(shard, 0) + num_bytes
            if dealt and dealt[-1].shard == shard:
                start = dealt.pop().start
            dealt.append(FetchStep(shard=shard, part=part, start=start, stop=end))
            start = end
        return dealt

    def seconds(self) -> float:
        """Return the time if all shards give at once; unmeasured ones count as free."""
        return max(
            (
                self._peers[shard].latency_s + num_bytes / rate
                for shard, num_bytes in self._dealt.items()
                if (rate := self._peers[shard].bytes_per_s)
            ),
            default=0.0,
        )

    def _choose(self, part: int, start: int, stop: int) -> tuple[str, int]:
        """Return the shard for the next blocks, and where they end."""
        ends = {
            shard: min(int(stops[start]), stop)
            for shard, stops in self._stops[part].items()
            if stops[start] > start
        }
        sure = {shard: end for shard, end in ends.items() if not self._peers[shard].has_failed}
        ends = sure or ends
        if len(ends) > 1:
            # Keep runs long: leave out shards that have only the beginning of one.
            longest = min(max(ends.values()), start + self._chunk) - start
            ends = {s: e for s, e in ends.items() if min(e - start, self._chunk) * 2 > longest}
        shard = min(ends, key=lambda one: self._finish(one, part))
        end = ends[shard]
        return shard, end if len(ends) == 1 else min(end, start + self._chunk)

    def _finish(self, shard: str, part: int) -> float:
        """Return when a shard would be done with one more chunk."""
        peer = self._peers[shard]
        num_bytes = self._dealt.get(shard, 0) + self._chunk * self._prefix.block_bytes[part]
        return peer.latency_s + num_bytes / (peer.bytes_per_s or _UNMEASURED_BYTES_PER_S)


def _stops(mask: Mask) -> npt.NDArray[np.int64]:
    """Return for each block the end of its run; itself where it is in none."""
    places = np.arange(len(mask))
    next_gap = np.minimum.accumulate(np.where(mask, len(mask), places)[::-1])[::-1]
    return np.where(mask, next_gap, places)


def runs_of(holder: str, masks: Mapping[int, Mask]) -> list[Run]:
    """Return the runs of the blocks that one holder has.

    The `masks` by part, all of equal length, say which of the prefix's blocks those are.
    """
    length = max((len(mask) for mask in masks.values()), default=0)
    if not any(mask.any() for mask in masks.values()):
        return []
    changes = [np.flatnonzero(np.diff(mask)) + 1 for mask in masks.values()]
    stops = np.unique(np.concatenate([*changes, [length]])).astype(int).tolist()
    runs: list[Run] = []
    for stop in stops:
        parts = sum(1 << part for part, mask in masks.items() if mask[stop - 1])
        runs.append(Run(stop=stop, holders={holder: parts} if parts else {}))
    return runs


def merged(one: Sequence[Run], other: Sequence[Run]) -> list[Run]:
    """Return the runs with the holders of both."""
    if not one or not other:
        return [*one, *other]
    stops = sorted({run.stop for run in (*one, *other)})
    return [
        Run(stop=stop, holders={**_holders(one, stop), **_holders(other, stop)}) for stop in stops
    ]


def _holders(runs: Sequence[Run], stop: int) -> Mapping[str, int]:
    at = bisect.bisect_left(runs, stop, key=lambda run: run.stop)
    return runs[at].holders if at < len(runs) else {}
