"""What becomes of a router's choices: counts, and the load of replicas."""

import pytest

from kvray.routing import Choice, Decisions, Outcomes, Place, Standings, Survey
from kvray.routing.cost import Stretch

NAMES = tuple(f"r{number}" for number in range(20))
SURVEY = Survey(
    tokens_per_block=32,
    token_bytes=16_384,
    words=tuple(f"{block}".encode() for block in range(32)),
    stretches=(Stretch(num_tokens=512, holders={"node-0": "host"}),),
)


class Router:
    """As kvray's router in Serve uses its decisions."""

    def __init__(self) -> None:
        self.standings = Standings(pool_blocks=1000, prefill_tokens_per_s=1000.0)
        self.standings.retain(NAMES)
        self.outcomes = Outcomes()
        self.decisions = Decisions(self.standings, self.outcomes)

    def choice(self, now: float) -> Choice:
        places = [
            Place(replica=name, node=f"node-{number}", prefill_tokens_per_s=1000.0)
            for number, name in enumerate(NAMES)
        ]
        return self.standings.choose(places, 1024, SURVEY, now=now)

    def begin(self, request: str, *, now: float = 0.0, is_told: bool = True) -> Choice:
        choice = self.choice(now)
        self.decisions.begin(request, choice, SURVEY, now=now, is_told=is_told)
        return choice

    def total(self, name: str, *labels: str) -> float:
        return self.outcomes.totals()[name, labels]


@pytest.fixture
def router() -> Router:
    return Router()


def test_a_request_is_followed_from_its_choice_to_its_first_token(router: Router) -> None:
    choice = router.begin("one", now=1.0)
    assert router.decisions.order("one") == [one.cost.replica for one in choice.ranked]
    assert choice.replica == "r0", "its node has half of the prompt"
    router.decisions.sent("one", "r0", now=1.1)
    router.decisions.first_token("one", now=1.75)
    router.decisions.over("one", now=9.0)
    assert router.total("routed_requests_total", "prefix") == 1
    assert router.total("first_token_count_total") == 1
    assert router.total("first_token_seconds_sum_total") == pytest.approx(0.75)
    predicted_s = choice.ranked[0].cost.first_token_s
    assert router.total("predicted_first_token_seconds_sum_total") == pytest.approx(predicted_s)
    error_s = 0.75 - predicted_s
    assert router.total("first_token_error_seconds_sum_total") == pytest.approx(error_s)
    assert router.total("first_token_error_seconds_bucket_total", "0.125") == 0
    assert router.total("first_token_error_seconds_bucket_total", "0.25") == 1
    assert router.total("first_token_error_seconds_bucket_total", "+Inf") == 1


def test_work_waits_until_its_first_token_if_somebody_tells(router: Router) -> None:
    router.begin("told", is_told=True)
    router.decisions.sent("told", "r0", now=0.0)
    waiting = router.choice(60.0)
    (costs,) = [one.cost for one in waiting.ranked if one.cost.replica == "r0"]
    assert costs.queue_s > 0.0, "what it was to take has passed, and it still runs"
    router.decisions.first_token("told", now=61.0)
    assert len(router.standings._loads["r0"]) == 0


def test_work_ends_when_it_is_due_if_nobody_tells(router: Router) -> None:
    router.begin("untold", is_told=False)
    router.decisions.sent("untold", "r0", now=0.0)
    router.choice(60.0)
    assert len(router.standings._loads["r0"]) == 0
    router.decisions.over("untold", now=61.0)


def test_the_replica_that_took_it_has_the_work_and_the_blocks(router: Router) -> None:
    router.begin("one")
    router.decisions.sent("one", "r3", now=0.0)
    loads = {name: len(load) for name, load in router.standings._loads.items()}
    assert (loads["r0"], loads["r3"]) == (0, 1)
    assert router.total("routed_requests_total", "queue") == 1, "the best one was full"


def test_without_a_choice_it_is_a_fallback_without_candidates(router: Router) -> None:
    router.decisions.begin("one", None, None, now=0.0, is_told=True)
    assert router.decisions.order("one") == []
    assert router.decisions.order("another") is None
    router.decisions.sent("one", "new", now=0.0)
    router.decisions.over("one", now=1.0)
    assert router.total("routed_requests_total", "fallback") == 1
    assert router.total("first_token_count_total") == 0


def test_a_choice_that_was_given_back_counts_for_nothing(router: Router) -> None:
    router.begin("one")
    router.decisions.over("one", now=0.1)
    router.decisions.sent("one", "r0", now=0.2)
    router.decisions.first_token("one", now=0.3)
    assert router.total("routed_requests_total", "prefix") == 0
    assert len(router.standings._loads["r0"]) == 0


def test_of_two_decisions_for_one_request_the_first_counts(router: Router) -> None:
    router.begin("one")
    order = router.decisions.order("one")
    router.begin("one", now=1.0)
    assert router.decisions.order("one") == order
    assert sum(map(len, router.standings._loads.values())) == 1
    router.decisions.over("one", now=2.0)
    assert all(load.queue_s(2.0) == 0 for load in router.standings._loads.values())


def test_of_requests_that_never_end_the_oldest_are_forgotten(router: Router) -> None:
    for number in range(5000):
        router.decisions.begin(str(number), None, None, now=0.0, is_told=False)
    assert router.decisions.order("0") is None
    assert router.decisions.order("4999") == []
