"""Publishers are followed over real sockets: others', our own, engines, and who means harm.

The seconds of the long ones are `FUZZ_S`, 120 without it.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgpack
import psutil
import pytest
import zmq

from kvray.errors import ConfigError, TransferError
from kvray.events import AllBlocksCleared, Event
from kvray.events import pool_feed as http_drain
from kvray.events import subscriber as subscriber_module
from kvray.events.message import pack_sequence, unpack_sequence
from kvray.events.native import NativePool
from kvray.events.pool_content import PoolContent
from kvray.events.pool_feed import HttpDrain, PoolFeed
from kvray.events.publisher import ZmqPublisher
from kvray.events.subscriber import Source, Subscriber
from tests.kit.web import posts_taken
from tests.unit.events.attacks import ATTACKS, attacked, endless, frame
from tests.unit.events.publisher import Publisher, leading
from tests.unit.events.test_native import BLOCK, Engine, removed, stored
from tests.unit.events.test_publisher import free_port
from tests.waiting import wait_for


class Wire:
    """A publisher's PUB and ROUTER in a thread; `prefix` stands before the number in an answer."""

    def __init__(
        self, publisher: Publisher, ports: tuple[int, int] = (0, 0), prefix: tuple[bytes, ...] = ()
    ) -> None:
        self.publisher = publisher
        self._prefix = prefix
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        ends = (self._live, self._replay)
        for end, port in zip(ends, ports, strict=True):
            end.setsockopt(zmq.LINGER, 0)
            end.bind(f"tcp://127.0.0.1:{port or '*'}")
        endpoints = [end.last_endpoint.decode() for end in ends]
        self.ports = tuple(int(one.rpartition(":")[2]) for one in endpoints)
        self.source = Source(endpoint=endpoints[0], replay_endpoint=endpoints[1])
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def send(self, numbered: tuple[int, bytes]) -> None:
        number, payload = numbered
        self._live.send_multipart([b"topic", pack_sequence(number), payload])

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._live.close()
        self._replay.close()
        self._context.term()

    def _run(self) -> None:
        while not self._is_over.is_set():
            if not self._replay.poll(10):
                continue
            client, empty, start = self._replay.recv_multipart()
            assert empty == b""
            for number, payload in self.publisher.replay(unpack_sequence(start)):
                frames = [client, b"", *self._prefix, pack_sequence(number), payload]
                self._replay.send_multipart(frames)
            self._replay.send_multipart([client, b"", *self._prefix, pack_sequence(-1), b""])


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with closing(Subscriber(blocks_max=1000)) as made:
        yield made


@pytest.fixture
def publisher() -> Publisher:
    return Publisher(log_max=1000, has_snapshot=False)


def has(subscriber: Subscriber, name: str, publisher: Publisher) -> bool:
    content = subscriber.content(name)
    return content is not None and content.is_whole and content.digests == publisher.digests


@pytest.mark.parametrize("prefix", [(), (b"topic",)])
def test_who_comes_late_or_loses_a_batch_has_everything(subscriber, publisher, prefix):
    for token in range(50):
        publisher.store(None, [token, 1])
    with closing(Wire(publisher, prefix=prefix)) as wire:
        subscriber.follow({"a": wire.source})
        wait_for(lambda: has(subscriber, "a", publisher), "all that was before")
        wire.send(publisher.store(None, [99, 1]))
        wait_for(lambda: has(subscriber, "a", publisher), "what came then")
        publisher.store(None, [2, 2])
        wire.send(publisher.store(None, [3, 3]))
        wait_for(lambda: has(subscriber, "a", publisher), "the gap's end")
        assert subscriber.totals()["lost"] == 0


def test_who_cannot_reach_the_port_for_replays_hears_what_happens(
    subscriber, publisher, monkeypatch
):
    monkeypatch.setattr(subscriber_module, "_RECONNECT_MAX_S", 0.1)
    closed = f"tcp://127.0.0.1:{free_port()}"
    with closing(Wire(publisher)) as wire:
        subscriber.follow({"a": Source(endpoint=wire.source.endpoint, replay_endpoint=closed)})

        def is_heard() -> bool:
            wire.send(publisher.store(None, [publisher.number, 1]))
            return bool(content := subscriber.content("a")) and len(content.digests) > 1

        wait_for(is_heard, "a batch")
    wait_for(lambda: not subscriber.content("a").digests, "that an end is noticed")


def test_a_restarted_publisher_has_only_what_it_has_now(subscriber, publisher):
    with closing(Wire(publisher)) as wire:
        subscriber.follow({"a": wire.source})
        publisher.store(None, [1, 1])
        wire.send(publisher.store(None, [2, 2]))
        wait_for(lambda: has(subscriber, "a", publisher), "the first one's blocks")
    again = Publisher(log_max=1000, has_snapshot=False, life=1)
    for token in (7, 8, 9):
        again.store(None, [token, token])
    with closing(Wire(again, ports=wire.ports)):
        wait_for(lambda: has(subscriber, "a", again), "the second's, without a batch of its own")


def test_publishers_are_followed_and_left_and_an_address_that_is_none_harms_nobody(subscriber):
    a, b = (Publisher(log_max=1000, has_snapshot=False) for _ in range(2))
    a.store(None, [0, 5])
    b.store(None, [1, 5])
    with closing(Wire(a)) as wire, closing(Wire(b)) as other:
        bad = Source(endpoint="nowhere")
        subscriber.follow({"bad": bad, "a": wire.source, "b": other.source})
        wait_for(lambda: has(subscriber, "a", a) and has(subscriber, "b", b), "both")
        assert subscriber.content("bad") is None
        subscriber.follow({"b": other.source})
        wait_for(lambda: subscriber.content("a") is None, "that it is left")
        assert has(subscriber, "b", b)


def test_a_publisher_that_never_answers_is_named_once(subscriber, caplog, monkeypatch):
    monkeypatch.setattr("kvray.events.subscriber._RECONNECT_MAX_S", 0.01)
    address = f"tcp://[::1]:{free_port()}"
    subscriber.follow({"a": Source(endpoint=address)})
    wait_for(lambda: address in caplog.text, "a word of it")
    time.sleep(0.1)
    assert caplog.text.count(address) == 1


@pytest.mark.parametrize("ticks", range(5))
def test_an_end_is_not_lost_because_something_has_just_come(ticks):
    async def scene() -> bool:
        ours, theirs = socket.socketpair()
        with closing(ours), closing(theirs):
            ours.setblocking(False)
            wire = subscriber_module.Wire(ours, "SUB", message_max=100)
            wire.flush()
            waits = asyncio.create_task(subscriber_module._is_ready(wire, 30.0))
            await asyncio.sleep(0.01)
            theirs.send(b"x")
            for _ in range(ticks):
                await asyncio.sleep(0)
            was_running = waits.cancel()
            await asyncio.wait({waits})
            return waits.cancelled() or not was_running

    assert asyncio.run(scene())


def test_a_defect_at_one_publisher_costs_no_other(subscriber, publisher, monkeypatch, caplog):
    publisher.store(None, [1, 1])
    hear = subscriber_module._Feed._hear

    async def fail_at_one(feed, wire) -> None:
        if feed.source.topic == "bad":
            raise RuntimeError("a defect")
        await hear(feed, wire)

    monkeypatch.setattr(subscriber_module._Feed, "_hear", fail_at_one)
    with closing(Wire(publisher)) as wire:
        bad = Source(endpoint=wire.source.endpoint, topic="bad")
        subscriber.follow({"bad": bad, "a": wire.source})
        wait_for(lambda: has(subscriber, "a", publisher), "the other's blocks")
        wait_for(lambda: subscriber.content("bad") is None, "that it is left")
    assert caplog.text.count("are followed no longer") == 1


def test_our_own_publisher_is_followed_from_its_snapshot_on(subscriber, monkeypatch):
    monkeypatch.setattr("kvray.events.publisher._START_S", 0.0)
    monkeypatch.setattr("kvray.events.publisher._BATCHES_MAX", 3)
    publisher = Publisher(log_max=1, has_snapshot=False)
    with closing(ZmqPublisher(publisher, first=10**12)) as ours:
        live, replay = ours.bind("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        for token in range(20):
            publisher.store(None, [token, 1])
            ours.publish([publisher.event(token + 1)])
        subscriber.follow({"a": Source(endpoint=live, replay_endpoint=replay)})

        def served() -> bool:
            ours.serve(time.monotonic())
            return has(subscriber, "a", publisher)

        wait_for(served, "the snapshot")
        publisher.store(1, [6, 6])
        ours.publish([publisher.event(21)])
        wait_for(served, "what came then")
        publisher.clear()
        ours.publish([AllBlocksCleared()])
        wait_for(served, "the end of all")


class Buffer:
    """An engine's buffer, which is emptied by being read."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()

    def drain(self) -> list[Any]:
        return [self.waiting.popleft() for _ in range(len(self.waiting))]


@contextlib.contextmanager
def fed(
    subscriber: Subscriber, drain: Callable[[], Any], host: str = "127.0.0.1"
) -> Iterator[PoolFeed]:
    """Have the subscriber follow what a feed says of an engine."""
    with closing(PoolFeed(drain, block_size=BLOCK, host=host)) as feed:
        source = Source(
            endpoint=str(feed.metadata["endpoint"]),
            replay_endpoint=str(feed.metadata["replay_endpoint"]),
        )
        subscriber.follow({"a": source})
        yield feed


def leading_of_a(subscriber: Subscriber, tokens: list[int]) -> int:
    return leading(subscriber.content("a") or PoolContent(blocks_max=1), tokens)


def test_a_subscriber_hears_what_an_engine_stores_and_removes(subscriber):
    engine, buffer = Engine(), Buffer()
    buffer.waiting.append(engine.event(stored([1, 2], [*range(8)])))
    with fed(subscriber, buffer.drain, host="::1"):
        wait_for(lambda: leading_of_a(subscriber, [*range(8)]) == 2, "the first blocks")
        buffer.waiting.append(engine.event(removed(2)))
        wait_for(lambda: leading_of_a(subscriber, [*range(8)]) == 1, "a block's end")
        assert subscriber.content("a").is_whole


def test_lost_events_are_told_of_once(subscriber, caplog):
    engine, buffer = Engine(), Buffer()
    buffer.waiting.append(engine.event(stored([1], [*range(4)])))
    engine.event(removed(1))
    buffer.waiting.append(engine.event(stored([2], [7] * 4)))
    with fed(subscriber, buffer.drain):
        wait_for(lambda: leading_of_a(subscriber, [7] * 4) == 1, "what is known")
        assert leading_of_a(subscriber, [*range(4)]) == 0
    assert caplog.text.count("raise event_buffer_max_size") == 1


def test_events_that_make_no_sense_and_a_defect_do_not_end_it(subscriber, monkeypatch):
    monkeypatch.setattr("kvray.events.pool_feed._AGAIN_S", 0.0)
    engine, buffer, take = Engine(), Buffer(), NativePool.take
    answers: list[Any] = [ValueError("there was no request yet"), 7, None]

    def drain() -> Any:  # which fails, or does not return a list
        answer = answers.pop() if answers else buffer.drain()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fail_once(pool: NativePool, items: list[Any]) -> list[Event]:
        if "defect" in items:
            raise RuntimeError("a defect")
        return take(pool, items)

    monkeypatch.setattr(NativePool, "take", fail_once)
    buffer.waiting += [7, "{", engine.event(stored([2**64], [*range(4)])), {"event_id": []}]
    with fed(subscriber, drain) as feed:
        buffer.waiting.append(engine.event(stored([1], [*range(4)])))
        wait_for(lambda: leading_of_a(subscriber, [*range(4)]) == 1, "what makes sense")
        assert feed.metadata["is_whole"]
        buffer.waiting.append("defect")
        wait_for(lambda: leading_of_a(subscriber, [*range(4)]) == 0, "that it begins again")
        buffer.waiting.append(engine.event(stored([2], [*range(4)])))
        wait_for(lambda: leading_of_a(subscriber, [*range(4)]) == 1, "what came after")
        assert not feed.metadata["is_whole"]


@pytest.mark.parametrize("host", ["192.0.2.1", "10.0..5"])
def test_an_address_of_another_node_or_of_none_is_refused(host):
    with pytest.raises(ConfigError, match="cannot be published"):
        PoolFeed(Buffer().drain, block_size=BLOCK, host=host)


def drained(status: int, kind: str, body: bytes) -> list[Any]:
    """Return what is read of a server that answers so."""

    def answer(path: str, _: bytes) -> tuple[int, str, bytes]:
        return (status if path == "/kv_cache_events" else 404), kind, body

    with posts_taken(answer) as address:
        return HttpDrain(f"{address}/")()


def test_events_are_taken_as_they_are_past_any_proxy_from_a_server_that_is_there(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    events = [{"event_id": 0, "data": {"type": "created"}}]
    assert drained(200, "application/json", json.dumps(events).encode()) == events
    with pytest.raises(TransferError, match="gives no KV events"):
        HttpDrain("http://127.0.0.1:9")()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, "text/event-stream", b"data: {}\n\n"), "use its ZMQ publisher"),
        ((404, "application/json", b"{}"), "404"),
        ((200, "application/json", b"{}"), "gives dict, no list"),
        ((200, "text/html", b"<html>"), "gives no KV events"),
    ],
)
def test_other_answers_are_told_in_a_sentence(answer, said):
    with pytest.raises(TransferError, match=said):
        drained(*answer)


@pytest.mark.parametrize(
    ("name", "most", "said"),
    [("_BYTES_MAX", 2**19, "more than"), ("_TIMEOUT_S", 0.0, "gives no KV events")],
)
def test_an_answer_without_end_is_not_kept(monkeypatch, name, most, said):
    monkeypatch.setattr(http_drain, name, most)
    with pytest.raises(TransferError, match=said):
        drained(200, "application/json", b"[" + b" " * 2**20 + b"]")


FUZZ_S = float(os.environ.get("FUZZ_S", "120"))
SECONDS = [1.5, pytest.param(FUZZ_S, marks=[pytest.mark.long, pytest.mark.timeout(3 * FUZZ_S)])]
GROWTH_MAX = 160 * 2**20


def rounds(seconds: float, what: str) -> Iterator[int]:
    """Yield numbers for a time; at its end this process must have grown little since the third."""
    until, sizes, longest = time.monotonic() + seconds, [], 0.0
    while len(sizes) < 3 or time.monotonic() < until:
        began = time.monotonic()
        yield len(sizes)
        longest = max(longest, time.monotonic() - began)
        sizes.append(psutil.Process().memory_info().rss)
    growth = max(sizes) - sizes[2]
    print(f"{what}: {len(sizes)} rounds, at most {longest:.2f} s, {growth >> 20} MiB more")
    assert growth < GROWTH_MAX


NONSENSE = [
    {"event_id": 0, "data": {"type": "stored", "parent_hash": None, "blocks": [{}]}},
    '{"event_id": 3, "da',
    {"data": 7},
    [[[[[]]]]],
    None,
    7,
]


@pytest.mark.parametrize("what", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("seconds", SECONDS)
def test_an_engines_feed_goes_on_whatever_is_done_to_its_ports(subscriber, what, seconds):
    engine, buffer = Engine(), Buffer()
    with fed(subscriber, buffer.drain) as feed, attacked(seconds, str(feed.metadata[what])):
        for number in rounds(seconds, what):
            prompt = [number % 2**20, number >> 20, 1, 2]
            buffer.waiting.extend(NONSENSE)
            buffer.waiting.append(engine.event(stored([number + 1], prompt)))
            wait_for(lambda prompt=prompt: leading_of_a(subscriber, prompt) == 1, "a block")
            buffer.waiting.append(engine.event(removed(number + 1)))


class Hostile:
    """A publisher that does anything to all who connect, for a moment each, as fast as it can."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._act)
        place = f"tcp://127.0.0.1:{self._server.server_address[1]}"
        self.source = Source(endpoint=place, replay_endpoint=place)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _act(self, peer: socket.socket, *_: object) -> None:
        act = self._rng.choice([endless(batch_of_anything), self._rng.choice(ATTACKS)])
        peer.settimeout(5)
        with contextlib.suppress(OSError):
            act(peer, self._rng, time.monotonic() + self._rng.uniform(0, 1))


def batch_of_anything(rng: random.Random) -> bytes:
    match rng.randrange(5):
        case 0:
            payload = msgpack.packb([1.0, [[]] * rng.choice([10, 10**6])])
        case 1:
            payload = b"\x91" * rng.choice([100, 10**6])
        case 2:
            number = rng.choice([1, 1000, 100_000])
            hashes = [rng.choice([bytes(64), rng.getrandbits(64)]) for _ in range(number)]
            event = ["BlockStored", hashes, None, [1] * (4 * number), 4]
            payload = msgpack.packb([1.0, [event], rng.choice([0, 9])])
        case 3:
            payload = msgpack.packb([1.0, [["BlockRemoved", [rng.randbytes(2**16)] * 9]]])
        case _:
            payload = rng.randbytes(rng.choice([0, 10, 10_000]))
    number = rng.choice([rng.randrange(10), -1, 2**62, 0])
    return frame(1, b"") + frame(1, pack_sequence(number)) + frame(0, payload)


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_publisher_that_sends_anything_without_end_costs_itself(subscriber, publisher, seconds):
    with closing(Wire(publisher)) as wire, closing(Hostile(1)) as hostile:
        subscriber.follow({"a": wire.source, "bad": hostile.source})
        for number in rounds(seconds, "subscriber"):
            wire.send(publisher.store(None, [number % 2**20, 1]))
            if len(publisher.blocks) > 50:
                wire.send(publisher.remove(next(iter(publisher.blocks))))
            wait_for(lambda: has(subscriber, "a", publisher), "what came last")
