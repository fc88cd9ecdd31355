"""The requests of one router, from the choice of a replica to the first token; pure."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvray.routing.choice import Choice, Ranked, Reason
from kvray.routing.outcomes import Outcomes
from kvray.routing.standings import Standings
from kvray.routing.survey import Survey
from kvray.trace.routing_note import CANDIDATES_MAX, CandidateNote, Outcome, RoutingNote

_DECISIONS_MAX = 4096
"""Of a request that was given up while it waited Serve does not tell; the oldest go."""


@dataclass(slots=True, kw_only=True)
class _Decision:
    at: float
    wall_at: float
    num_tokens: int
    choice: Choice | None
    survey: Survey | None
    is_told: bool
    sent_to: Ranked | None = None
    replica: str = ""
    """The one that it was sent to; empty: none yet."""
    outcome: Outcome = "under_way"
    first_token_s: float = 0.0


class Decisions:
    """What was decided for each request that is under way, and what came of it.

    An ingress may tell when a request is sent and when its first token is there; then `is_told`.
    Without that, Serve says where it was sent and when it ended. What nobody decided, because the
    tier did not answer or the prompt was not seen, has no `Choice`.
    """

    def __init__(
        self,
        standings: Standings,
        outcomes: Outcomes,
        report: Callable[[RoutingNote], None],
    ) -> None:
        """Keep `standings` and `outcomes` up to date; `report` hears of each change."""
        self._standings = standings
        self._outcomes = outcomes
        self._report = report
        self._under_way: OrderedDict[str, _Decision] = OrderedDict()

    def begin(
        self,
        request: str,
        choice: Choice | None,
        survey: Survey | None,
        *,
        num_tokens: int,
        now: float,
        wall: float,
        is_told: bool,
    ) -> None:
        """Note what was decided at `now`, which is `wall` in seconds since the epoch.

        Serve may ask for one request in two tasks at the same time: the first decision counts.
        """
        if request in self._under_way:
            return
        made = _Decision(
            at=now,
            wall_at=wall,
            num_tokens=num_tokens,
            choice=choice,
            survey=survey,
            is_told=is_told,
        )
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
        self._report(_note(request, decision))

    def first_token(self, request: str, *, now: float) -> None:
        """Note that a request's first token is there."""
        decision = self._under_way.get(request)
        if decision is None or decision.outcome != "under_way":
            return
        decision.outcome, decision.first_token_s = "answered", now - decision.at
        self._standings.first_token(request, now)
        sent_to = decision.sent_to
        predicted_s = None if sent_to is None else sent_to.cost.first_token_s
        self._outcomes.first_token(decision.first_token_s, predicted_s)
        self._report(_note(request, decision))

    def over(self, request: str, *, now: float) -> None:
        """Note that a request has ended, or was given up. Twice is fine."""
        decision = self._under_way.pop(request, None)
        if decision is None:
            return
        self._standings.done(request, now)
        if decision.is_told and decision.replica and decision.outcome == "under_way":
            decision.outcome = "not_answered"
            self._report(_note(request, decision))


def _reason(decision: _Decision) -> Reason:
    choice, sent_to = decision.choice, decision.sent_to
    if choice is None or sent_to is None:
        return "fallback"
    if choice.reason == "prefix" and sent_to is not choice.ranked[0]:
        return "queue"  # the best one was full
    return choice.reason


def _note(request: str, decision: _Decision) -> RoutingNote:
    choice, sent_to, survey = decision.choice, decision.sent_to, decision.survey
    ranked = [] if choice is None or sent_to is None else [sent_to]
    ranked += [one for one in choice.ranked if one is not sent_to] if ranked and choice else []
    return RoutingNote(
        request=request,
        at=decision.wall_at,
        replica=decision.replica,
        num_tokens=decision.num_tokens,
        prefix_digest=b"" if survey is None else survey.prefix_digest,
        reason=_reason(decision),
        num_candidates=len(ranked),
        candidates=tuple(map(_candidate, ranked[:CANDIDATES_MAX])),
        outcome=decision.outcome,
        first_token_s=decision.first_token_s,
    )


def _candidate(ranked: Ranked) -> CandidateNote:
    cost = ranked.cost
    return CandidateNote(
        replica=cost.replica,
        pool_tokens=cost.pool_tokens,
        host_tokens=cost.tokens_from("host"),
        disk_tokens=cost.tokens_from("disk"),
        remote_tokens=cost.tokens_from("remote"),
        computed_tokens=cost.computed_tokens,
        queue_s=cost.queue_s,
        bring_s=cost.bring_s,
        compute_s=cost.compute_s,
        later_s=ranked.later_s,
        crowd_s=ranked.crowd_s,
    )
