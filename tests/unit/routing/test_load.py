"""The queue of a replica, as its router knows it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.routing import Load
from kvray.routing.standings import RECENT_S


def test_an_idle_replica_has_no_queue() -> None:
    assert Load().queue_s(5.0) == 0


def test_waiting_work_shrinks_while_the_oldest_request_runs() -> None:
    load = Load()
    load.routed("r1", 2.0, now=10.0)
    load.routed("r2", 3.0, now=10.5)
    assert load.queue_s(11.0) == pytest.approx(4.0)
    assert load.queue_s(12.0) == pytest.approx(3.5), "r1 is due, and r2 has not begun"


def test_a_request_that_is_late_makes_the_wait_longer_the_later_it_is() -> None:
    load = Load()
    load.routed("r1", 2.0, now=10.0)
    waits = [load.queue_s(10.0 + ran_s) for ran_s in (2.0, 4.0, 6.0, 8.0, 99.0)]
    assert waits == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_a_first_token_ends_the_wait_for_its_request() -> None:
    load = Load()
    load.routed("r1", 2.0, now=10.0)
    load.routed("r2", 3.0, now=10.5)
    load.done("r1", now=13.0)
    assert load.queue_s(14.0) == pytest.approx(2.0)
    load.done("r2", now=15.0)
    assert load.queue_s(15.0) == 0


def test_a_request_that_overtakes_leaves_the_oldest_one_running() -> None:
    load = Load()
    load.routed("r1", 5.0, now=0.0)
    load.routed("r2", 1.0, now=0.0)
    load.done("r2", now=3.0)
    assert load.queue_s(3.0) == pytest.approx(2.0)


def test_an_unknown_request_changes_nothing() -> None:
    load = Load()
    load.routed("r1", 2.0, now=0.0)
    load.done("r0", now=1.0)
    assert (len(load), load.queue_s(1.0)) == (1, 1.0)


def test_steady_work_is_its_share_of_time() -> None:
    load = Load()
    for second in range(600):
        load.routed(second, 0.3, now=float(second))
        load.done(second, now=second + 0.3)
    assert load.utilization(600.0) == pytest.approx(0.3, abs=0.01)
    assert load.utilization(600.0 + 10 * RECENT_S) < 0.001


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans())))
def test_a_queue_is_never_negative_nor_more_than_all_that_waits(
    steps: list[tuple[float, float, bool]],
) -> None:
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
