"""Which replica gets a request, and why."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.routing import Candidate, Cost, Load, Lru, Stretch, choose, predict
from tests.unit.routing.fleet_parts import RATES, candidate, cost

COSTS = st.lists(
    st.builds(
        cost,
        st.just("r"),
        work_s=st.floats(0.001, 10),
        queue_s=st.floats(0, 10),
        utilization=st.floats(0, 1.5),
    ),
    min_size=1,
    max_size=8,
)


def drawn(costs: list[Cost]) -> list[float]:
    return [number / 10 for number in range(len(costs))]


def test_the_replica_that_has_the_prefix_gets_the_request() -> None:
    costs = [cost("a", work_s=1.0), cost("b", work_s=0.2)]
    found = choose(costs, draws=[0, 1])
    assert (found.replica, found.reason) == ("b", "prefix")


def test_a_queue_that_costs_more_than_copying_sends_the_request_on() -> None:
    costs = [cost("a", work_s=0.5), cost("b", work_s=0.2, queue_s=1.0)]
    found = choose(costs, draws=[0, 1])
    assert (found.replica, found.reason) == ("a", "queue")


def test_near_saturation_a_longer_queue_is_worth_the_work_that_it_saves() -> None:
    costs = [
        cost("a", work_s=0.5, utilization=0.9),
        cost("b", work_s=0.2, queue_s=1.0, utilization=0.9),
    ]
    found = choose(costs, draws=[0, 1])
    assert (found.replica, found.reason) == ("b", "prefix")
    assert found.ranked[1].later_s > 0


def test_without_a_shared_prefix_the_shortest_queue_gets_the_request() -> None:
    queues = {"a": 3.0, "b": 1.0, "c": 2.0}
    costs = [cost(name, work_s=1.0, queue_s=queue_s) for name, queue_s in queues.items()]
    found = choose(costs, draws=[0, 1, 2])
    assert (found.replica, found.reason) == ("b", "fallback")


def test_a_tie_goes_to_the_replica_that_did_least_lately_and_then_by_lot() -> None:
    costs = [cost("a", work_s=1.0, utilization=0.4), cost("b", work_s=1.0, utilization=0.3)]
    assert choose(costs, draws=[0, 1]).replica == "b"
    costs = [cost("a", work_s=1.0), cost("b", work_s=1.0)]
    assert [choose(costs, draws=draws).replica for draws in ([0, 1], [1, 0])] == ["a", "b"]


def test_a_replica_with_more_than_its_share_loses_its_credit() -> None:
    busy, idle = cost("a", work_s=0.2, utilization=0.5), cost("b", work_s=1.0, utilization=0.05)
    found = choose([busy, idle], draws=[0, 1])
    assert found.replica == "b"
    crowded = next(one for one in found.ranked if one.cost is busy)
    assert crowded.score_s == pytest.approx(found.ranked[0].score_s)


@given(COSTS)
def test_every_candidate_is_explained_and_the_parts_add_up(costs: list[Cost]) -> None:
    found = choose(costs, draws=drawn(costs))
    assert sorted(map(id, (one.cost for one in found.ranked))) == sorted(map(id, costs))
    for one in found.ranked:
        assert one.later_s >= 0 <= one.crowd_s
        parts = one.cost.queue_s + one.cost.bring_s + one.cost.compute_s
        assert one.score_s == pytest.approx(parts + one.later_s + one.crowd_s)
    least_s = min(one.score_s for one in found.ranked)
    assert found.ranked[0].score_s <= least_s + 0.0011, "a tie of a millisecond"


@given(COSTS)
def test_the_same_numbers_make_the_same_choice(costs: list[Cost]) -> None:
    assert choose(costs, draws=drawn(costs)) == choose(costs, draws=drawn(costs))


@given(COSTS, st.floats(0.001, 10))
def test_no_shared_prefix_means_least_loaded(costs: list[Cost], work_s: float) -> None:
    equal = [
        cost("r", work_s=work_s, queue_s=one.queue_s, utilization=one.utilization) for one in costs
    ]
    found = choose(equal, draws=drawn(equal))
    assert found.reason == "fallback"
    assert found.cost.queue_s <= min(one.queue_s for one in equal) + 0.0011


@pytest.mark.parametrize("utilization", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("count", [3, 8])
def test_a_prefix_in_every_request_spreads_over_all_replicas(
    count: int, utilization: float
) -> None:
    """The first replica has it; the others may copy it, and a copy costs ten times the tail."""
    numbers = random.Random(0)
    loads, pools = [Load() for _ in range(count)], [Lru[object](50) for _ in range(count)]
    now, work = 0.0, [0.0] * count
    tail_s = 0.1
    for request in range(1000):
        now += numbers.expovariate(count * utilization / tail_s)
        for load in loads:  # each request runs for as long as it was predicted to
            while len(load) and load.queue_s(now) == 0:
                load.done(next(iter(load._waiting)), now)
        candidates: list[Candidate] = [
            candidate(
                str(at),
                queue_s=loads[at].queue_s(now),
                utilization=loads[at].utilization(now),
                pool_tokens=2800 * pools[at].leading(["prefix"]),
            )
            for at in range(count)
        ]
        stretches = [Stretch(num_tokens=2800, holders={"0": "host"})] if request else []
        costs = [predict(one, 2900, stretches) for one in candidates]
        at = int(choose(costs, draws=[numbers.random() for _ in costs]).replica)
        loads[at].routed(request, costs[at].work_s, now)
        pools[at].use(["prefix", request])
        work[at] += costs[at].work_s
    assert RATES.prefill_tokens_per_s == 1000
    assert max(work) <= 1.4 * sum(work) / count
