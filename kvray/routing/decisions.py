"""The requests of one router, from the choice of a replica to the first token; pure."""

from collections import OrderedDict
from dataclasses import dataclass

from kvray.routing.choice import Choice, Ranked, Reason
from kvray.routing.outcomes import Outcomes
from kvray.routing.standings import Standings
from kvray.routing.survey import Survey

_DECISIONS_MAX = 4096
"""Of a request that was given up while it waited Serve does not tell; the oldest go."""


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


class Decisions:
    """What was decided for each request that is under way, and what came of it.

    An ingress may tell when a request is sent and when its first token is there; then `is_told`.
    Without that, Serve says where it was sent and when it ended. What nobody decided, because the
    tier did not answer or the prompt was not seen, has no `Choice`.
    """

    def __init__(self, standings: Standings, outcomes: Outcomes) -> None:
        """Keep `standings` and `outcomes` up to date."""
        self._standings = standings
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
            self._standings.routed(request, choice.cost, survey, now=now, is_told=is_told)
        if len(self._under_way) > _DECISIONS_MAX:
            self.over(next(iter(self._under_way)), now=now)

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
        if decision.sent_to and decision.survey and decision.sent_to is not ranked[0]:
            self._standings.done(request, now)
            self._standings.routed(
                request,
                decision.sent_to.cost,
                decision.survey,
                now=now,
                is_told=decision.is_told,
            )
        self._outcomes.sent(_reason(decision))

    def first_token(self, request: str, *, now: float) -> None:
        """Note that a request's first token is there."""
        decision = self._under_way.get(request)
        if decision is None or decision.is_answered:
            return
        decision.is_answered = True
        self._standings.first_token(request, now)
        sent_to = decision.sent_to
        predicted_s = None if sent_to is None else sent_to.cost.first_token_s
        self._outcomes.first_token(now - decision.at, predicted_s)

    def over(self, request: str, *, now: float) -> None:
        """Note that a request has ended, or was given up. Twice is fine."""
        if self._under_way.pop(request, None) is not None:
            self._standings.done(request, now)


def _reason(decision: _Decision) -> Reason:
    choice, sent_to = decision.choice, decision.sent_to
    if choice is None or sent_to is None:
        return "fallback"
    if choice.reason == "prefix" and sent_to is not choice.ranked[0]:
        return "queue"  # the best one was full
    return choice.reason
