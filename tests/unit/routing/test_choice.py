"""Which replica gets a request, and why: the predicted time to a first token, part by part."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.routing import Bring, Candidate, Cost, Link, Rates, Stretch, choose, predict
from kvray.routing.cost import PrefillSpeed

RATES = Rates(
    prefill_tokens_per_s=1000.0,
    token_bytes=100.0,
    host=Link(bytes_per_s=1e6),
    remote=Link(latency_s=0.01, bytes_per_s=4e5),
    disk=Link(bytes_per_s=2e5),
)
"""A token is computed in 1 ms; it comes from memory in 0.1 ms, from a disk in 0.6, from another
node in 0.35 and 10 ms more."""


def candidate(replica: str = "a", **fields: Any) -> Candidate:
    """Return an idle replica without blocks, on a node of the same name."""
    known = {"node": replica, "rates": RATES, "queue_s": 0.0, "utilization": 0.0, "pool_tokens": 0}
    return Candidate(replica=replica, **known | fields)


def cost(replica: str, *, work_s: float, queue_s: float = 0.0, utilization: float = 0.0) -> Cost:
    """Return the cost of a prompt that is computed in `work_s`."""
    return Cost(
        replica=replica,
        pool_tokens=0,
        brings=(),
        computed_tokens=round(1000 * work_s),
        queue_s=queue_s,
        compute_s=work_s,
        utilization=utilization,
    )


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


CHOICES = {
    "the one that has the prefix": ([{"work_s": 1.0}, {"work_s": 0.2}], "b", "prefix"),
    "not one whose queue costs more than copying": (
        [{"work_s": 0.5}, {"work_s": 0.2, "queue_s": 1.0}],
        "a",
        "queue",
    ),
    "but near saturation, for the work that it saves": (
        [{"work_s": 0.5, "utilization": 0.9}, {"work_s": 0.2, "queue_s": 1.0, "utilization": 0.9}],
        "b",
        "prefix",
    ),
}


@pytest.mark.parametrize(("costs", "replica", "reason"), CHOICES.values(), ids=CHOICES)
def test_the_request_goes_to(costs, replica, reason):
    known = [cost(name, **fields) for name, fields in zip("abc", costs, strict=False)]
    found = choose(known, draws=list(range(len(known))))
    assert (found.replica, found.reason) == (replica, reason)
    assert (found.ranked[1].later_s > 0) == ("utilization" in costs[0])


def test_a_tie_goes_to_the_replica_that_did_least_lately_and_then_by_lot():
    costs = [cost("a", work_s=1.0, utilization=0.4), cost("b", work_s=1.0, utilization=0.3)]
    assert choose(costs, draws=[0, 1]).replica == "b"
    costs = [cost("a", work_s=1.0), cost("b", work_s=1.0)]
    assert [choose(costs, draws=draws).replica for draws in ([0, 1], [1, 0])] == ["a", "b"]


def test_a_replica_with_more_than_its_share_loses_its_credit():
    busy, idle = cost("a", work_s=0.2, utilization=0.5), cost("b", work_s=1.0, utilization=0.05)
    found = choose([busy, idle], draws=[0, 1])
    assert found.replica == "b"
    crowded = next(one for one in found.ranked if one.cost is busy)
    assert crowded.score_s == pytest.approx(found.ranked[0].score_s)


@given(COSTS)
def test_every_candidate_is_explained_and_the_parts_add_up(costs):
    found = choose(costs, draws=list(range(len(costs))))
    assert sorted(map(id, (one.cost for one in found.ranked))) == sorted(map(id, costs))
    for one in found.ranked:
        assert one.later_s >= 0 <= one.crowd_s
        parts = one.cost.queue_s + one.cost.bring_s + one.cost.compute_s
        assert one.score_s == pytest.approx(parts + one.later_s + one.crowd_s)
    least_s = min(one.score_s for one in found.ranked)
    assert found.ranked[0].score_s <= least_s + 0.0011, "a tie of a millisecond"


@given(COSTS, st.floats(0.001, 10))
def test_no_shared_prefix_means_least_loaded(costs, work_s):
    equal = [
        cost("r", work_s=work_s, queue_s=one.queue_s, utilization=one.utilization) for one in costs
    ]
    found = choose(equal, draws=list(range(len(equal))))
    assert found.reason == "fallback"
    assert found.cost.queue_s <= min(one.queue_s for one in equal) + 0.0011


NODES = ("a", "b", "c")
HOLDERS = st.dictionaries(
    st.sampled_from(NODES), st.sampled_from(["host", "disk"]), min_size=1, max_size=3
)
STRETCHES = st.lists(
    st.builds(Stretch, num_tokens=st.integers(1, 500), holders=HOLDERS), max_size=6
)


SLOW = {"rates": replace(RATES, remote=Link(bytes_per_s=1e4))}
PARTED = {
    "computed if nobody has them": ({"queue_s": 2.0}, 500, [], 0, [], 500),
    "in the pool": ({"pool_tokens": 400}, 500, [], 400, [], 100),
    "in the pool, but the last one": ({"pool_tokens": 500}, 500, [], 499, [], 1),
    "brought, but the last one": ({}, 500, [(500, "a")], 0, ["host"], 1),
    "computed if that is faster": (SLOW, 1400, [(1200, "a"), (100, "b")], 0, ["host"], 200),
    "brought if what follows is worth it": (
        {},
        500,
        [(10, "b"), (400, "a")],
        0,
        ["remote", "host"],
        90,
    ),
    "none": ({}, 0, [], 0, [], 0),
}


@pytest.mark.parametrize(
    ("fields", "num_tokens", "held", "in_pool", "sources", "computed"), PARTED.values(), ids=PARTED
)
def test_the_tokens_of_a_prompt_are(fields, num_tokens, held, in_pool, sources, computed):
    stretches = [Stretch(num_tokens=count, holders={node: "host"}) for count, node in held]
    found = predict(candidate(**fields), num_tokens, stretches)
    assert (found.pool_tokens, found.computed_tokens) == (in_pool, computed)
    assert [bring.source for bring in found.brings] == sources
    brought = sum(found.tokens_from(source) for source in sources)
    assert brought == num_tokens - in_pool - computed
    assert found.queue_s == fields.get("queue_s", 0.0)
    assert found.compute_s == pytest.approx(computed / 1000)
    assert found.work_s == pytest.approx(found.bring_s + found.compute_s)
    assert found.first_token_s == pytest.approx(found.queue_s + found.work_s)


@pytest.mark.parametrize(
    ("holders", "source", "seconds"),
    [
        ({"a": "host", "b": "host"}, "host", 0.01),
        ({"b": "host"}, "remote", 0.045),
        ({"a": "disk"}, "disk", 0.06),
        ({"a": "disk", "b": "host"}, "remote", 0.045),
        ({"b": "disk"}, "remote", 0.095),
    ],
)
def test_each_stretch_comes_from_its_fastest_source(holders, source, seconds):
    found = predict(candidate(), 200, [Stretch(num_tokens=100, holders=holders)])  # type: ignore[arg-type]
    assert found.brings == (
        Bring(source=source, num_tokens=100, seconds=pytest.approx(seconds)),  # type: ignore[arg-type]
    )
    assert found.work_s == pytest.approx(seconds + 0.1)


def test_a_link_that_was_measured_by_itself_counts_for_its_node():
    rates = replace(RATES, peers={"b": Link(bytes_per_s=1e9)})
    stretches = [Stretch(num_tokens=100, holders={"b": "host", "c": "host"})]
    found = predict(candidate(rates=rates), 200, stretches)
    assert found.bring_s == pytest.approx(1e-5 + 0.01)


@given(st.integers(1, 2000), st.integers(0, 2000), STRETCHES)
def test_every_token_is_somewhere_and_bringing_never_costs_more_than_computing(
    num_tokens, pool_tokens, stretches
):
    found = predict(candidate(pool_tokens=pool_tokens, queue_s=1.0), num_tokens, stretches)
    brought = sum(bring.num_tokens for bring in found.brings)
    assert found.pool_tokens + brought + found.computed_tokens == num_tokens
    assert found.computed_tokens >= 1
    assert found.first_token_s == pytest.approx(1.0 + found.bring_s + found.compute_s)
    assert found.bring_s <= brought / 1000 + 1e-9
    alone = predict(candidate(pool_tokens=pool_tokens), num_tokens, [])
    assert found.work_s <= alone.work_s + 1e-9


def measured(notes: Iterable[tuple[int, float, int]]) -> PrefillSpeed:
    """Return a speed by answers: tokens computed, the seconds of it, answers under way."""
    speed = PrefillSpeed()
    for note in notes:
        speed.note(*note)
    return speed


def test_newer_answers_count_more():
    assert measured([]).tokens_per_s == 0.0
    first, later = (1000, 0.5, 0), [(1000, 0.1, 0)] * 150
    assert measured([first]).tokens_per_s == pytest.approx(2000.0)
    assert measured([first, *later]).tokens_per_s == pytest.approx(10_000.0, rel=0.01)


@pytest.mark.parametrize(("num_computed", "seconds"), [(10, 0.1), (0, 0.1), (1000, -0.1)])
def test_answers_that_tell_little_do_not_count(num_computed, seconds):
    speed = measured([(num_computed, seconds, 0)])
    assert (speed.tokens_per_s, speed.decode_slowdown) == (0.0, 0.0)


def test_prompts_of_one_pass_share_its_time():
    speed = measured([(1000, seconds, 0) for seconds in (0.5, 0.0, 0.0, 0.0, 0.0)] * 10)
    assert speed.tokens_per_s == pytest.approx(10_000.0, rel=0.3)


def test_answers_under_way_slow_a_prefill_by_a_part_of_itself_each():
    speed = measured((1000, 0.1 * (1 + 0.1 * (at % 20)), at % 20) for at in range(100))
    assert speed.decode_slowdown == pytest.approx(0.1, rel=0.1)
    assert speed.tokens_per_s == pytest.approx(10_000.0, rel=0.1)
    for number in range(200):
        speed.note(1000, 0.05, number % 20)
    assert speed.decode_slowdown == pytest.approx(0.0, abs=1e-2)


def test_a_slowdown_is_believed_as_far_as_the_answers_varied():
    speed = measured((1000, 0.1 * (1 + 0.1 * (at % 3)), at % 3) for at in range(100))
    assert 0.02 < speed.decode_slowdown < 0.06
    assert (1 + speed.decode_slowdown) / speed.tokens_per_s == pytest.approx(0.00011, rel=0.01)


def test_what_answers_cost_does_not_show_while_they_are_always_as_many():
    speed = measured([(1000, 0.2, 3)] * 3)
    assert speed.tokens_per_s == pytest.approx(5000.0)
    assert speed.decode_slowdown == pytest.approx(0.0, abs=1e-9)


_notes = st.tuples(st.integers(0, 10_000), st.floats(0, 100), st.integers(0, 64))


@given(st.lists(_notes, max_size=60))
def test_a_speed_is_never_negative_and_a_slowdown_bounded(notes):
    speed = PrefillSpeed()
    for note in notes:
        speed.note(*note)
        assert speed.tokens_per_s >= 0
        assert 0 <= speed.decode_slowdown <= 2.0 + 1e-6
