"""Tiers that come late, go early and come back: the engine goes on, and joins what is there."""

import time
from collections.abc import Iterator

import pytest

from kvray.node import link as link_module
from tests.kit.connector import HIT, PROMPT, Request
from tests.kit.tier import Tier
from tests.waiting import wait_for


@pytest.fixture
def shard(environment: dict[str, str]) -> None:
    """None that all tests share."""


@pytest.fixture
def tier(shard: None) -> Iterator[Tier]:
    made = Tier()
    yield made
    made.stop()


def test_an_engine_joins_each_tier_that_comes_and_notices_no_restart(make_pair, caplog):
    pair = make_pair()
    assert pair.serve(Request(1, PROMPT)) == 0
    assert pair.totals["miss_tokens_store_down"] == HIT
    assert "goes on without" in caplog.text
    for request_id in (10, 20):
        tier = Tier()
        pair.wait_for_arena()
        pair.store(PROMPT)
        tier.stop(retire=False)
        assert pair.serve(Request(request_id, PROMPT)) == HIT
        tier.start()
        tier.wait_for_engine()
        assert pair.serve(Request(request_id + 1, PROMPT)) == HIT
        tier.stop()
        assert pair.serve(Request(request_id + 2, PROMPT)) == 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_promise_is_kept_however_often_the_tier_is_replaced(tier, pair, monkeypatch, times):
    if times == 2:
        monkeypatch.setattr(link_module, "_PREVIOUS_S", 0.0)
    request = Request(2, PROMPT)
    pair.wait_for_arena()
    pair.store(PROMPT)
    promised, link = pair.arena, pair.engine.link
    assert pair.query(request) == HIT
    for _ in range(times):
        tier.replace()
        pair.wait_for_arena()
    time.sleep(0.1)
    pair.plan(request)
    pair.worker.start_load_kv(None)
    pair.check(request)
    pair.compute(request)
    assert pair.serve(Request(3, PROMPT)) == 0
    if times == 2:
        wait_for(lambda: link.arena_named(promised.arena_id) is None, "unmapping")
