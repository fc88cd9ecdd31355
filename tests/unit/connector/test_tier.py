"""Tiers that come late, go early and come back: the engine goes on, and joins what is there."""

import time

import pytest

from kvray.actors.shard.shard import Shard
from kvray.node import link as link_module
from tests.unit.connector.conftest import MakePair, arena_of, start_shard, wait_for_arena
from tests.unit.connector.pair import BLOCK, Pair, Request
from tests.waiting import wait_for

PROMPT = list(range(100, 140))


def test_an_engine_that_started_before_its_tier_joins_it(
    environment: dict[str, str], make_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair()
    assert pair.serve(Request(1, PROMPT)) == 0
    assert pair.totals["miss_tokens_store_down"] == 9 * BLOCK
    assert "goes on without" in caplog.text
    shard = start_shard()
    wait_for_arena(pair)
    wait_for(lambda: has_registered(shard), "registering")
    assert store_and_match(pair, first_id=2) == 9 * BLOCK
    shard.stop(retire=True, timeout_s=10)


def test_an_engine_outlives_its_tier_and_joins_the_next(
    environment: dict[str, str], make_pair: MakePair
) -> None:
    shard = start_shard()
    pair = make_pair()
    wait_for_arena(pair)
    assert store_and_match(pair, first_id=1) == 9 * BLOCK
    shard.stop(retire=True, timeout_s=10)
    assert pair.serve(Request(10, PROMPT)) == 0
    shard = start_shard()
    wait_for_arena(pair)
    assert store_and_match(pair, first_id=20) == 9 * BLOCK
    shard.stop(retire=True, timeout_s=10)


def test_a_shard_that_starts_again_is_not_even_noticed(
    environment: dict[str, str], make_pair: MakePair
) -> None:
    shard = start_shard()
    pair = make_pair()
    wait_for_arena(pair)
    assert store_and_match(pair, first_id=1) == 9 * BLOCK
    shard.stop(retire=False, timeout_s=10)
    assert pair.serve(Request(10, PROMPT)) == 9 * BLOCK
    shard = start_shard()
    assert pair.serve(Request(11, PROMPT)) == 9 * BLOCK
    wait_for(lambda: has_registered(shard), "registering again")
    shard.stop(retire=True, timeout_s=10)


def test_the_tiers_end_between_promise_and_load_does_not_break_the_promise(
    environment: dict[str, str], make_pair: MakePair
) -> None:
    shard = start_shard()
    pair = make_pair()
    wait_for_arena(pair)
    pair.serve(Request(1, PROMPT))
    pair.flush()
    request = Request(2, PROMPT)
    assert pair.query(request) == 9 * BLOCK
    shard.stop(retire=True, timeout_s=10)
    shard = start_shard()
    wait_for_arena(pair)
    pair.plan(request)
    pair.worker.start_load_kv(None)
    assert (pair.pool[request.block_ids[8]] == pair.content(request, 8)).all()
    pair.compute(request)
    assert pair.serve(Request(3, PROMPT)) == 0
    pair.flush()
    assert pair.serve(Request(4, PROMPT)) == 9 * BLOCK
    shard.stop(retire=True, timeout_s=10)


def test_a_promise_is_kept_however_often_the_tier_is_replaced_before_its_load(
    environment: dict[str, str], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_PREVIOUS_S", 0.0)
    shard = start_shard()
    pair = make_pair()
    wait_for_arena(pair)
    pair.serve(Request(1, PROMPT))
    pair.flush()
    promised = arena_of(pair)
    request = Request(2, PROMPT)
    assert pair.query(request) == 9 * BLOCK
    for _ in range(2):
        shard.stop(retire=True, timeout_s=10)
        shard = start_shard()
        wait_for_arena(pair)
    time.sleep(0.1)
    pair.plan(request)
    pair.worker.start_load_kv(None)
    for index in range(9):
        assert (pair.pool[request.block_ids[index]] == pair.content(request, index)).all()
    link = pair.worker._rank.shared.link
    wait_for(lambda: link.arena_named(promised.arena_id) is None, "unmapping")
    shard.stop(retire=True, timeout_s=10)


def store_and_match(pair: Pair, *, first_id: int) -> int:
    pair.serve(Request(first_id, PROMPT))
    pair.flush()
    return pair.serve(Request(first_id + 1, PROMPT))


def has_registered(shard: Shard) -> bool:
    return any(one["connected"] for one in shard.status().get("replicas", ()))
