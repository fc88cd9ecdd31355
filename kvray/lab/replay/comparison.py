"""A trace through several policies and sizes, beside LRU and beside the bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvray.lab.replay.bounds import belady, infinite
from kvray.lab.replay.results import Outcome
from kvray.store.replay.trace import Trace

BASELINE = "lru"
"""The policy that the others are compared with."""
EVERYTHING = "all"
"""The admission that keeps no block out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The runs of a replay: every policy at every size, and with a disk every admission."""

    policies: Sequence[str]
    host_blocks: Sequence[int]
    nvme_blocks: int = 0
    """Size of the NVMe tier; 0 for none."""
    admissions: Sequence[str | None] = (None,)

    def runs(self) -> Iterator[tuple[int, str, str | None]]:
        """Return size, policy and admission of each run, the baseline's first at each size."""
        baseline = (BASELINE, EVERYTHING if self.nvme_blocks else None)
        others = [(policy, admission) for policy in self.policies for admission in self.admissions]
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
    simulate: Callable[..., Outcome],
    *,
    progress: Callable[[str, int, int], None] = lambda title, done, total: None,
) -> Comparison:
    """Replay a trace as planned; `simulate` does one run, as `simulator.simulate`.

    `progress` takes the name of the next run, and how many runs are done and in all.
    """
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
        options = {"policy": policy, "admission": admission, "nvme_blocks": plan.nvme_blocks}
        found = simulate(trace, host_blocks=blocks, **options)
        lru = baselines.setdefault(blocks, found)
        room, written = bounds[blocks].hit_blocks - lru.hit_blocks, lru.nvme_written_blocks
        gain = (found.hit_blocks - lru.hit_blocks) / room if room else None
        share = found.nvme_written_blocks / written if written else None
        outcomes.append(replace(found, gain=gain, write_share=share))
    return Comparison(
        trace=trace, plan=plan, infinite=infinite(trace), belady=bounds, outcomes=outcomes
    )
