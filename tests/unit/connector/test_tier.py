"""Tiers that come late, go early and come back: the engine goes on, and joins what is there."""

import time
from collections.abc import Iterator

import pytest

from kvray.node import link as link_module
from tests.kit.connector import HIT, PROMPT, Pair, Request
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


@pytest.fixture
def joined(tier: Tier, pair: Pair) -> Pair:
    pair.wait_for_arena()
    return pair


def test_an_engine_that_started_before_its_tier_joins_it(make_pair, caplog):
    pair = make_pair()
    assert pair.serve(Request(1, PROMPT)) == 0
    assert pair.totals["miss_tokens_store_down"] == HIT
    assert "goes on without" in caplog.text
    tier = Tier()
    pair.wait_for_arena()
    tier.wait_for_engine()
    pair.store(PROMPT)
    assert pair.serve(Request(2, PROMPT)) == HIT
    tier.stop()


def test_an_engine_outlives_its_tier_and_joins_the_next(tier, joined):
    joined.store(PROMPT)
    assert joined.serve(Request(2, PROMPT)) == HIT
    tier.stop()
    assert joined.serve(Request(10, PROMPT)) == 0
    tier.start()
    joined.wait_for_arena()
    joined.store(PROMPT)
    assert joined.serve(Request(20, PROMPT)) == HIT


def test_a_shard_that_starts_again_is_not_even_noticed(tier, joined):
    joined.store(PROMPT)
    assert joined.serve(Request(2, PROMPT)) == HIT
    tier.stop(retire=False)
    assert joined.serve(Request(10, PROMPT)) == HIT
    tier.start()
    assert joined.serve(Request(11, PROMPT)) == HIT
    tier.wait_for_engine()


@pytest.mark.parametrize("times", [1, 2])
def test_a_promise_is_kept_however_often_the_tier_is_replaced_before_its_load(
    tier, joined, monkeypatch, times
):
    if times == 2:
        monkeypatch.setattr(link_module, "_PREVIOUS_S", 0.0)
    joined.store(PROMPT)
    promised = joined.arena
    request = Request(2, PROMPT)
    assert joined.query(request) == HIT
    for _ in range(times):
        tier.replace()
        joined.wait_for_arena()
    time.sleep(0.1)
    joined.plan(request)
    joined.worker.start_load_kv(None)
    joined.check(request)
    joined.compute(request)
    assert joined.serve(Request(3, PROMPT)) == 0
    if times == 2:
        link = joined.engine.link
        wait_for(lambda: link.arena_named(promised.arena_id) is None, "unmapping")
