"""Where each router sends a request."""

from kvray.lab.replay.fleet.plan import Memory
from kvray.lab.replay.fleet.routers import ROUTERS, Request, Router
from tests.unit.lab.replay.fleet.synthetic import plan, random_trace

TRACE = random_trace(1, shared_blocks=200, own_blocks=2, load=1)


def router(name: str, count: int = 3) -> Router:
    fleet = plan(count, imbalance_max=4)
    return ROUTERS[name](fleet, TRACE, Memory(TRACE, fleet))


def request(number: int, *ids: int) -> Request:
    return Request(number=number, ids=ids, num_tokens=100 * len(ids))


def test_round_robin_takes_turns() -> None:
    turns = router("round_robin")
    assert [turns.route(request(at, 1), [0, 0, 0], 0.0) for at in range(4)] == [0, 1, 2, 0]


def test_the_power_of_two_never_takes_the_longest_queue() -> None:
    two = router("pow2")
    taken = {two.route(request(at, 1), [0, 5, 1], 0.0) for at in range(50)}
    assert taken == {0, 2}


def test_affinity_stays_with_the_longest_match() -> None:
    affinity = router("affinity")
    first = affinity.route(request(0, 1, 2, 3), [0, 0, 0], 0.0)
    other = affinity.route(request(1, 7, 8), [0, 0, 0], 0.0)
    assert other != first, "it remembers less"
    assert affinity.route(request(2, 1, 2, 3, 4), [2, 2, 2], 0.0) == first


def test_affinity_does_as_pow2_if_queues_differ_too_much() -> None:
    affinity = router("affinity")
    first = affinity.route(request(0, 1, 2, 3), [0, 0, 0], 0.0)
    queues = [5 if at == first else 0 for at in range(3)]
    assert affinity.route(request(1, 1, 2, 3), queues, 0.0) != first


def test_affinity_ignores_a_match_of_less_than_a_tenth() -> None:
    affinity = router("affinity")
    first = affinity.route(request(0, *range(5)), [0, 0, 0], 0.0)
    assert affinity.route(request(1, 0, *range(10, 20)), [0, 0, 0], 0.0) != first


def test_kvray_stays_with_a_prefix_until_its_queue_costs_more() -> None:
    kvray = router("kvray")
    first = kvray.route(request(0, *range(10)), [0, 0, 0], 0.0)
    assert kvray.route(request(1, *range(50, 60)), [0, 0, 0], 0.1) != first
    kvray.done(0, first, 1.0)
    assert kvray.route(request(2, *range(11)), [0, 0, 0], 1.0) == first
    assert kvray.route(request(3, *range(100, 190)), [0, 0, 0], 1.0) != first
