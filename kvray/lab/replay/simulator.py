"""A trace through policies and sizes in virtual time, beside its bounds and a shard's curve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES, split_keys
from kvray.node import PromptCounts, PromptNotes
from kvray.store import policy as policies
from kvray.store.replay import Ints, Replay, Trace
from kvray.store.sizing import SampledPrompts, TrafficSample, curve, result_of

POLICIES = tuple(policies.POLICIES)
ADMISSIONS = tuple(policies.ADMISSIONS)
_NEVER = np.iinfo(np.int64).max
BASELINE = "lru"
"""The policy that the others are compared with."""
EVERYTHING = "all"
"""The admission that keeps no block out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One trace replayed through one policy, or a bound, at one size."""

    policy: str
    admission: str | None = None
    """It decides which blocks the NVMe tier takes; None without that tier."""
    host_blocks: int | None  # None: infinite
    nvme_blocks: int = 0
    """Size of the NVMe tier; 0 without one."""
    refs: int
    prompt_tokens: int
    hit_blocks: int
    """Blocks of the contiguous prefixes that were found, in either tier."""
    hit_tokens: int
    host_hit_blocks: int = 0
    nvme_hit_blocks: int = 0
    nvme_written_blocks: int = 0
    seconds: float = 0.0
    gain: float | None = None
    """Its part of the blocks that Belady finds and LRU does not; None if there are none."""
    write_share: float | None = None
    """Its writes to disk over those of LRU with a disk that takes everything; None if none."""

    @classmethod
    def of(cls, trace: Trace, hits: Ints, **fields: Any) -> Outcome:
        """Return the outcome of a trace whose request `r` found `hits[r]` blocks."""
        return cls(
            refs=trace.num_refs,
            prompt_tokens=trace.prompt_tokens,
            hit_blocks=int(hits.sum()),
            hit_tokens=trace.hit_tokens(hits),
            **fields,
        )

    @property
    def title(self) -> str:
        """The name of the policy, and of the admission if there is one."""
        return self.policy if self.admission is None else f"{self.policy} + {self.admission}"

    @property
    def hit_ratio(self) -> float:
        """Blocks found over blocks asked for."""
        return self.hit_blocks / max(1, self.refs)

    @property
    def token_hit_ratio(self) -> float:
        """Tokens in blocks that were found over tokens of all prompts."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def refs_per_s(self) -> float:
        """Blocks asked for in each second of CPU time; 0 if that was too short to be measured."""
        return self.refs / self.seconds if self.seconds else 0.0

    @property
    def written_per_hit(self) -> float | None:
        """Bytes written to the NVMe tier over bytes found there; None if nothing was."""
        return self.nvme_written_blocks / self.nvme_hit_blocks if self.nvme_hit_blocks else None


def simulate(
    trace: Trace,
    *,
    policy: str,
    host_blocks: int,
    nvme_blocks: int = 0,
    admission: str | None = None,
) -> Outcome:
    """Return the outcome on a host tier and, if it has blocks, an NVMe tier."""
    began_s = time.process_time()
    # Half empty, a tier neither evicts nor demotes: a larger one would find the same.
    enough = 2 * max(1, trace.num_unique)
    sizes = min(host_blocks, enough), min(nvme_blocks, enough)
    replay = Replay(trace, policy, *sizes, admission=admission or EVERYTHING)
    for _ in replay.run():
        pass
    return Outcome.of(
        trace,
        replay.host_hits + replay.disk_hits,
        policy=policy,
        admission=admission,
        host_blocks=host_blocks,
        nvme_blocks=nvme_blocks,
        host_hit_blocks=int(replay.host_hits.sum()),
        nvme_hit_blocks=int(replay.disk_hits.sum()),
        nvme_written_blocks=replay.num_written,
        seconds=time.process_time() - began_s,
    )


def infinite(trace: Trace) -> Outcome:
    """Return what a cache that never evicts finds: every block but at its first use."""
    is_first = np.zeros(trace.num_refs + 1, dtype=np.int64)
    is_first[1 + np.unique(trace.ids, return_index=True)[1]] = 1
    hits = np.diff(trace.starts) - np.diff(np.cumsum(is_first)[trace.starts])
    return Outcome.of(trace, hits, policy="infinite", host_blocks=None)


def belady(trace: Trace, num_blocks: int) -> Outcome:
    """Return what a cache of `num_blocks` finds that knows the future.

    A block that is never used again goes at once; then the one whose next use is the farthest
    away, and of those with the same next request the deepest. A parent is used whenever its child
    is, so it never goes before the child.

    No policy has more hits: this is Belady's MIN with the right to keep a block out, which is
    optimal for single blocks, and it always keeps contiguous prefixes, which alone count here.
    """
    # Where each block comes next, or `_NEVER`; shape [num_refs].
    order = np.argsort(trace.ids, kind="stable")
    nexts = np.full(len(order), _NEVER)
    same = trace.ids[order[1:]] == trace.ids[order[:-1]]
    nexts[order[:-1][same]] = order[1:][same]
    ids, next_uses = trace.ids.tolist(), nexts.tolist()
    is_cached = [False] * trace.num_unique
    farthest: list[int] = []
    """A heap of next uses: negative places in `ids`. A place that has passed lies below all that
    have not, and is never looked at, as everything cached has its next use in here."""
    used, hits = 0, []
    for start, end in pairwise(trace.starts.tolist()):
        hit = 0
        for at in range(start, end):
            block, is_used_again = ids[at], next_uses[at] != _NEVER
            hit += is_cached[block]
            used += is_used_again - is_cached[block]
            is_cached[block] = is_used_again
            if is_used_again:
                heappush(farthest, -next_uses[at])
        hits.append(hit)
        while used > num_blocks:
            is_cached[ids[-heappop(farthest)]] = False
            used -= 1
    found = np.array(hits, dtype=np.int64)
    return Outcome.of(trace, found, policy="belady", host_blocks=num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The runs of a replay: every policy at every size, and with a disk every admission."""

    policies: Sequence[str]
    host_blocks: Sequence[int]
    nvme_blocks: int = 0
    admissions: Sequence[str] = ()

    def runs(self) -> Iterator[tuple[int, str, str | None]]:
        """Return size, policy and admission of each run, the baseline's first at each size."""
        baseline = (BASELINE, EVERYTHING if self.nvme_blocks else None)
        admissions: Sequence[str | None] = self.admissions if self.nvme_blocks else (None,)
        others = [(policy, admission) for policy in self.policies for admission in admissions]
        for host_blocks in self.host_blocks:
            for policy, admission in dict.fromkeys([baseline, *others]):
                yield host_blocks, policy, admission


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The outcomes of all runs, and the bounds beside them."""

    trace: Trace
    plan: Plan
    infinite: Outcome
    belady: dict[int, Outcome]
    """The optimum for each size of the host tier; with a disk, for one tier as large as both."""
    outcomes: Sequence[Outcome]

    def mean_gains(self) -> dict[tuple[str, str | None], float | None]:
        """Return for each policy and admission the mean over the sizes at which it has a gain."""
        gains: dict[tuple[str, str | None], list[float]] = {}
        for outcome in self.outcomes:
            of_one = gains.setdefault((outcome.policy, outcome.admission), [])
            if outcome.gain is not None:
                of_one.append(outcome.gain)
        return {name: sum(some) / len(some) if some else None for name, some in gains.items()}


def compare(
    trace: Trace,
    plan: Plan,
    *,
    progress: Callable[[str, int, int], None] = lambda title, done, total: None,
) -> Comparison:
    """Replay as planned; `progress` takes the next run, and how many are done."""
    runs = list(plan.runs())
    total = len(plan.host_blocks) + len(runs)
    bounds: dict[int, Outcome] = {}
    baselines: dict[int, Outcome] = {}
    outcomes: list[Outcome] = []
    for blocks in plan.host_blocks:
        size = blocks + plan.nvme_blocks
        progress(f"Belady, {size:,} blocks", len(bounds), total)
        bounds[blocks] = belady(trace, size)
    for blocks, policy, admission in runs:
        progress(f"{policy}, {blocks:,} blocks", len(bounds) + len(outcomes), total)
        options: dict[str, Any] = {"policy": policy, "admission": admission}
        found = simulate(trace, host_blocks=blocks, nvme_blocks=plan.nvme_blocks, **options)
        lru = baselines.setdefault(blocks, found)
        room, written = bounds[blocks].hit_blocks - lru.hit_blocks, lru.nvme_written_blocks
        gain = (found.hit_blocks - lru.hit_blocks) / room if room else None
        share = found.nvme_written_blocks / written if written else None
        outcomes.append(replace(found, gain=gain, write_share=share))
    return Comparison(
        trace=trace, plan=plan, infinite=infinite(trace), belady=bounds, outcomes=outcomes
    )


_REPORT_S = 1.0
_NAME = "trace"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One size of the host tier; shares are of the blocks asked for."""

    host_blocks: int
    live: float
    error: float
    """The standard error that the curve says it has."""
    full: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveCheck:
    """The curve of one policy."""

    policy: str
    admission: str
    nvme_blocks: int
    points: Sequence[CurvePoint]
    rate: float
    sampled_prompts: int
    sampled_blocks: int

    @property
    def mean_error(self) -> float:
        """The mean distance from the full replays, either way."""
        return float(np.mean([abs(one.live - one.full) for one in self.points]))


def _sample(trace: Trace, capacity_blocks: int, seed: int) -> TrafficSample:
    """Return a shard's sample of a trace: an engine notes every prompt, and reports each second."""
    now, report_at = 0.0, _REPORT_S
    notes, sample = PromptNotes(lambda: now), TrafficSample(capacity_blocks)
    random = np.random.default_rng(seed)
    all_keys = split_keys(random.bytes(KEY_BYTES * trace.num_unique))

    def report() -> None:
        notes.hear(sample.limit(_NAME, block_bytes=1))
        while (prompts := notes.take()) is not None:
            found = SampledPrompts.unpack(prompts.pack())
            sample.add(_NAME, found, block_bytes=1, tokens_per_block=1, now=now)

    for request, at in enumerate(trace.times.tolist()):
        now = at
        if at >= report_at:
            report()
            report_at = at + _REPORT_S
        ids = trace.ids[trace.starts[request] : trace.starts[request + 1]].tolist()
        keys = [all_keys[one] for one in ids]
        notes.note(keys, PromptCounts(len(keys), len(keys)))
    report()
    return sample


def check_curve(
    trace: Trace,
    host_blocks: Sequence[int],
    *,
    policy: str,
    nvme_blocks: int = 0,
    admission: str = EVERYTHING,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda title, done, total: None,
) -> CurveCheck:
    """Draw the curve of a trace for a node with the middle one of the sizes, and check it."""
    total = 2 + len(host_blocks)
    progress("the trace as traffic", 0, total)
    capacity = sorted(host_blocks)[len(host_blocks) // 2]
    window = _sample(trace, capacity, seed).window(counted_share=1.0)
    progress("the curve of the sample", 1, total)
    options = {"policy": policy, "admission": admission}
    found = result_of(curve(window, host_blocks, disk_bytes=nvme_blocks, **options))
    if _NAME not in found:
        raise ConfigError(f"{trace.name} is too short for a curve: it has {trace.num_refs} blocks.")
    drawn, points = found[_NAME], []
    for at, blocks in enumerate(host_blocks):
        progress(f"{policy}, {blocks:,} blocks", 2 + at, total)
        full = simulate(trace, host_blocks=blocks, nvme_blocks=nvme_blocks, **options)
        live, error = drawn["host"][at] + drawn["disk"][at], drawn["error"][at]
        points.append(CurvePoint(blocks, live, error, full.hit_ratio))
    return CurveCheck(
        policy=policy,
        admission=admission,
        nvme_blocks=nvme_blocks,
        points=points,
        rate=window.spaces[0].rate,
        sampled_prompts=window.trace.num_requests,
        sampled_blocks=window.trace.num_refs,
    )


def check_curves(
    trace: Trace, plan: Plan, *, seed: int, progress: Callable[[str, int, int], None]
) -> list[CurveCheck]:
    """Return the check of every policy and, with a disk, every admission."""
    check = partial(
        check_curve,
        trace,
        plan.host_blocks,
        nvme_blocks=plan.nvme_blocks,
        seed=seed,
        progress=progress,
    )
    admissions = plan.admissions if plan.nvme_blocks else (EVERYTHING,)
    return [check(policy=one, admission=other) for one in plan.policies for other in admissions]
