"""A trace through several policies and sizes, beside LRU and beside what no policy beats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvray.replay.bounds import Bound, belady, infinite
from kvray.replay.results import Outcome
from kvray.replay.trace import Trace

BASELINE = "lru"
"""The policy that the others are compared with."""


class Simulate(Protocol):
    """Replays a trace through one policy."""

    def __call__(
        self,
        trace: Trace,
        *,
        policy: str,
        host_blocks: int,
        nvme_blocks: int = 0,
        admission: str | None = None,
        progress: Callable[[int, int], None],
    ) -> Outcome:
        """Return what was found; `progress` takes requests done and requests in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    """What can be replayed."""

    simulate: Simulate
    policies: Sequence[str]
    """Among them `BASELINE`."""
    admissions: Sequence[str]
    everything: str
    """The admission that keeps no block out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be replayed: every policy at every size, and with a disk every admission."""

    policies: Sequence[str]
    host_blocks: Sequence[int]
    nvme_blocks: int = 0
    """Size of the NVMe tier; 0 for none."""
    admissions: Sequence[str | None] = (None,)

    def runs(self, everything: str | None) -> Iterator[tuple[int, str, str | None]]:
        """Return size, policy and admission of each run, the baseline's first at each size."""
        baseline = (BASELINE, everything if self.nvme_blocks else None)
        wanted = [(policy, admission) for policy in self.policies for admission in self.admissions]
        for host_blocks in self.host_blocks:
            for policy, admission in dict.fromkeys([baseline, *wanted]):
                yield host_blocks, policy, admission


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What all runs found."""

    trace: Trace
    plan: Plan
    infinite: Bound
    belady: dict[int, Bound]
    """The optimum for each size of the host tier; with a disk, for one tier as large as both."""
    outcomes: Sequence[Outcome]
    baselines: dict[int, Outcome]
    """LRU's for each size of the host tier, with a disk that takes everything."""

    def gain(self, outcome: Outcome) -> float | None:
        """Return how much of what Belady finds and LRU does not it found; None of nothing."""
        baseline = self.baselines[outcome.host_blocks].hit_blocks
        room = self.belady[outcome.host_blocks].hit_blocks - baseline
        return (outcome.hit_blocks - baseline) / room if room else None

    def write_share(self, outcome: Outcome) -> float | None:
        """Return its writes to disk over LRU's; None if there are none."""
        written = self.baselines[outcome.host_blocks].nvme_written_blocks
        return outcome.nvme_written_blocks / written if written else None

    def mean_gain(self, policy: str, admission: str | None) -> float | None:
        """Return the mean of a policy's gains over the sizes at which there is one."""
        gains = [
            gain
            for outcome in self.outcomes
            if (outcome.policy, outcome.admission) == (policy, admission)
            and (gain := self.gain(outcome)) is not None
        ]
        return sum(gains) / len(gains) if gains else None


def compare(
    trace: Trace,
    plan: Plan,
    simulator: Simulator,
    *,
    progress: Callable[[str, int, int], None],
) -> Comparison:
    """Replay a trace as planned.

    Args:
        trace: what is asked for.
        plan: which policies, sizes and admissions.
        simulator: what replays it.
        progress: called with the run's title, and requests done and in all, of all runs.
    """
    runs = list(plan.runs(simulator.everything))
    total = (len(runs) + len(plan.host_blocks)) * trace.num_requests
    finished = 0

    def report_as(title: str) -> Callable[[int, int], None]:
        return lambda done, _: progress(title, finished + done, total)

    bounds = {}
    for blocks in plan.host_blocks:
        size = blocks + plan.nvme_blocks
        bounds[blocks] = belady(trace, size, progress=report_as(f"Belady, {size:,} blocks"))
        finished += trace.num_requests
    outcomes = []
    for blocks, policy, admission in runs:
        outcomes.append(
            simulator.simulate(
                trace,
                policy=policy,
                host_blocks=blocks,
                nvme_blocks=plan.nvme_blocks,
                admission=admission,
                progress=report_as(f"{policy}, {blocks:,} blocks"),
            )
        )
        finished += trace.num_requests
    return Comparison(
        trace=trace,
        plan=plan,
        infinite=infinite(trace),
        belady=bounds,
        outcomes=outcomes,
        baselines=_baselines(outcomes),
    )


def _baselines(outcomes: Sequence[Outcome]) -> dict[int, Outcome]:
    """Return the first outcome of each size, which is the baseline's."""
    found: dict[int, Outcome] = {}
    for outcome in outcomes:
        found.setdefault(outcome.host_blocks, outcome)
    return found
