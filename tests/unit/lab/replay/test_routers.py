"""Replicas in virtual time: what their tier holds, where routers send requests, and the outcome."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvray.lab.replay import Trace, infinite, routers
from kvray.lab.replay.report import report_routers
from kvray.routing import Link, Rates, Stretch
from tests.unit.lab.replay.excerpts import CONVERSATION, SYNTHETIC, excerpt, made

RATES = Rates(
    prefill_tokens_per_s=1000.0,
    token_bytes=1.0,
    host=Link(bytes_per_s=1e5),
    remote=Link(bytes_per_s=1e4),
)


def plan(num_replicas: int = 8, **fields: Any) -> routers.FleetPlan:
    """Return a fleet that computes a block of 100 tokens in 0.1 s, and copies it in 1 or 11 ms."""
    known = {"pool_blocks": 100, "host_blocks": 1000, "rates": RATES, "deadline_s": 2.0}
    return routers.FleetPlan(num_replicas=num_replicas, **known | fields)


trace_of = partial(made, block_tokens=100)


def random_trace(num_requests: int, *, shared_blocks: int, own_blocks: int, load: float) -> Trace:
    """Return requests with a prefix that all of them share, at a load of what is their own."""
    numbers, requests = random.Random(7), []
    rate = load * 8 / (0.1 * own_blocks)
    now, block = 0.0, shared_blocks
    for _ in range(num_requests):
        now += numbers.expovariate(rate)
        count = numbers.randint(1, 2 * own_blocks - 1)
        requests.append((now, [*range(shared_blocks), *range(block, block + count)]))
        block += count
    return trace_of(*requests)


def test_a_request_waits_for_the_one_before_it_and_speed_divides_the_times_of_the_trace():
    for second_s, speed in ((0.1, 1), (0.4, 4)):
        trace = trace_of((0, b"ab"), (second_s, b"xy"))
        found = routers.simulate(trace, plan(1, speed=speed), router="round_robin")
        assert found.first_token_p50_s == pytest.approx((0.2 + 0.3) / 2)
        assert found.throughput_per_s == pytest.approx(2 / 0.4)
        assert found.utilization == pytest.approx(1)


def test_reuse_comes_from_the_pool_then_the_node_then_another_node():
    trace = trace_of((0, b"abc"), (1, b"abd"), (2, b"ab"))
    found = routers.simulate(trace, plan(1), router="round_robin")
    assert found.pool_reuse == pytest.approx((200 + 199) / 800)
    small = routers.simulate(trace, plan(1, pool_blocks=1), router="round_robin")
    assert (small.pool_reuse, small.host_reuse) == (pytest.approx(0.25), pytest.approx(199 / 800))
    apart = routers.simulate(trace, plan(3), router="round_robin")
    assert (apart.pool_reuse, apart.remote_reuse) == (0, pytest.approx(399 / 800))
    assert apart.first_token_p50_s == pytest.approx(0.022 + 0.1)


def test_a_disk_below_finds_what_memory_lost():
    trace = trace_of((0, b"ab"), (1, b"wxyz"), (2, b"abc"))
    rates = replace(RATES, disk=Link(bytes_per_s=1e5))
    small = {"pool_blocks": 4, "host_blocks": 4, "rates": rates}
    assert routers.simulate(trace, plan(1, **small), router="round_robin").reuse == 0
    found = routers.simulate(trace, plan(1, disk_blocks=10, **small), router="round_robin")
    assert found.reuse == found.disk_reuse == pytest.approx(200 / 900)


def test_what_is_late_is_no_goodput():
    trace = trace_of((0, b"abcde"), (0, b"vwxyz"))
    found = routers.simulate(trace, plan(1, deadline_s=0.6), router="round_robin")
    assert (found.in_time, found.goodput_per_s) == (0.5, pytest.approx(1.0))


@pytest.mark.parametrize("router", routers.ROUTERS)
def test_one_replica_with_all_the_memory_reuses_what_an_infinite_cache_finds_each_time(router):
    one, other = (routers.simulate(excerpt(SYNTHETIC), plan(4), router=router) for _ in range(2))
    assert replace(one, seconds=0) == replace(other, seconds=0)
    trace = excerpt(CONVERSATION)
    plenty = plan(1, pool_blocks=10**6, host_blocks=10**6)
    found = routers.simulate(trace, plenty, router=router)
    # The last token of a prompt is computed in any case, and requests come while others run.
    assert found.reuse == pytest.approx(infinite(trace).token_hit_ratio, abs=0.002)


def test_every_router_stands_beside_one_replica_also_in_pictures_that_start_at_0():
    titles: list[str] = []
    found = routers.compare_routers(
        excerpt(SYNTHETIC),
        plan(4),
        ["pow2", "kvray"],
        progress=lambda title, done, total: titles.append(f"{done}/{total} {title}"),
    )
    assert titles == ["0/3 one replica", "1/3 pow2", "2/3 kvray"]
    assert [one.router for one in found.outcomes] == ["pow2", "kvray"]
    for one in found.outcomes:
        assert one.reuse_of_one == one.reuse / found.one.reuse
        parts = one.pool_reuse + one.host_reuse + one.disk_reuse + one.remote_reuse
        assert one.reuse == pytest.approx(parts)
    for axes in report_routers(found, concurrent=1).figure().axes:
        assert axes.get_ylim()[0] == 0
        assert [label.get_text() for label in axes.get_xticklabels()] == ["pow2", "kvray"]


@pytest.mark.parametrize("load", [0.1, 0.5, 0.9])
def test_one_prefix_in_every_request_loads_no_replica_too_much(load):
    trace = random_trace(800, shared_blocks=20, own_blocks=4, load=load)
    found = routers.simulate(trace, plan(), router="kvray")
    assert found.load_spread <= 1.4
    assert found.reuse > 0.8


@pytest.mark.parametrize("load", [0.3, 0.7, 0.95])
def test_without_a_shared_prefix_kvray_is_no_worse_than_the_power_of_two(load):
    trace = random_trace(800, shared_blocks=0, own_blocks=10, load=load)
    pow2, kvray = (routers.simulate(trace, plan(), router=name) for name in ("pow2", "kvray"))
    assert kvray.reuse == pow2.reuse == 0
    assert kvray.throughput_per_s >= 0.97 * pow2.throughput_per_s
    assert kvray.first_token_p90_s <= 1.03 * pow2.first_token_p90_s


def test_in_conversations_near_saturation_kvray_reuses_more_and_answers_sooner():
    """Of users who each say some three blocks more in every turn, at a load with all that reuse."""
    numbers, requests, now, block = random.Random(7), [], 0.0, 1
    said: dict[int, list[int]] = {user: [0] for user in range(60)}
    for _ in range(60 * 12):
        now += numbers.expovariate(0.9 * 4 / (0.1 * 3))
        ids = said[numbers.randrange(60)]
        count = numbers.randint(1, 5)
        ids += range(block, block + count)
        block += count
        requests.append((now, ids.copy()))
    fleet = plan(4, pool_blocks=300, host_blocks=600)
    found = routers.compare_routers(trace_of(*requests), fleet, [*routers.ROUTERS][:4])
    by_name = {one.router: one for one in found.outcomes}
    kvray = by_name.pop("kvray")
    for other in by_name.values():
        assert kvray.reuse > other.reuse
        assert kvray.first_token_p90_s < other.first_token_p90_s
    assert kvray.reuse_of_one is not None
    assert kvray.reuse_of_one > 0.9


def on_node(num_tokens: int, tier: str = "host") -> Stretch:
    return Stretch(num_tokens=num_tokens, holders={"0": tier})


SMALL = {"host_blocks": 2}
BOTH = Stretch(num_tokens=100, holders={"0": "host", "1": "host"})


@pytest.mark.parametrize(
    ("fleet", "used", "asked", "num_tokens", "found"),
    [
        (plan(2), (3, 1), range(4), 400, [BOTH, on_node(200)]),
        (plan(1, **SMALL), (4,), range(4), 350, [on_node(200)]),
        (plan(1, **SMALL), (4,), range(2, 4), 200, []),
        (
            plan(1, **SMALL, disk_blocks=1),
            (4,),
            range(4),
            400,
            [on_node(200), on_node(100, "disk")],
        ),
        (plan(1), (2,), range(2), 130, [on_node(130)]),
    ],
    ids=["with their nodes", "to the first gap", "not behind a gap", "on disk", "a partial block"],
)
def test_blocks_of_a_prompt_are_found(fleet, used, asked, num_tokens, found):
    memory = routers.Memory(trace_of((0, b"abcd")), fleet)
    for replica, count in enumerate(used):
        memory.use(replica, [*range(count)])
    assert memory.stretches([*asked], num_tokens) == found


ROUTERS_TRACE = random_trace(1, shared_blocks=200, own_blocks=2, load=1)


def router(name: str) -> routers.Router:
    fleet = plan(3, imbalance_max=4)
    return routers.ROUTERS[name](fleet, ROUTERS_TRACE, routers.Memory(ROUTERS_TRACE, fleet))


def request(number: int, *ids: int) -> routers.Request:
    return routers.Request(number=number, ids=ids, num_tokens=100 * len(ids))


def test_round_robin_takes_turns_and_the_power_of_two_never_takes_the_longest_queue():
    turns, two = router("round_robin"), router("pow2")
    assert [turns.route(request(at, 1), [0, 0, 0], 0.0) for at in range(4)] == [0, 1, 2, 0]
    assert {two.route(request(at, 1), [0, 5, 1], 0.0) for at in range(50)} == {0, 2}


def test_affinity_stays_with_the_longest_match_unless_queues_differ_or_it_is_less_than_a_tenth():
    affinity = router("affinity")
    first = affinity.route(request(0, *range(5)), [0, 0, 0], 0.0)
    other = affinity.route(request(1, 7, 8), [0, 0, 0], 0.0)
    assert other != first, "it remembers less"
    assert affinity.route(request(2, *range(6)), [2, 2, 2], 0.0) == first
    queues = [5 if at == first else 0 for at in range(3)]
    assert affinity.route(request(3, *range(5)), queues, 0.0) != first, "it does as pow2"
    affinity = router("affinity")
    first = affinity.route(request(0, *range(5)), [0, 0, 0], 0.0)
    assert affinity.route(request(1, 0, *range(10, 20)), [0, 0, 0], 0.0) != first


def test_ingresses_that_choose_together_route_as_one_and_others_worse():
    trace = random_trace(400, shared_blocks=4, own_blocks=6, load=0.7)

    def p90(router: str, num_ingresses: int) -> float:
        known = {"pool_blocks": 400, "host_blocks": 1500, "num_ingresses": num_ingresses}
        return routers.simulate(trace, plan(**known), router=router).first_token_p90_s

    assert p90("kvray", 4) == p90("kvray", 1) == p90("alone", 1)
    assert p90("alone", 4) > 1.05 * p90("kvray", 4)
