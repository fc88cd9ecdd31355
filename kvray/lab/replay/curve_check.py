"""The curve that a shard would have drawn of a trace, beside full replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES, split_keys
from kvray.lab.replay.simulator import EVERYTHING, Plan, simulate
from kvray.node import PromptNotes
from kvray.store.replay import Trace
from kvray.store.sizing import SampledPrompts, TrafficSample, curve, result_of

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
        notes.note(keys, len(keys), len(keys), 0)
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
    window = _sample(trace, capacity, seed).window()
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
