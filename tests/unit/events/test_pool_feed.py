"""An engine's events, published and followed, and those of its HTTP server."""

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvray.errors import ConfigError, TransferError
from kvray.events import Event
from kvray.events import pool_feed as http_drain
from kvray.events.native import NativePool
from kvray.events.pool_content import PoolContent, chain_digests
from kvray.events.pool_feed import HttpDrain, PoolFeed
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


class Server(ThreadingHTTPServer):
    answer: tuple[int, str, bytes] = (200, "application/json", b"[]")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        status, kind, body = self.server.answer
        if self.path != "/kv_cache_events":
            status = 404
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def drain(server: Server) -> list[Any]:
    return HttpDrain(f"http://127.0.0.1:{server.server_port}/")()


def test_events_are_taken_as_they_are(server: Server) -> None:
    events = [{"event_id": 0, "data": {"type": "created"}}]
    server.answer = 200, "application/json", json.dumps(events).encode()
    assert drain(server) == events


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, "text/event-stream", b"data: {}\n\n"), "use its ZMQ publisher"),
        ((404, "application/json", b"{}"), "404"),
        ((200, "application/json", b"{}"), "gives dict, no list"),
        ((200, "text/html", b"<html>"), "gives no KV events"),
    ],
)
def test_other_answers_are_told_in_a_sentence(
    server: Server, answer: tuple[int, str, bytes], said: str
) -> None:
    server.answer = answer
    with pytest.raises(TransferError, match=said):
        drain(server)


def test_an_answer_without_end_is_not_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = 200, "application/json", b"[" + b" " * 2**20 + b"]"
    monkeypatch.setattr(http_drain, "_BYTES_MAX", 2**19)
    with pytest.raises(TransferError, match="more than"):
        drain(server)
    monkeypatch.undo()
    monkeypatch.setattr(http_drain, "_TIMEOUT_S", 0.0)
    with pytest.raises(TransferError, match="gives no KV events"):
        drain(server)


def test_a_server_that_is_not_there_is_told_in_a_sentence() -> None:
    with pytest.raises(TransferError, match="gives no KV events"):
        HttpDrain("http://127.0.0.1:9")()
