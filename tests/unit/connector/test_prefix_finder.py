"""What other nodes have is promised once it is here and leased, and never waited for too long."""

import time
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvray.breaker import Breaker
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine import prefix_finder
from kvray.store import Arena
from tests.kit.connector import BLOCK, HIT, NUM_WANTED, PROMPT, Pair, Request, args_for, flip_a_byte
from tests.kit.shard_socket import Answer, StageServer
from tests.unit.connector.conftest import MakePair
from tests.waiting import wait_for


def hear_of_peers(pair: Pair) -> Pair:
    """Return `pair` once its shard has told that there are other nodes."""
    wait_for(lambda: pair.engine.may_stage, "hearing of other nodes")
    return pair


@pytest.fixture
def pair(server: StageServer, make_pair: MakePair) -> Pair:
    return hear_of_peers(make_pair())


@pytest.fixture
def begun(server: StageServer, make_pair: MakePair) -> Pair:
    pair = make_pair()
    pair.store(PROMPT[: 3 * BLOCK])
    return hear_of_peers(pair)


@pytest.fixture
def elsewhere(server: StageServer, make_pair: MakePair) -> Answer:
    """Another node: what it has saved appears in the arena when it is asked for."""
    other = make_pair(args_for(cache={"enable_block_reuse": False}))

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        other.store(PROMPT)
        return {"num_blocks": len(request["keys"]) // 32, "reason": "none"}

    server.answer = answer
    return answer


def test_hit_tokens_are_counted_by_how_they_came_each_time(server, elsewhere, pair):
    arrivals = [[2, "nvme", ""], [NUM_WANTED, "nixl", "kvray-shard-b"]]
    server.answer = lambda request: {**elsewhere(request), "arrivals": arrivals}
    for times in (1, 2):
        assert pair.query(Request(1, PROMPT)) == HIT
        keys = pair.scheduler._leader.states[1].keys
        (asked,) = server.asked
        assert asked["keys"] == b"".join(keys[:NUM_WANTED]), "all that may be promised"
        assert (asked["replica"], asked["rank"]) == (pair.engine.replica, 0)
        assert 0 < asked["wait_s"] < 5
        assert pair.totals["staged_tokens"] == HIT
        assert pair.totals["hit_tokens_from_nvme"] == times * 2 * BLOCK
        assert pair.totals["hit_tokens_from_nixl"] == times * (NUM_WANTED - 2) * BLOCK
    assert pair.totals["stage_wait_us"] > 0
    pair.scheduler.request_finished(Request(1, PROMPT), [])
    assert pair.serve(Request(2, PROMPT)) == HIT
    assert pair.leased == 0
    assert pair.totals["hit_tokens_from_host"] == HIT
    came = [value for name, value in pair.totals.items() if name.startswith("hit_tokens_from_")]
    assert sum(came) == pair.totals["hit_tokens"]


def test_the_local_lease_is_kept_until_a_longer_one_takes_its_place(server, begun, elsewhere):
    before = len(server.asked)  # it may have heard of other nodes already
    held = begun.arena.tables.page_holder
    for num_blocks in (0, 3, NUM_WANTED):
        server.answer = lambda _, n=num_blocks: {"num_blocks": n, "reason": "too_slow"}
        request = Request(10 + num_blocks, PROMPT)
        assert begun.query(request) == 3 * BLOCK
        assert (begun.leased, np.count_nonzero(held)) == (3, 1)
        begun.scheduler.request_finished(request, [])
        assert begun.leased == 0
    assert len(server.asked) == before + 3
    server.answer = elsewhere
    assert begun.query(Request(2, PROMPT)) == HIT
    assert (begun.leased, np.count_nonzero(held)) == (NUM_WANTED, 1)
    assert begun.totals["staged_tokens"] == (NUM_WANTED - 3) * BLOCK


@pytest.mark.parametrize("reason", ["too_slow", "cheaper_to_recompute", "store_down", "not_stored"])
def test_a_miss_is_counted_by_what_the_shard_says(server, pair, reason):
    server.answer = lambda _: {"num_blocks": 0, "reason": reason}
    assert pair.query(Request(1, PROMPT)) == 0
    missed = {name: n for name, n in pair.totals.items() if name.startswith("miss_tokens_") and n}
    assert missed == {f"miss_tokens_{reason}": HIT}


def test_a_prompt_that_is_here_is_not_asked_about(server, warm):
    hear_of_peers(warm)
    del server.asked[:]
    assert warm.serve(Request(2, PROMPT)) == HIT
    assert warm.serve(Request(3, PROMPT), computed=HIT) == 0
    assert warm.serve(Request(4, PROMPT[:BLOCK])) == 0
    assert server.asked == []


def test_nobody_is_asked_before_the_shard_says_that_there_are_others(server, make_pair):
    server.report = {}
    pair = make_pair()
    wait_for(lambda: pair.engine._registration.accepted, "registering")
    assert pair.serve(Request(1, PROMPT)) == 0
    server.report = {"peers": True}
    hear_of_peers(pair)
    server.report = {"peers": False}
    wait_for(lambda: not pair.engine.may_stage, "hearing that they are gone")
    pair.query(Request(2, PROMPT[1:]))
    server.report = {"peers": None}
    wait_for(lambda: pair.engine.is_cut_off, "hearing that the lookup is away")
    pair.query(Request(3, PROMPT[2:]))
    assert server.asked == []
    assert pair.totals["miss_tokens_store_down"] == HIT, "other nodes may have it"


@pytest.mark.parametrize("block_reuse", [True, False])
def test_who_waits_for_or_loads_nothing_asks_nothing(server, make_pair, monkeypatch, block_reuse):
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "0" if block_reuse else "5")
    pair = make_pair(args_for(cache={"enable_block_reuse": block_reuse}))
    wait_for(lambda: pair.engine._registration.has_peers, "hearing of other nodes")
    assert pair.serve(Request(1, PROMPT)) == 0
    assert server.asked == []


def test_the_same_miss_is_asked_about_once_in_a_while(server, pair, monkeypatch):
    """A full engine asks about its waiting requests in every pass."""
    for _ in range(5):
        pair.query(Request(1, PROMPT))
    pair.query(Request(2, PROMPT))
    assert len(server.asked) == 1
    pair.query(Request(3, PROMPT[1:]))
    assert len(server.asked) == 2
    monkeypatch.setattr(prefix_finder, "_ABSENT_S", 0.0)
    pair.scheduler._leader.finder._absent.clear()
    for _ in range(2):
        pair.query(Request(1, PROMPT))
    assert len(server.asked) == 4


def test_what_came_too_late_is_asked_about_again(server, elsewhere, pair):
    server.answer = lambda _: {"num_blocks": 0, "reason": "too_slow"}
    assert pair.query(Request(1, PROMPT)) == 0
    server.answer = elsewhere
    assert pair.query(Request(1, PROMPT)) == HIT


def test_all_calls_for_a_request_wait_no_longer_than_is_set(server, make_pair, monkeypatch):
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "0.3")
    monkeypatch.setattr(Breaker, "state", lambda *_: "closed")

    def slow(request: dict[str, Any]) -> dict[str, Any]:
        time.sleep(request["wait_s"])
        return {"num_blocks": 0, "reason": "too_slow"}

    server.answer = slow
    pair = hear_of_peers(make_pair())
    for _ in range(20):
        pair.query(Request(1, PROMPT))
    waits = [asked["wait_s"] for asked in server.asked]
    assert 1 <= len(waits) < 20
    assert sum(waits) < 0.3
    assert pair.totals["miss_tokens_too_slow"] == 20 * HIT
    pair.scheduler.request_finished(Request(1, PROMPT), [])
    pair.query(Request(1, PROMPT))
    assert len(server.asked) == len(waits) + 1


def test_a_shard_that_does_not_answer_is_not_asked_for_a_while(server, make_pair, monkeypatch):
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "1")

    def hang(_request: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1.5)
        return {"num_blocks": 9, "reason": "none"}

    server.answer = hang
    pair = hear_of_peers(make_pair())
    for request_id in (1, 2, 3):
        assert pair.query(Request(request_id, PROMPT)) == 0
    assert len(server.asked) == 1
    assert pair.totals["miss_tokens_too_slow"] == HIT
    assert pair.totals["miss_tokens_store_down"] == 2 * HIT


def test_a_corrupt_block_here_may_come_from_elsewhere(server, warm, elsewhere):
    hear_of_peers(warm)
    flip_a_byte(warm.arena, depth=4)
    assert warm.serve(Request(2, PROMPT)) == HIT
    assert warm.leased == 0


def test_a_staged_block_that_is_corrupt_is_not_promised(server, elsewhere, pair):
    def damage(request: dict[str, Any]) -> dict[str, Any]:
        answer = elsewhere(request)
        flip_a_byte(pair.arena, depth=4)
        return answer

    server.answer = damage
    assert pair.query(Request(1, PROMPT)) == 4 * BLOCK
    assert pair.totals["miss_tokens_corrupt"] == (NUM_WANTED - 4) * BLOCK


@pytest.mark.parametrize(
    ("what", "becomes", "kept"),
    [
        ("lease_for", {"return_value": None}, 3),  # the arena is busy
        ("lease_for", {"side_effect": ZeroDivisionError}, 0),
        ("valid", {"side_effect": ZeroDivisionError}, 0),
    ],
)
def test_what_is_leased_behind_a_call_is_promised(
    server, begun, elsewhere, monkeypatch, what, becomes, kept
):
    def make_trouble(request: dict[str, Any]) -> dict[str, Any]:
        answer = elsewhere(request)
        monkeypatch.setattr(Arena, what, mock.Mock(**becomes))
        return answer

    server.answer = make_trouble
    assert begun.query(Request(2, PROMPT)) == kept * BLOCK
    monkeypatch.undo()
    wait_for(lambda: begun.leased == kept, "the release")


def test_the_shard_is_told_how_fast_the_engine_computes_once_it_is_known(server, pair):
    long = Request(1, list(range(1000, 1200)))
    pair.query(long)
    pair.plan(long)
    for position in (200, 201):
        report = RequestData(1, [7], [], position, 1)
        pair.scheduler.build_connector_meta(SchedulerOutput(cached_requests=[report]))
    pair.query(Request(2, PROMPT))
    first, second = server.asked
    assert first["tokens_per_s"] == 0
    assert second["tokens_per_s"] > 0
