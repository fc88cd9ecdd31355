"""The curve that a shard would have drawn of a trace, beside full replays."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES, split_keys
from kvray.lab.replay.simulator import EVERYTHING, Plan, simulate
from kvray.node import PromptNotes
from kvray.store.replay import Trace
from kvray.store.replay.trace import Floats
from kvray.store.sizing import SampledPrompts, TrafficSample, Window, curve, result_of

PROMPTS_PER_S, _ENGINES = 2000, 4
"""The load at which costs are measured."""
_REPORT_S = 1.0
_NAME = "trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One size of the host tier; shares are of the blocks asked for."""

    host_blocks: int
    live: float
    error: float
    """The standard error that the curve says it has."""
    full: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveCheck:
    """The curve of one policy and what it cost."""

    policy: str
    admission: str
    nvme_blocks: int
    points: Sequence[CurvePoint]
    rate: float
    sampled_prompts: int
    sampled_blocks: int
    note_us: float
    """Of an engine's thread, for each prompt; this and what follows at `PROMPTS_PER_S`."""
    look_us: float
    """Of an engine's link, for each prompt."""
    add_share: float
    """Of a core, for the shard's sample; the replays take a fixed share beside it."""
    replay_s: float
    """CPU time of all replays of the sample."""
    memory_bytes: int
    """The most that sample and replay had at once."""

    @property
    def mean_error(self) -> float:
        """The mean distance from the full replays, either way."""
        return float(np.mean([abs(one.live - one.full) for one in self.points]))


class _Feed:
    """A trace on its way through an engine's notes to a shard's sample, with times of requests."""

    def __init__(self, trace: Trace, times: Floats, capacity_blocks: int, seed: int) -> None:
        self._trace = trace
        self._times = times
        self._now = 0.0
        self._notes = PromptNotes(lambda: self._now)
        self._space = {"block_bytes": 1, "tokens_per_block": 1}
        self.sample = TrafficSample(capacity_blocks)
        self.note_s = self.look_s = self.add_s = 0.0
        random = np.random.default_rng(seed)
        self._keys = split_keys(random.bytes(KEY_BYTES * trace.num_unique))

    def run(self) -> None:
        """Note every prompt, and report each second of the trace."""
        trace, report_at = self._trace, _REPORT_S
        for request, at in enumerate(self._times.tolist()):
            self._now = at
            if at >= report_at:
                self._report()
                report_at = at + _REPORT_S
            ids = trace.ids[trace.starts[request] : trace.starts[request + 1]].tolist()
            keys = [self._keys[one] for one in ids]
            began_s = time.perf_counter()
            self._notes.note(keys, len(keys), len(keys), 0)
            self.note_s += time.perf_counter() - began_s
        self._report()

    def _report(self) -> None:
        self._notes.heard(self.sample.limit(_NAME, block_bytes=1))
        while True:
            began_s = time.process_time()
            if (prompts := self._notes.take()) is None:
                return
            packed = prompts.pack()
            looked_s = time.process_time()
            self.sample.add(_NAME, SampledPrompts.unpack(packed), **self._space, now=self._now)
            self.look_s += looked_s - began_s
            self.add_s += time.process_time() - looked_s


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
    feed = _Feed(trace, trace.times, capacity, seed)
    feed.run()
    # An engine has its part of the load, and reports it once a second.
    busy = _Feed(trace, np.arange(trace.num_requests) * _ENGINES / PROMPTS_PER_S, capacity, seed)
    busy.run()
    window = feed.sample.window()
    progress("the curve of the sample", 1, total)
    options = {"policy": policy, "admission": admission}
    began_s = time.process_time()
    found = result_of(curve(window, host_blocks, disk_bytes=nvme_blocks, **options))
    replay_s = time.process_time() - began_s
    if _NAME not in found:
        raise ConfigError(f"{trace.name} is too short for a curve: it has {trace.num_refs} blocks.")
    drawn, points = found[_NAME], []
    for at, blocks in enumerate(host_blocks):
        progress(f"{policy}, {blocks:,} blocks", 2 + at, total)
        full = simulate(trace, host_blocks=blocks, nvme_blocks=nvme_blocks, **options)
        points.append(
            CurvePoint(
                host_blocks=blocks,
                live=drawn["host"][at] + drawn["disk"][at],
                error=drawn["error"][at],
                full=full.hit_ratio,
            )
        )
    per_prompt = 1e6 / max(1, trace.num_requests)
    return CurveCheck(
        policy=policy,
        admission=admission,
        nvme_blocks=nvme_blocks,
        points=points,
        rate=window.spaces[0].rate,
        sampled_prompts=window.trace.num_requests,
        sampled_blocks=window.trace.num_refs,
        note_us=busy.note_s * per_prompt,
        look_us=busy.look_s * per_prompt,
        add_share=busy.add_s * PROMPTS_PER_S / max(1, trace.num_requests),
        replay_s=replay_s,
        memory_bytes=_memory_bytes(feed.sample, max(host_blocks), nvme_blocks, options),
    )


def check_curves(
    trace: Trace, plan: Plan, *, seed: int, progress: Callable[[str, int, int], None]
) -> list[CurveCheck]:
    """Return the check of every policy and, with a disk, every admission."""
    return [
        check_curve(
            trace,
            plan.host_blocks,
            policy=policy,
            nvme_blocks=plan.nvme_blocks,
            admission=admission,
            seed=seed,
            progress=progress,
        )
        for policy in plan.policies
        for admission in (plan.admissions if plan.nvme_blocks else (EVERYTHING,))
    ]


def _memory_bytes(
    sample: TrafficSample, host_blocks: int, nvme_blocks: int, options: dict[str, str]
) -> int:
    """Return the most memory that a replay of the largest size has, and the sample."""
    tracemalloc.start()
    try:
        window: Window = sample.window()
        result_of(curve(window, [host_blocks], disk_bytes=nvme_blocks, **options))
        return tracemalloc.get_traced_memory()[1] + sample.num_bytes
    finally:
        tracemalloc.stop()
