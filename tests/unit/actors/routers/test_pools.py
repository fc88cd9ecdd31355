"""What routers know of engines' own pools, from real publishers."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvray.actors.routers.pools import EVENTS_STAT, Pools
from kvray.events.pool_feed import PoolFeed
from kvray.routing import PoolMatch
from tests.unit.events.test_following import Buffer
from tests.unit.events.test_native import BLOCK, Engine, removed, stored
from tests.waiting import wait_for

PROMPT = [*range(10)]


@pytest.fixture
def pools() -> Iterator[Pools]:
    with closing(Pools()) as made:
        yield made


def sure(num_tokens: int) -> dict[str, PoolMatch]:
    return {"a": PoolMatch(num_tokens=num_tokens, is_sure=True)}


def test_a_prompt_is_found_where_its_engine_tells_of_it_and_a_salt_makes_a_match_unsure(pools):
    buffer, engine = Buffer(), Engine()
    with closing(PoolFeed(buffer.drain, block_size=BLOCK, host="127.0.0.1")) as feed:
        pools.follow({"a": {EVENTS_STAT: feed.metadata}, "b": {}})
        buffer.waiting.append(engine.event(stored([1, 2], PROMPT[:8])))
        wait_for(lambda: pools.match(PROMPT) == sure(8), "the first blocks")
        buffer.waiting.append(engine.event(removed(2)))
        wait_for(lambda: pools.match(PROMPT) == sure(4), "an eviction")
        assert pools.match([9, *PROMPT]) == sure(0)
        for salt in ("s", "\ud800"):  # which JSON can carry
            assert pools.match(PROMPT, salt=salt) == {"a": PoolMatch(num_tokens=0, is_sure=False)}
        assert pools.match(PROMPT, lora="/a") == pools.match(PROMPT, salt=3) == {}
        assert pools.match([2**40]) == {}
        assert pools.totals()["pool_event_batches_total", ("applied",)] >= 2
        pools.follow({"b": {}})
        assert pools.match(PROMPT) == {}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_pool_whose_engine_lost_events_is_not_sure(pools, is_late):
    buffer, engine = Buffer(), Engine()
    if is_late:
        engine.event(stored([1], PROMPT[:4]))  # before anybody read
    with closing(PoolFeed(buffer.drain, block_size=BLOCK, host="127.0.0.1")) as feed:
        pools.follow({"a": {EVENTS_STAT: feed.metadata}})
        if not is_late:
            buffer.waiting.append(engine.event(stored([1], PROMPT[:4])))
            wait_for(lambda: pools.match(PROMPT) == sure(4), "the first block")
            engine.event(stored([2], [7] * 4))
        buffer.waiting.append(engine.event(stored([3], [8] * 4)))
        came = PoolMatch(num_tokens=4, is_sure=False)
        wait_for(lambda: pools.match([8] * 5).get("a") == came, "what came after")
        pools.follow({"a": {EVENTS_STAT: {**feed.metadata}}})
        assert pools.match(PROMPT) == {"a": PoolMatch(num_tokens=0, is_sure=False)}


@pytest.mark.parametrize("told", [7, {"replay_endpoint": "tcp://127.0.0.1:1"}, ["endpoint"]])
def test_an_address_in_another_form_is_said_once(pools, told, caplog):
    for _ in range(2):
        pools.follow({"a": {EVENTS_STAT: told}})
    assert pools.match(PROMPT) == {}
    assert caplog.text.count("in a form that is not read") == 1
