"""Which replica gets a request, and why; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvray.routing.cost import Cost

RECENT_S = 30.0
"""After this time a piece of work counts for 1/e of itself."""

Reason = Literal["prefix", "queue", "fallback"]
"""`prefix`: nowhere is the prompt less work. `queue`: somewhere it is, but others wait there, or
that replica lately had more than its share. `fallback`: the prompt is the same work everywhere, as
far as anybody knows, and the least loaded replica gets it."""
REASONS: tuple[Reason, ...] = get_args(Reason)

SHARE_MAX = 1.2
"""At so many times the mean utilization, what a replica has of a prompt counts for nothing."""
LATER_GAIN, LATER_MAX = 3.0, 32.0
"""What a second of work costs later requests, and its bound. Chosen on the conversation trace and
on generated conversations, among some ten forms."""
_TIE_S = 1e-3
"""Predictions this close are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """One candidate's cost, and what it costs others."""

    cost: Cost
    later_s: float
    """What later requests wait for the work that another candidate would save."""
    crowd_s: float
    """Credit that it loses for what it has of the prompt, as it lately got more than its share."""

    @property
    def score_s(self) -> float:
        """What candidates are ranked by."""
        return self.cost.first_token_s + self.later_s + self.crowd_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The replica that gets a request, the reason, and all that was compared."""

    replica: str
    reason: Reason
    ranked: tuple[Ranked, ...]
    """Of every candidate, the best first."""

    @property
    def cost(self) -> Cost:
        """What it costs on the chosen replica."""
        return self.ranked[0].cost


def choose(costs: Sequence[Cost], *, draws: Sequence[float]) -> Choice:
    """Return the replica with the earliest first token, weighed with what its work costs others.

    Work that another replica would save makes later requests wait: little in an idle fleet, most
    near saturation. A replica that lately got more than its share gets less credit for what it has
    of the prompt: else one prefix that all requests share would keep them all on one replica. Ties
    go to the replica with the lowest utilization, and equal ones are drawn.

    Args:
        costs: of each candidate; at least one.
        draws: a random number for each candidate; the same numbers make the same choice.
    """
    work = [cost.work_s for cost in costs]
    least_s, most_s = min(work), max(work)
    mean = sum(cost.utilization for cost in costs) / len(costs)
    later = _later(mean)
    # One more such request for each: the first few after a pause may stay together.
    share = mean + most_s / RECENT_S
    ranked = [
        Ranked(
            cost=cost,
            later_s=later * (work_s - least_s),
            crowd_s=(1 + later) * (most_s - work_s) * _lost(cost.utilization, share),
        )
        for cost, work_s in zip(costs, work, strict=True)
    ]
    scores = [one.score_s for one in ranked]
    best_s = min(scores)
    order = sorted(
        range(len(ranked)),
        key=lambda at: (max(scores[at], best_s + _TIE_S), costs[at].utilization, draws[at]),
    )
    best = costs[order[0]]
    return Choice(
        replica=best.replica,
        reason=_reason(best.work_s, least_s, most_s),
        ranked=tuple(ranked[at] for at in order),
    )


def _later(utilization: float) -> float:
    """Return how many seconds later requests wait, in all, for one second of work.

    In a queue with random arrivals and like pieces of work, u / (1 - u) requests are there at
    utilization u. Prompts differ far more, and `LATER_GAIN` stands for that.
    """
    return min(LATER_MAX, LATER_GAIN * utilization / max(1e-9, 1 - utilization))


def _lost(utilization: float, share: float) -> float:
    """Return the part of its credit that a replica loses; `share` is its fair utilization."""
    above = (utilization / share - 1) / (SHARE_MAX - 1) if share else 0.0
    return min(1.0, max(0.0, above))


def _reason(work_s: float, least_s: float, most_s: float) -> Reason:
    if most_s - least_s < _TIE_S:
        return "fallback"
    return "prefix" if work_s - least_s < _TIE_S else "queue"
