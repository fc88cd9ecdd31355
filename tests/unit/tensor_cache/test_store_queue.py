import threading
from collections.abc import Iterator

import pytest

from kvray.tensor_cache.cache import StoreQueue
from tests.waiting import HANG_S


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def saver(gate: threading.Event) -> Iterator[StoreQueue]:
    made = StoreQueue(saves_max=2, bytes_max=100)
    yield made
    gate.set()
    made.close(5)


def test_actions_run_in_order(saver: StoreQueue) -> None:
    done: list[int] = []
    assert saver.submit(1, lambda: done.append(1))
    assert saver.submit(1, lambda: done.append(2))
    assert saver.flush(5)
    assert done == [1, 2]


def test_too_many_actions_are_refused(saver: StoreQueue, gate: threading.Event) -> None:
    started = threading.Event()
    saver.submit(0, lambda: (started.set(), gate.wait())[0])
    assert started.wait(HANG_S)
    assert [saver.submit(0, gate.wait) for _ in range(3)] == [True, True, False]


def test_too_many_bytes_are_refused_until_there_is_room(
    saver: StoreQueue, gate: threading.Event
) -> None:
    assert saver.submit(60, lambda: gate.wait() and None)
    assert not saver.has_room(41)
    assert not saver.submit(41, gate.wait)
    gate.set()
    assert saver.flush(5)
    assert saver.has_room(41)


def test_one_action_of_any_size_is_taken(saver: StoreQueue) -> None:
    assert saver.submit(10**9, lambda: None)
    assert saver.flush(5)


def test_flush_gives_up_at_its_deadline(saver: StoreQueue, gate: threading.Event) -> None:
    saver.submit(1, lambda: gate.wait() and None)
    assert not saver.flush(0.01)


def test_close_gives_up_what_it_has_no_time_for(saver: StoreQueue, gate: threading.Event) -> None:
    started, done = threading.Event(), []
    saver.submit(1, lambda: (started.set(), gate.wait())[0])
    assert started.wait(HANG_S)
    saver.submit(1, lambda: done.append(1))
    assert saver.close(0.01) == 1
    gate.set()
    assert done == []


def test_nothing_is_taken_after_close(saver: StoreQueue) -> None:
    assert saver.close(5) == 0
    assert not saver.submit(1, lambda: None)


def test_a_failed_action_does_not_keep_the_next_from_running(saver: StoreQueue) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    saver.submit(1, fail)
    assert saver.flush(5)
    done: list[int] = []
    assert saver.submit(1, lambda: done.append(1))
    assert saver.flush(5)
    assert done == [1]
