"""A trace through several routers, beside one replica with all the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvray.lab.replay.fleet.plan import FleetPlan
from kvray.lab.replay.fleet.results import FleetOutcome
from kvray.lab.replay.fleet.simulator import simulate
from kvray.store.replay.trace import Trace

ONE = "one replica"
"""The bound: a replica with the memory and the rate of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetComparison:
    """The outcomes of all routers, and the bound."""

    trace: Trace
    plan: FleetPlan
    one: FleetOutcome
    outcomes: Sequence[FleetOutcome]


def compare_routers(
    trace: Trace,
    plan: FleetPlan,
    routers: Sequence[str],
    *,
    progress: Callable[[str, int, int], None] = lambda title, done, total: None,
) -> FleetComparison:
    """Replay a trace through each router.

    `progress` takes the name of the next run, and how many runs are done and in all.
    """
    total = 1 + len(routers)
    progress(ONE, 0, total)
    one = replace(simulate(trace, plan.merged(), router="round_robin"), router=ONE)
    outcomes = []
    for done, router in enumerate(routers, start=1):
        progress(router, done, total)
        found = simulate(trace, plan, router=router)
        share = found.reuse / one.reuse if one.reuse else None
        outcomes.append(replace(found, reuse_of_one=share))
    return FleetComparison(trace=trace, plan=plan, one=one, outcomes=outcomes)
