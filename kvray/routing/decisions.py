"""The requests of one router, from the choice of a replica to the first token; pure.

`Outcomes` counts how choices turned out, as totals of declared metrics.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Literal, Protocol

from kvray.metrics import FIRST_TOKENS
from kvray.routing.choice import REASONS, Choice, Ranked, Reason
from kvray.routing.cost import Cost
from kvray.routing.survey import Survey

SurveyOutcome = Literal["answered", "failed", "skipped"]
_SURVEY_OUTCOMES: tuple[SurveyOutcome, ...] = ("answered", "failed", "skipped")

_BOUNDS_S = (*(2.0**bits for bits in range(-9, 9)), float("inf"))
"""Where the buckets end: 2 ms to 256 s."""
_DECISIONS_MAX, _UNSENT_S = 4096, 600.0
"""Serve does not report abandoned requests, so the oldest entries are dropped: beyond so many, and
those that no replica has taken for so long."""


class Outcomes:
    """Counts; written by one thread and read by another."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._surveys: Counter[str] = Counter(dict.fromkeys(_SURVEY_OUTCOMES, 0))
        self._times = {noun: _Times() for noun in FIRST_TOKENS}
        self._predicted_s = 0.0
        self._latest_s: deque[float] = deque(maxlen=_DECISIONS_MAX)

    def surveyed(self, outcome: SurveyOutcome) -> None:
        """Count a question to the tier."""
        self._surveys[outcome] += 1

    def sent(self, reason: Reason) -> None:
        """Count a request that went to a replica."""
        self._reasons[reason] += 1

    def first_token(self, real_s: float, predicted_s: float | None) -> None:
        """Count a first token; None: nobody had predicted it."""
        self._times["first_token"].observe(real_s)
        self._latest_s.append(real_s)
        if predicted_s is not None:
            self._times["first_token_error"].observe(abs(real_s - predicted_s))
            self._predicted_s += predicted_s

    def take_first_tokens(self) -> list[float]:
        """Return the seconds to each first token since the last call, the latest 4096 at most."""
        taken = [*self._latest_s]
        self._latest_s.clear()
        return taken

    def totals(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return metric without `kvray_`, and its labels -> the total."""
        made: dict[tuple[str, tuple[str, ...]], float] = {}
        made |= {("routed_requests_total", (name,)): n for name, n in self._reasons.items()}
        made |= {("router_surveys_total", (name,)): n for name, n in self._surveys.items()}
        made["predicted_first_token_seconds_sum_total", ()] = self._predicted_s
        for noun, times in self._times.items():
            below = 0
            for bound, count in zip(_BOUNDS_S, times.buckets, strict=True):
                below += count
                le = "+Inf" if bound == float("inf") else f"{bound:.9f}".rstrip("0").rstrip(".")
                made[f"{noun}_seconds_bucket_total", (le,)] = below
            made[f"{noun}_count_total", ()] = below
            made[f"{noun}_seconds_sum_total", ()] = times.sum_s
        return made


class _Times:
    def __init__(self) -> None:
        self.buckets = [0] * len(_BOUNDS_S)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True, kw_only=True)
class _Decision:
    at: float
    choice: Choice | None
    survey: Survey | None
    is_told: bool
    sent_to: Ranked | None = None
    replica: str = ""
    """The one that it was sent to; empty: none yet."""
    is_answered: bool = False


class Loads(Protocol):
    """What hears where requests go and how they do, as `ReplicaLoads` does."""

    def routed(
        self, request: str, cost: Cost, survey: Survey, *, now: float, is_told: bool
    ) -> None:
        """Note that a request goes to a replica."""

    def first_token(self, request: str, now: float) -> None:
        """Note that a prompt is computed."""

    def done(self, request: str, now: float) -> None:
        """Note a request's end; twice is fine."""

    def withdraw(self, request: str, now: float) -> None:
        """Note that a request did not go where `routed` said; twice is fine."""


class Decisions:
    """What was decided for each request that is under way, and what came of it.

    An ingress may tell when a request is sent and when its first token is there; then `is_told`.
    Without that, Serve says where it was sent and when it ended. What nobody decided, because the
    tier did not answer or the prompt was not seen, has no `Choice`.
    """

    def __init__(self, loads: Loads, outcomes: Outcomes) -> None:
        """Keep `loads` and `outcomes` up to date."""
        self._loads = loads
        self._outcomes = outcomes
        self._under_way: OrderedDict[str, _Decision] = OrderedDict()

    def begin(
        self,
        request: str,
        choice: Choice | None,
        survey: Survey | None,
        *,
        now: float,
        is_told: bool,
    ) -> None:
        """Note what was decided.

        Serve may ask for one request in two tasks at the same time: the first decision counts.
        """
        if request in self._under_way:
            return
        made = _Decision(at=now, choice=choice, survey=survey, is_told=is_told)
        self._under_way[request] = made
        if choice is not None and survey is not None:
            # At once: a request that is chosen for before this one is sent must know of it.
            self._loads.routed(request, choice.cost, survey, now=now, is_told=is_told)
        while True:
            oldest, one = next(iter(self._under_way.items()))
            is_abandoned = not one.replica and now > one.at + _UNSENT_S
            if not is_abandoned and len(self._under_way) <= _DECISIONS_MAX:
                break
            self.over(oldest, now=now)

    def order(self, request: str) -> list[str] | None:
        """Return the replicas for a request, the best first; None: nothing was decided yet."""
        decision = self._under_way.get(request)
        if decision is None:
            return None
        return [one.cost.replica for one in decision.choice.ranked] if decision.choice else []

    def sent(self, request: str, replica: str, *, now: float) -> None:
        """Note that a replica has taken a request, which need not be the best one."""
        decision = self._under_way.get(request)
        if decision is None or decision.replica:
            return
        decision.replica = replica
        ranked = decision.choice.ranked if decision.choice else ()
        decision.sent_to = next((one for one in ranked if one.cost.replica == replica), None)
        if ranked and decision.sent_to is not ranked[0]:
            self._loads.withdraw(request, now)
            if decision.sent_to and decision.survey:
                cost, is_told = decision.sent_to.cost, decision.is_told
                self._loads.routed(request, cost, decision.survey, now=now, is_told=is_told)
        self._outcomes.sent(_reason(decision))

    def first_token(self, request: str, *, now: float) -> None:
        """Note that a request's first token is there."""
        decision = self._under_way.get(request)
        if decision is None or decision.is_answered:
            return
        decision.is_answered = True
        self._loads.first_token(request, now)
        sent_to = decision.sent_to
        predicted_s = None if sent_to is None else sent_to.cost.first_token_s
        self._outcomes.first_token(now - decision.at, predicted_s)

    def over(self, request: str, *, now: float) -> None:
        """Note that a request has ended, or was given up. Twice is fine."""
        decision = self._under_way.pop(request, None)
        if decision is not None:
            (self._loads.done if decision.replica else self._loads.withdraw)(request, now)


def _reason(decision: _Decision) -> Reason:
    choice, sent_to = decision.choice, decision.sent_to
    if choice is None or sent_to is None:
        return "fallback"
    if choice.reason == "prefix" and sent_to is not choice.ranked[0]:
        return "queue"  # the best one was full
    return choice.reason
