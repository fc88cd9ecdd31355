"""An engine's events, published and followed."""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvray.errors import ConfigError
from kvray.events import Event
from kvray.events.native import NativePool
from kvray.events.pool_content import PoolContent, chain_digests
from kvray.events.pool_feed import PoolFeed
from kvray.events.subscriber import Source, Subscriber
from tests.unit.events.publisher import packed
from tests.unit.events.test_native import BLOCK, Engine, removed, stored
from tests.waiting import wait_for


class Buffer:
    """An engine's buffer, which is emptied by being read."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()
        self.is_up = True

    def drain(self) -> list[Any]:
        if not self.is_up:
            raise RuntimeError("there was no request yet")
        return [self.waiting.popleft() for _ in range(len(self.waiting))]


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with closing(Subscriber(blocks_max=1000)) as made:
        yield made


def source(feed: PoolFeed) -> Source:
    return Source(
        endpoint=str(feed.metadata["endpoint"]),
        replay_endpoint=str(feed.metadata["replay_endpoint"]),
    )


def leading(subscriber: Subscriber, tokens: list[int]) -> int:
    content = subscriber.content("a") or PoolContent(blocks_max=1)
    digests = {BLOCK: chain_digests(packed(tokens), block_size=BLOCK)}
    return content.num_tokens(digests) // BLOCK


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_subscriber_hears_what_an_engine_stores_and_removes(
    subscriber: Subscriber, host: str
) -> None:
    engine, buffer = Engine(), Buffer()
    buffer.is_up = False
    buffer.waiting.append(engine.event(stored([1, 2], [*range(8)])))
    with closing(PoolFeed(buffer.drain, block_size=BLOCK, host=host)) as feed:
        subscriber.follow({"a": source(feed)})
        buffer.is_up = True
        wait_for(lambda: leading(subscriber, [*range(8)]) == 2, "the first blocks")
        buffer.waiting.append(engine.event(removed(2)))
        wait_for(lambda: leading(subscriber, [*range(8)]) == 1, "a block's end")
        content = subscriber.content("a")
        assert content is not None
        assert content.is_whole


def test_lost_events_are_told_of_once(
    subscriber: Subscriber, caplog: pytest.LogCaptureFixture
) -> None:
    engine, buffer = Engine(), Buffer()
    buffer.waiting.append(engine.event(stored([1], [*range(4)])))
    engine.event(removed(1))
    buffer.waiting.append(engine.event(stored([2], [7] * 4)))
    with closing(PoolFeed(buffer.drain, block_size=BLOCK, host="127.0.0.1")) as feed:
        subscriber.follow({"a": source(feed)})
        wait_for(lambda: leading(subscriber, [7] * 4) == 1, "what is known")
        assert leading(subscriber, [*range(4)]) == 0
    assert caplog.text.count("raise event_buffer_max_size") == 1


def test_events_that_make_no_sense_and_a_defect_do_not_end_it(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.events.pool_feed._AGAIN_S", 0.0)
    engine, buffer, take = Engine(), Buffer(), NativePool.take
    answers: list[Any] = [7, None]

    def drain() -> Any:  # which does not always return a list
        return answers.pop() if answers else buffer.drain()

    def fail_once(pool: NativePool, items: list[Any]) -> list[Event]:
        if "defect" in items:
            raise RuntimeError("a defect")
        return take(pool, items)

    monkeypatch.setattr(NativePool, "take", fail_once)
    buffer.waiting += [7, "{", engine.event(stored([2**64], [*range(4)])), {"event_id": []}]
    with closing(PoolFeed(drain, block_size=BLOCK, host="127.0.0.1")) as feed:
        subscriber.follow({"a": source(feed)})
        buffer.waiting.append(engine.event(stored([1], [*range(4)])))
        wait_for(lambda: leading(subscriber, [*range(4)]) == 1, "what makes sense")
        buffer.waiting.append("defect")
        wait_for(lambda: leading(subscriber, [*range(4)]) == 0, "that it begins again")
        buffer.waiting.append(engine.event(stored([2], [*range(4)])))
        wait_for(lambda: leading(subscriber, [*range(4)]) == 1, "what came after")


def test_an_address_of_another_node_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be published"):
        PoolFeed(Buffer().drain, block_size=BLOCK, host="192.0.2.1")
