"""Which replica a prompt goes to, by what the tier holds and what became of earlier choices."""

from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.routing import (
    Choice,
    Decisions,
    Load,
    Lru,
    Outcomes,
    Place,
    PoolMatch,
    ReplicaLoads,
    Stretch,
    Survey,
)
from kvray.routing.loads import RECENT_S, Coming

BLOCK = 32
NAMES = ("a", "b", "c", "d")


def survey(prompt: str, num_blocks: int, *, held: int = 0) -> Survey:
    """Return the survey of a prompt of which the node of `a` holds the first `held` blocks."""
    held_there = (Stretch(num_tokens=held * BLOCK, holders={"node-a": "host"}),) if held else ()
    return Survey(
        tokens_per_block=BLOCK,
        token_bytes=16_384,
        words=tuple(f"{prompt} {block}".encode() for block in range(num_blocks)),
        stretches=held_there,
    )


def loads() -> ReplicaLoads:
    made = ReplicaLoads(pool_blocks=1000, prefill_tokens_per_s=10_000.0)
    made.retain(NAMES)
    return made


def places(**rates: float) -> list[Place]:
    return [
        Place(replica=name, node=f"node-{name}", prefill_tokens_per_s=rates.get(name, 0.0))
        for name in NAMES
    ]


def route(
    made: ReplicaLoads,
    found: Survey,
    number: int,
    now: float,
    at: list[Place] | None = None,
    *,
    is_told: bool = False,
) -> Choice:
    choice = made.choose(at or places(), len(found.words) * BLOCK, found, now=now)
    made.routed(str(number), choice.cost, found, now=now, is_told=is_told)
    return choice


def parts(
    made: ReplicaLoads, what: str, found: Survey, now: float = 0.0, at: list[Place] | None = None
) -> dict[str, float]:
    """Return a part of what a prompt would cost on each replica."""
    choice = made.choose(at or places(), len(found.words) * BLOCK, found, now=now)
    return {one.cost.replica: getattr(one.cost, what) for one in choice.ranked}


def test_answers_under_way_make_a_prompt_longer_there():
    made, found = loads(), survey("p", 100)
    speed = {"prefill_tokens_per_s": 10_000.0, "decode_slowdown": 0.5}
    slow = [replace(one, **speed) for one in places()]
    first = route(made, found, 1, 0.0, slow, is_told=True)
    made.first_token("1", 0.4)
    computed = parts(made, "compute_s", survey("q", 100), 0.5, slow)
    assert computed.pop(first.replica) == pytest.approx(0.48)
    assert list(computed.values()) == pytest.approx([0.32] * 3)
    made.done("1", 5.0)
    computed = parts(made, "compute_s", survey("q", 100), 0.5, slow)
    assert list(computed.values()) == pytest.approx([0.32] * 4)


def test_speeds_that_differ_by_chance_leave_no_replica_idle():
    made = loads()
    alike = places(a=10_000.0, b=9_000.0, c=8_500.0, d=4_000.0)
    counts: Counter[str] = Counter()
    for number in range(120):
        counts[route(made, survey(f"p{number}", 100), number, 0.2 * number, alike).replica] += 1
    assert min(counts[name] for name in "abc") > 0.9 * max(counts.values())
    assert counts["d"] < 0.7 * max(counts.values()), "which is a slower machine"


def test_a_replica_that_stays_keeps_what_lately_came_and_one_that_went_takes_its_requests_along():
    made, found = loads(), survey("p", 100)
    replica = route(made, found, 1, 0.0).replica
    made.done("1", 0.1)
    before = parts(made, "utilization", found, 0.2)
    made.retain(NAMES)
    assert parts(made, "utilization", found, 0.2) == before
    assert before[replica] > 0
    replica = route(made, found, 2, 0.2).replica
    made.retain(set(NAMES) - {replica})
    made.done("2", 0.3)
    left = [one for one in places() if one.replica != replica]
    assert made.choose(left, 3200, found, now=0.4).replica != replica


def told(num_tokens: int, *, is_sure: bool = True) -> list[Place]:
    """Return places of which `c` has so many tokens in its pool, by its engine's events."""
    pools = {"c": PoolMatch(num_tokens=num_tokens, is_sure=is_sure)}
    return [replace(one, pool=pools.get(one.replica)) for one in places()]


def test_a_prompt_counts_while_it_is_under_way_and_then_as_far_as_its_engine_tells_of_it():
    made, found = loads(), survey("p", 100)
    choice = route(made, found, 1, 0.0, told(50 * BLOCK))
    assert (choice.replica, choice.cost.pool_tokens) == ("c", 50 * BLOCK)

    def in_pool(at: list[Place]) -> float:
        return parts(made, "pool_tokens", found, at=at)["c"]

    assert in_pool(told(0)) == 100 * BLOCK - 1
    made.done("1", 1.0)
    assert [in_pool(told(blocks * BLOCK)) for blocks in (0, 10)] == [0, 10 * BLOCK]
    assert in_pool(told(10 * BLOCK, is_sure=False)) == 100 * BLOCK - 1, "it may be there untold"


def test_blocks_are_here_while_a_prompt_with_them_is_under_way():
    coming: Coming[str] = Coming()
    coming.add("abc")
    coming.add("abd")
    assert (coming.leading("abde"), coming.leading("abce"), coming.leading("x")) == (3, 3, 0)
    coming.remove("abd")
    assert coming.leading("abde") == 2
    coming.remove("abc")
    assert coming.leading("abde") == 0


@given(st.integers(1, 8), st.lists(st.lists(st.integers(0, 12), unique=True, max_size=10)))
def test_a_pool_is_bounded_and_leaves_of_the_least_recently_used_prompt_go_first(size, prompts):
    pool, model = Lru[int](size), OrderedDict[int, None]()
    for prompt in prompts:
        gone = pool.use(prompt)
        for block in reversed(prompt):
            model.pop(block, None)
            model[block] = None
        assert gone == [model.popitem(last=False)[0] for _ in range(max(0, len(model) - size))]
        there = [block in model for block in prompt]
        assert pool.leading(prompt) == [*there, False].index(False)


FIRST, SECOND = ("r1", 2.0, 10.0), ("r2", 3.0, 10.5)
"""(request, its work, when it came); two figures tell of its first token."""
QUEUES: dict[str, tuple[list[tuple[Any, ...]], dict[float, float]]] = {
    "an idle replica has none": ([], {5.0: 0.0}),
    # r1 is due at 12, and r2 has not begun.
    "it shrinks while the oldest runs": ([FIRST, SECOND], {11.0: 4.0, 12.0: 3.5}),
    "it grows the later a request is": (
        [FIRST],
        {12.0: 0.5, 14.0: 1.0, 16.0: 1.5, 18.0: 2.0, 109.0: 2.0},
    ),
    "a first token ends a wait": ([FIRST, SECOND, ("r1", 13.0)], {14.0: 2.0}),
    "the last one ends it": ([FIRST, SECOND, ("r1", 13.0), ("r2", 15.0)], {15.0: 0.0}),
    "the oldest one runs on": ([("r1", 5.0, 0.0), ("r2", 1.0, 0.0), ("r2", 3.0)], {3.0: 2.0}),
    "an unknown request changes nothing": ([("r1", 2.0, 0.0), ("r0", 1.0)], {1.0: 1.0}),
}


@pytest.mark.parametrize(("steps", "waits"), QUEUES.values(), ids=QUEUES)
def test_a_queue_is_as_long_as_what_waits(steps, waits):
    load = Load()
    for request, *figures in steps:
        (load.routed if len(figures) == 2 else load.done)(request, *figures)
    assert {now: load.queue_s(now) for now in waits} == pytest.approx(waits)


def test_steady_work_is_its_share_of_time():
    load = Load()
    for second in range(600):
        load.routed(second, 0.3, now=float(second))
        load.done(second, now=second + 0.3)
    assert load.utilization(600.0) == pytest.approx(0.3, abs=0.01)
    assert load.utilization(600.0 + 10 * RECENT_S) < 0.001


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans())))
def test_a_queue_is_never_negative_nor_more_than_all_that_waits(steps):
    load, now, waiting = Load(), 0.0, {}
    for number, (wait_s, work_s, has_token) in enumerate(steps):
        now += wait_s
        if has_token and waiting:
            done = next(iter(waiting))
            load.done(done, now)
            del waiting[done]
        load.routed(number, work_s, now)
        waiting[number] = work_s
        assert 0 <= load.queue_s(now) <= sum(waiting.values()) + 1e-6
        assert load.utilization(now) >= 0


SURVEY = survey("p", 32, held=16)


class Router:
    """As kvray's router in Serve uses its decisions: half of each prompt is on the node of `a`."""

    def __init__(self) -> None:
        self.loads = loads()
        self.outcomes = Outcomes()
        self.decisions = Decisions(self.loads, self.outcomes)

    def choice(self, now: float) -> Choice:
        slow = places(**dict.fromkeys(NAMES, 1000.0))
        return self.loads.choose(slow, 1024, SURVEY, now=now)

    def begin(self, request: str, *, now: float = 0.0, is_told: bool = True) -> Choice:
        choice = self.choice(now)
        self.decisions.begin(request, choice, SURVEY, now=now, is_told=is_told)
        return choice

    def total(self, name: str, *labels: str) -> float:
        return self.outcomes.totals()[name, labels]


@pytest.fixture
def router() -> Router:
    return Router()


def test_a_request_is_followed_from_its_choice_to_its_first_token(router):
    choice = router.begin("one", now=1.0)
    assert router.decisions.order("one") == [one.cost.replica for one in choice.ranked]
    assert choice.replica == "a", "its node has half of the prompt"
    router.decisions.sent("one", "a", now=1.1)
    router.decisions.first_token("one", now=1.75)
    router.decisions.over("one", now=9.0)
    assert router.total("routed_requests_total", "prefix") == 1
    assert router.total("first_token_count_total") == 1
    assert router.outcomes.take_first_tokens() == [pytest.approx(0.75)]
    assert router.outcomes.take_first_tokens() == []
    assert router.total("first_token_seconds_sum_total") == pytest.approx(0.75)
    predicted_s = choice.ranked[0].cost.first_token_s
    assert router.total("predicted_first_token_seconds_sum_total") == pytest.approx(predicted_s)
    error_s = 0.75 - predicted_s
    assert router.total("first_token_error_seconds_sum_total") == pytest.approx(error_s)
    assert router.total("first_token_error_seconds_bucket_total", "0.125") == 0
    assert router.total("first_token_error_seconds_bucket_total", "0.25") == 1
    assert router.total("first_token_error_seconds_bucket_total", "+Inf") == 1


@pytest.mark.parametrize("is_told", [True, False])
def test_work_waits_until_its_first_token_or_if_nobody_tells_until_it_is_due(router, is_told):
    router.begin("one", is_told=is_told)
    router.decisions.sent("one", "a", now=0.0)
    queues = [parts(router.loads, "queue_s", SURVEY, now)["a"] for now in (0.1, 60.0)]
    assert [queue_s > 0 for queue_s in queues] == [True, is_told], "it may run for longer than due"
    if is_told:
        router.decisions.first_token("one", now=61.0)
    assert len(router.loads._loads["a"]) == 0
    router.decisions.over("one", now=61.0)


@pytest.mark.parametrize("taker", ["d", "of nobody", None])
def test_a_request_is_the_work_of_the_replica_that_took_it_and_of_no_other(router, taker):
    router.begin("before")
    router.decisions.sent("before", "a", now=0.0)
    before = router.loads._loads["a"].utilization(9.0)
    assert router.begin("one", now=1.0).replica == "a"
    if taker:
        router.decisions.sent("one", taker, now=9.0)
    else:
        router.decisions.over("one", now=9.0)
    loads = router.loads._loads
    assert loads["a"].utilization(9.0) == pytest.approx(before)
    busy = {name for name, load in loads.items() if load.utilization(9.0)}
    assert busy == ({"a", "d"} if taker == "d" else {"a"})
    assert (len(loads["a"]), len(loads["d"])) == (1, taker == "d")
    if taker == "d":
        assert router.total("routed_requests_total", "queue") == 1, "the best one was full"


def test_without_a_choice_it_is_a_fallback_without_candidates(router):
    router.decisions.begin("one", None, None, now=0.0, is_told=True)
    assert router.decisions.order("one") == []
    assert router.decisions.order("another") is None
    router.decisions.sent("one", "new", now=0.0)
    router.decisions.over("one", now=1.0)
    assert router.total("routed_requests_total", "fallback") == 1
    assert router.total("first_token_count_total") == 0


def test_a_choice_that_was_given_back_counts_for_nothing(router):
    router.begin("one")
    router.decisions.over("one", now=0.1)
    router.decisions.sent("one", "a", now=0.2)
    router.decisions.first_token("one", now=0.3)
    assert router.total("routed_requests_total", "prefix") == 0
    assert len(router.loads._loads["a"]) == 0


def test_of_two_decisions_for_one_request_the_first_counts(router):
    router.begin("one")
    order = router.decisions.order("one")
    router.begin("one", now=1.0)
    assert router.decisions.order("one") == order
    assert sum(map(len, router.loads._loads.values())) == 1
    router.decisions.over("one", now=2.0)
    assert all(load.queue_s(2.0) == 0 for load in router.loads._loads.values())


def test_of_requests_that_never_end_the_oldest_are_forgotten(router):
    for number in range(5000):
        router.decisions.begin(str(number), None, None, now=0.0, is_told=False)
    assert router.decisions.order("0") is None
    assert router.decisions.order("4999") == []


def test_requests_that_went_nowhere_do_not_slow_a_replica_down_for_ever(router):
    for number in range(100):
        router.begin(str(number), is_told=False)
    router.choice(now=60.0)
    router.decisions.begin("much later", None, None, now=3600.0, is_told=False)
    assert not router.loads._answering
    assert router.decisions.order("much later") == []
