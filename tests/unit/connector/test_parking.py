"""Parked requests wait for their blocks: kept until told and a while longer, then never loaded."""

import ctypes
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine.meta import ConnectorMeta
from kvray.engine.promises import Promises
from kvray.errors import CorruptBlock, LeaseExpired
from kvray.store import Arena
from tests.unit.connector.conftest import MakePair, arena_of, leased
from tests.unit.connector.pair import BLOCK, Pair, Request
from tests.unit.connector.test_scheduler import flip_a_byte
from tests.waiting import HANG_S, wait_for

PROMPT = list(range(100, 140))
PARK_LEASE_S = 0.3


@pytest.fixture
def warm(shard: Shard, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair that loads later, and whose tier has PROMPT."""
    monkeypatch.setenv("KVRAY_CONNECTOR__LOAD", "async")
    monkeypatch.setenv("KVRAY_CONNECTOR__PARK_LEASE_S", str(PARK_LEASE_S))
    pair = make_pair()
    pair.serve(Request(1, PROMPT))
    pair.flush()
    return pair


def park(pair: Pair, request: Request) -> None:
    """Ask for the request, and have it parked by the pass of that iteration."""
    request.block_ids = list(range(20, 30))
    pair.pool[request.block_ids] = -1.0
    found = pair.scheduler.get_num_new_matched_tokens(request, 0)
    assert found == (9 * BLOCK, True)
    bind(pair)


def bind(pair: Pair, *reports: RequestData) -> ConnectorMeta:
    meta = pair.scheduler.build_connector_meta(SchedulerOutput(new_requests=list(reports)))
    pair.worker.bind_connector_meta(meta)
    pair.worker.start_load_kv(None)
    return meta


def poll(pair: Pair, request: Request) -> None:
    """Poll as the engine does until the request may go on."""
    said = pair.worker.get_finished([], [request.request_id])[1]
    wait_for(lambda: said or said.extend(pair.worker.get_finished([], [])[1]) or said)
    assert said == [request.request_id]
    assert pair.worker.get_finished([], []) == ([], [])


def resumed(request: Request, position: int = 9 * BLOCK) -> RequestData:
    tokens = list(request.tokens)
    left = len(tokens) - position
    return RequestData(request.request_id, tokens, list(request.block_ids), position, left)


def test_a_parked_request_is_loaded_when_it_comes_back(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    assert (warm.pool[request.block_ids] == -1.0).all()
    poll(warm, request)
    assert leased(warm) == 9
    meta = bind(warm, resumed(request))
    assert len(meta.loads) == 1
    for index in range(9):
        assert (warm.pool[request.block_ids[index]] == warm.content(request, index)).all()
    assert leased(warm) == 0


def test_an_engine_that_took_less_gets_less(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    meta = bind(warm, resumed(request, position=4 * BLOCK))
    assert len(meta.loads[0].pages[0].ids()) == 4
    assert (warm.pool[request.block_ids[4:]] == -1.0).all()


def test_a_promise_is_kept_while_the_engine_asks_and_was_not_told(
    warm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, sound, may_go_on = Request(2, PROMPT), Arena.sound, threading.Event()
    monkeypatch.setattr(Arena, "sound", lambda *args: may_go_on.wait(30) and sound(*args))
    park(warm, request)
    assert warm.worker.get_finished([], [request.request_id]) == ([], [])
    until = time.monotonic() + PARK_LEASE_S * 1.5
    while time.monotonic() < until:
        assert warm.worker.get_finished([], []) == ([], [])
        time.sleep(PARK_LEASE_S / 10)
    assert leased(warm) == 9
    may_go_on.set()
    wait_for(lambda: warm.worker.get_finished([], [])[1] == [request.request_id])
    assert len(bind(warm, resumed(request)).loads) == 1


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "never_asked"])
def test_one_whose_engine_is_idle_from_then_on_is_given_up_in_time(
    warm: Pair, is_told: bool
) -> None:
    request = Request(2, PROMPT)
    began_at = time.monotonic()
    park(warm, request)
    if is_told:
        poll(warm, request)
    assert leased(warm) == 9
    wait_for(lambda: leased(warm) == 0)
    assert time.monotonic() - began_at >= PARK_LEASE_S
    with pytest.raises(LeaseExpired, match="park_lease_s"):
        bind(warm, resumed(request))
    assert (warm.pool[request.block_ids] == -1.0).all()


def test_what_time_has_ended_is_handed_to_nobody_and_forgotten_with_the_next_pass(
    warm: Pair,
) -> None:
    promises, engine = warm.scheduler._leader.promises, warm.worker._rank.shared
    park(warm, Request(2, PROMPT))
    wait_for(lambda: leased(warm) == 0)
    with pytest.raises(LeaseExpired):
        promises.take(engine, warm.scheduler._leader.states[2])
    park(warm, Request(3, PROMPT))
    wait_for(lambda: leased(warm) == 0)
    bind(warm)
    assert not promises._states
    assert not engine.parked
    assert promises._watcher is None


def test_should_the_thread_that_looks_at_the_time_die_the_next_parked_request_has_another(
    warm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(promises: Promises) -> float | None:
        if not failed:
            failed.append(True)
            raise MemoryError
        return give_up_late(promises)

    failed, give_up_late = list[bool](), Promises._give_up_late
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    monkeypatch.setattr(Promises, "_give_up_late", fail_once)
    park(warm, Request(2, PROMPT))
    wait_for(lambda: not warm.scheduler._leader.promises._watcher.is_alive())
    park(warm, Request(3, PROMPT))
    wait_for(lambda: leased(warm) == 0)


def test_what_was_taken_is_not_ended_by_time(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    bind(warm, resumed(request))
    assert not warm.scheduler._leader.promises._parked


def test_one_given_up_by_time_is_no_end_of_an_engine_that_does_not_count_on_it(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    wait_for(lambda: leased(warm) == 0)
    assert bind(warm, resumed(request, position=0)).loads == ()


def test_time_ends_what_is_late_and_nothing_else(warm: Pair) -> None:
    early, late = Request(2, PROMPT), Request(3, PROMPT[:21])
    park(warm, early)
    time.sleep(PARK_LEASE_S / 2)
    late.block_ids = list(range(30, 36))
    assert warm.scheduler.get_num_new_matched_tokens(late, 0) == (5 * BLOCK, True)
    wait_for(lambda: leased(warm) == 5)
    wait_for(lambda: leased(warm) == 0)


def test_an_id_that_comes_again_is_not_given_up_with_the_first(warm: Pair) -> None:
    park(warm, Request(2, PROMPT))
    time.sleep(PARK_LEASE_S * 0.6)
    again = Request(2, PROMPT)
    park(warm, again)
    poll(warm, again)
    time.sleep(PARK_LEASE_S * 0.6)
    assert len(bind(warm, resumed(again)).loads) == 1


def test_nothing_of_it_is_left_when_the_engine_ends(
    warm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Promises, "_give_up_late", lambda promises: 60.0)
    park(warm, Request(2, PROMPT))
    warm.scheduler.shutdown()
    assert leased(warm) == 0
    assert "kvray-promises" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("kind", [MemoryError, ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_whatever_is_raised_while_blocks_are_checked_the_request_comes_back_and_is_checked_then(
    warm: Pair, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise kind("while it was parked")

    monkeypatch.setattr(Arena, "sound", fail)
    for request_id in (2, 3):
        request = Request(request_id, PROMPT)
        park(warm, request)
        poll(warm, request)
        bind(warm, resumed(request))
        assert (warm.pool[request.block_ids[8]] == warm.content(request, 8)).all()
    assert warm.totals["errors"] == 2
    request = Request(4, PROMPT)
    park(warm, request)
    poll(warm, request)
    flip_a_byte(arena_of(warm), depth=3)
    with pytest.raises(CorruptBlock):
        bind(warm, resumed(request))


def test_a_request_whose_checking_thread_has_died_comes_back(
    warm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda *_: None)
    first, second = Request(2, PROMPT), Request(3, PROMPT)
    park(warm, first)
    poll(warm, first)
    (thread,) = [one for one in threading.enumerate() if one.name == "kvray-parking"]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
    )
    park(warm, second)
    poll(warm, second)
    thread.join(HANG_S)
    bind(warm, resumed(second))
    assert (warm.pool[second.block_ids[8]] == warm.content(second, 8)).all()
    park(warm, first)
    poll(warm, first)
    assert "kvray-parking" in [one.name for one in threading.enumerate()]


def test_without_a_thread_for_it_a_request_comes_back_at_once_and_is_checked_then(
    warm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        if thread.name == "kvray-parking":
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", fail)
    request = Request(2, PROMPT)
    park(warm, request)
    assert warm.worker.get_finished([], [2]) == ([], [2])
    bind(warm, resumed(request))
    assert (warm.pool[request.block_ids[8]] == warm.content(request, 8)).all()


def test_a_request_that_is_parked_when_the_worker_ends_is_answered_for(
    warm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, began, looked_at = Arena.sound, threading.Event(), list[int]()
    checks = warm.worker._rank.parking._checks

    def look(*args: Any) -> Any:
        began.set()
        looked_at.append(len(looked_at))
        wait_for(lambda: all(check.has_ended for check in checks.values()), "the worker's end")
        return sound(*args)

    monkeypatch.setattr(Arena, "sound", look)
    for request_id in (2, 3):
        park(warm, Request(request_id, PROMPT))
    began.wait(HANG_S)
    warm.worker.shutdown()
    assert looked_at == [0], "the other one is not waited for"
    assert sorted(warm.worker.get_finished([], [2, 3])[1]) == [2, 3]


def test_what_was_found_of_other_blocks_says_nothing_of_these(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    (check,) = warm.worker._rank.parking._checks.values()
    arena_id, lease = check.place
    assert not warm.worker._rank.parking.is_checked(2, (arena_id, replace(lease, lease_id=99)))
    assert not warm.worker._rank.parking.is_checked(2, check.place)  # asked once


def test_a_runtime_that_takes_failed_loads_back_asks_about_them_once_more(warm: Pair) -> None:
    flip_a_byte(arena_of(warm), depth=3)
    request = Request(2, PROMPT)
    park(warm, request)
    assert warm.worker.take_failed_async_load_requests() == set()
    poll(warm, request)
    assert warm.worker.take_failed_async_load_requests() == {2}
    assert warm.worker.take_failed_async_load_requests() == set()
    assert warm.scheduler.get_num_new_matched_tokens(request, 0) == (3 * BLOCK, True)
    bind(warm)
    poll(warm, request)
    assert warm.worker.take_failed_async_load_requests() == set()
    bind(warm, resumed(request, position=3 * BLOCK))
    assert (warm.pool[request.block_ids[2]] == warm.content(request, 2)).all()


def test_ranks_that_each_have_a_share_do_not_take_back_alone(
    warm: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_byte(arena_of(warm), depth=3)
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    monkeypatch.setattr(type(warm.worker._rank.shared.args), "num_parts_ranks", 2)
    assert warm.worker.take_failed_async_load_requests() == set()
    with pytest.raises(CorruptBlock):
        bind(warm, resumed(request))


def test_one_that_does_not_come_back_is_given_up_and_stops_the_engine_if_it_does(
    warm: Pair,
) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    bind(warm)
    assert leased(warm) == 9
    time.sleep(PARK_LEASE_S * 1.1)
    bind(warm)
    assert leased(warm) == 0
    with pytest.raises(LeaseExpired, match="park_lease_s"):
        bind(warm, resumed(request))
    assert (warm.pool[request.block_ids] == -1.0).all()


def test_one_that_ends_while_parked_gives_its_lease_back(warm: Pair) -> None:
    request = Request(2, PROMPT)
    park(warm, request)
    assert not warm.scheduler.request_finished(request, [])
    assert leased(warm) == 0
    poll(warm, request)


def test_a_block_that_proves_corrupt_while_parked_is_never_loaded(warm: Pair) -> None:
    flip_a_byte(arena_of(warm), depth=3)
    request = Request(2, PROMPT)
    park(warm, request)
    poll(warm, request)
    with pytest.raises(CorruptBlock, match="load: sync"):
        bind(warm, resumed(request))
    assert (warm.pool[request.block_ids] == -1.0).all()
    assert leased(warm) == 0


def test_a_miss_is_never_parked(warm: Pair) -> None:
    assert warm.scheduler.get_num_new_matched_tokens(Request(2, [1, 2, 3]), 0) == (0, False)
