"""Which replica a prompt goes to, by what the tier holds and what was routed where."""

from collections import Counter
from dataclasses import replace

import pytest

from kvray.routing import Place, PoolMatch, Standings, Stretch, Survey

BLOCK = 32
NAMES = ("a", "b", "c", "d")


def survey(
    prompt: str, num_blocks: int, *, held: int = 0, on: str = "node-a", shared: int = 0
) -> Survey:
    """Return the survey of a prompt of which a node holds the first `held` blocks.

    The first `shared` are the same in all prompts.
    """
    held_there = (Stretch(num_tokens=held * BLOCK, holders={on: "host"}),) if held else ()
    return Survey(
        tokens_per_block=BLOCK,
        token_bytes=16_384,
        words=tuple(
            f"{prompt if block >= shared else ''} {block}".encode() for block in range(num_blocks)
        ),
        stretches=held_there,
    )


def standings(**options: float) -> Standings:
    made = Standings(pool_blocks=1000, prefill_tokens_per_s=options.get("rate", 10_000.0))
    made.retain(NAMES)
    return made


def places(**rates: float) -> list[Place]:
    return [
        Place(replica=name, node=f"node-{name}", prefill_tokens_per_s=rates.get(name, 0.0))
        for name in NAMES
    ]


def route(made: Standings, found: Survey, number: int, now: float) -> str:
    choice = made.choose(places(), len(found.words) * BLOCK, found, now=now)
    made.routed(str(number), choice.cost, found, now=now)
    return choice.replica


def test_an_idle_fleet_sends_a_prompt_where_its_blocks_are() -> None:
    assert route(standings(), survey("p", 100, held=99, on="node-c"), 1, 0.0) == "c"


def test_a_prompt_goes_back_to_the_pool_that_has_it_most_likely() -> None:
    made = standings()
    first = route(made, survey("p", 100), 1, 0.0)
    made.done("1", 1.0)
    assert {route(made, survey("p", 100), 2, 100.0), first} == {first}


def test_when_the_queue_costs_more_than_copying_the_next_one_gets_prompt_and_blocks() -> None:
    made, found = standings(), survey("p", 300, held=299, on="node-a")
    for number in range(3):
        route(made, survey(f"other {number}", 3000, held=2999, on="node-a"), number, 0.0)
    assert route(made, found, 10, 0.0) != "a"


def test_one_prefix_in_all_prompts_does_not_keep_them_on_one_replica() -> None:
    made, now = standings(), 0.0
    counts: Counter[str] = Counter()
    for number in range(400):
        found = survey(f"question {number}", 60, held=50, shared=50)
        counts[route(made, found, number, now)] += 1
        now += 0.05
    assert max(counts.values()) <= 1.4 * 100


def test_a_replica_that_is_measured_slow_gets_less() -> None:
    made = standings()
    slow = places(a=1_000.0, b=10_000.0, c=10_000.0, d=10_000.0)
    counts: Counter[str] = Counter()
    for number in range(100):
        found = survey(f"p {number}", 60)
        choice = made.choose(slow, 60 * BLOCK, found, now=0.1 * number)
        made.routed(str(number), choice.cost, found, now=0.1 * number)
        counts[choice.replica] += 1
    assert counts["a"] < min(counts[name] for name in "bcd")


def test_what_is_due_waits_no_longer_and_an_end_is_noted_once() -> None:
    made, found = standings(), survey("p", 100)
    choice = made.choose(places(), 3200, found, now=0.0)
    made.routed("1", choice.cost, found, now=0.0)
    assert max(one.cost.queue_s for one in made.choose(places(), 3200, found, now=0.1).ranked) > 0
    made.done("1", 0.2)
    made.done("1", 0.2)
    made.done("of nobody", 0.2)
    after = made.choose(places(), 3200, found, now=10.0)
    assert all(one.cost.queue_s == 0.0 for one in after.ranked)


def test_answers_under_way_make_a_prompt_longer_there() -> None:
    made, found = standings(), survey("p", 100)
    speed = {"prefill_tokens_per_s": 10_000.0, "decode_slowdown": 0.5}
    slow = [replace(one, **speed) for one in places()]
    first = made.choose(slow, 3200, found, now=0.0)
    made.routed("1", first.cost, found, now=0.0, is_told=True)
    made.first_token("1", 0.4)

    def computed() -> dict[str, float]:
        choice = made.choose(slow, 3200, survey("q", 100), now=0.5)
        return {one.cost.replica: one.cost.compute_s for one in choice.ranked}

    assert computed()[first.replica] == pytest.approx(0.48)
    assert sorted(computed().values())[:3] == pytest.approx([0.32] * 3)
    made.done("1", 5.0)
    assert list(computed().values()) == pytest.approx([0.32] * 4)


def test_speeds_that_differ_by_chance_leave_no_replica_idle() -> None:
    made = standings()
    speeds = (10_000.0, 9_000.0, 8_500.0, 4_000.0)
    alike = [
        replace(one, prefill_tokens_per_s=speed)
        for one, speed in zip(places(), speeds, strict=True)
    ]
    counts: Counter[str] = Counter()
    for number in range(120):
        found, now = survey(f"p{number}", 100), 0.2 * number
        choice = made.choose(alike, 3200, found, now=now)
        made.routed(str(number), choice.cost, found, now=now)
        counts[choice.replica] += 1
    assert min(counts[name] for name in "abc") > 0.9 * max(counts.values())
    assert counts["d"] < 0.7 * max(counts.values()), "which is a slower machine"


def test_a_replica_that_went_takes_its_requests_along() -> None:
    made, found = standings(), survey("p", 100)
    replica = route(made, found, 1, 0.0)
    made.retain(set(NAMES) - {replica})
    made.done("1", 0.1)
    left = [one for one in places() if one.replica != replica]
    assert made.choose(left, 3200, found, now=0.2).replica != replica


def test_an_idle_replica_that_stays_keeps_what_lately_came() -> None:
    made, found = standings(), survey("p", 100)
    replica = route(made, found, 1, 0.0)
    made.done("1", 0.1)

    def crowds() -> dict[str, float]:
        choice = made.choose(places(), 3200, found, now=0.2)
        return {one.cost.replica: one.cost.utilization for one in choice.ranked}

    before = crowds()
    made.retain(NAMES)
    assert crowds() == before
    assert before[replica] > 0


def told(num_tokens: int, *, is_sure: bool = True) -> list[Place]:
    """Return places of which `c` has so many tokens in its pool, by its engine's events."""
    pools = {"c": PoolMatch(num_tokens=num_tokens, is_sure=is_sure)}
    return [replace(one, pool=pools.get(one.replica)) for one in places()]


def pool_tokens(made: Standings, at: list[Place], found: Survey) -> dict[str, int]:
    choice = made.choose(at, len(found.words) * BLOCK, found, now=0.0)
    return {one.cost.replica: one.cost.pool_tokens for one in choice.ranked}


def test_a_pool_that_tells_is_believed() -> None:
    made, found = standings(), survey("p", 100)
    choice = made.choose(told(50 * BLOCK), 100 * BLOCK, found, now=0.0)
    assert (choice.replica, choice.cost.pool_tokens) == ("c", 50 * BLOCK)


def test_what_an_engine_has_evicted_counts_no_longer_though_it_was_sent_there() -> None:
    made, found = standings(), survey("p", 100)
    choice = made.choose(told(99 * BLOCK), 100 * BLOCK, found, now=0.0)
    made.routed("1", choice.cost, found, now=0.0)
    made.done("1", 1.0)
    assert pool_tokens(made, told(10 * BLOCK), found)["c"] == 10 * BLOCK
    unsure = told(10 * BLOCK, is_sure=False)
    assert pool_tokens(made, unsure, found)["c"] == 100 * BLOCK - 1, "it may be there untold"


def test_a_prompt_under_way_counts_before_its_engine_tells_of_it() -> None:
    made, found = standings(), survey("p", 100)
    choice = made.choose(told(50 * BLOCK), 100 * BLOCK, found, now=0.0)
    made.routed("1", choice.cost, found, now=0.0)
    assert choice.replica == "c"
    assert pool_tokens(made, told(0), found)["c"] == 100 * BLOCK - 1
    made.done("1", 1.0)
    assert pool_tokens(made, told(0), found)["c"] == 0
