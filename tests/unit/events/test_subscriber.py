"""Following publishers over real sockets: those of others, and our own."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from kvray.events import AllBlocksCleared, Event
from kvray.events import subscriber as subscriber_module
from kvray.events.message import pack_sequence, unpack_sequence
from kvray.events.outlet import Outlet
from kvray.events.subscriber import Source, Subscriber
from tests.unit.events.publisher import Publisher
from tests.waiting import wait_for

DEADLINE_S = 20.0


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
        for socket, port in zip((self._live, self._replay), ports, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        endpoints = [socket.last_endpoint.decode() for socket in (self._live, self._replay)]
        self.ports = tuple(int(one.rpartition(":")[2]) for one in endpoints)
        self.source = Source(endpoint=endpoints[0], replay_endpoint=endpoints[1])
        self.num_asked = 0
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
            self.num_asked += 1
            for number, payload in self.publisher.replay(unpack_sequence(start)):
                frames = [client, b"", *self._prefix, pack_sequence(number), payload]
                self._replay.send_multipart(frames)
            self._replay.send_multipart([client, b"", *self._prefix, pack_sequence(-1), b""])


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with closing(Subscriber(blocks_max=100_000)) as made:
        yield made


def has(subscriber: Subscriber, name: str, publisher: Publisher) -> bool:
    content = subscriber.content(name)
    return content is not None and content.is_whole and content.digests == publisher.digests


@pytest.mark.parametrize("prefix", [(), (b"topic",)])
def test_who_comes_late_has_everything_in_either_form_of_answer(
    subscriber: Subscriber, prefix: tuple[bytes, ...]
) -> None:
    publisher = Publisher(log_max=1000, has_snapshot=False)
    for token in range(50):
        publisher.store(None, [token, 1])
    with closing(Wire(publisher, prefix=prefix)) as wire:
        subscriber.follow({"a": wire.source})
        wait_for(lambda: has(subscriber, "a", publisher), "all that was before")
        wire.send(publisher.store(None, [99, 1]))
        wait_for(lambda: has(subscriber, "a", publisher), "what came then")


def test_a_batch_that_is_lost_is_asked_for(subscriber: Subscriber) -> None:
    publisher = Publisher(log_max=1000, has_snapshot=False)
    with closing(Wire(publisher)) as wire:
        subscriber.follow({"a": wire.source})
        wait_for(lambda: wire.num_asked, "the first question")
        first = publisher.store(None, [1, 1])
        wait_for(lambda: wire.send(first) or has(subscriber, "a", publisher), "the connection")
        publisher.store(None, [2, 2])
        wire.send(publisher.store(None, [3, 3]))
        wait_for(lambda: has(subscriber, "a", publisher), "the gap's end")
        assert subscriber.totals()["lost"] == 0


def test_a_restarted_publisher_has_only_what_it_has_now(subscriber: Subscriber) -> None:
    publisher = Publisher(log_max=1000, has_snapshot=False)
    with closing(Wire(publisher)) as wire:
        subscriber.follow({"a": wire.source})
        publisher.store(None, [1, 1])
        wire.send(publisher.store(None, [2, 2]))
        wait_for(lambda: has(subscriber, "a", publisher), "the first one's blocks")
    again = Publisher(log_max=1000, has_snapshot=False, life=1)
    again.store(None, [7, 7])
    again.store(None, [8, 8])
    again.store(None, [9, 9])
    with closing(Wire(again, ports=wire.ports)):
        wait_for(
            lambda: has(subscriber, "a", again), "the second one's, without a batch of its own"
        )


def test_a_publisher_that_is_not_there_yet_is_found(subscriber: Subscriber) -> None:
    publisher = Publisher(log_max=1000, has_snapshot=False)
    with closing(Wire(publisher)) as wire:
        source, ports = wire.source, wire.ports
    subscriber.follow({"a": source})
    publisher.store(None, [1, 1])
    with closing(Wire(publisher, ports=ports)):
        wait_for(lambda: has(subscriber, "a", publisher), "its blocks")


def test_publishers_are_followed_and_left(subscriber: Subscriber) -> None:
    publishers = {name: Publisher(log_max=1000, has_snapshot=False) for name in "ab"}
    for number, one in enumerate(publishers.values()):
        one.store(None, [number, 5])
    with closing(Wire(publishers["a"])) as a, closing(Wire(publishers["b"])) as b:
        subscriber.follow({"a": a.source, "b": b.source})
        for name, one in publishers.items():
            wait_for(lambda name=name, one=one: has(subscriber, name, one), name)
        subscriber.follow({"b": b.source})
        wait_for(lambda: subscriber.content("a") is None, "that it is left")
        assert has(subscriber, "b", publishers["b"])


def test_an_address_that_is_none_harms_nobody(subscriber: Subscriber) -> None:
    publisher = Publisher(log_max=1000, has_snapshot=False)
    publisher.store(None, [1, 1])
    with closing(Wire(publisher)) as wire:
        subscriber.follow({"bad": Source(endpoint="nowhere"), "a": wire.source})
        wait_for(lambda: has(subscriber, "a", publisher), "the other's blocks")
        assert subscriber.content("bad") is None


def test_a_publisher_that_never_answers_is_named_once(
    subscriber: Subscriber, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.events.subscriber._RECONNECT_MAX_S", 0.01)
    address = f"tcp://[::1]:{free_port()}"
    subscriber.follow({"a": Source(endpoint=address)})
    wait_for(lambda: address in caplog.text, "a word of it")
    time.sleep(0.1)
    assert caplog.text.count(address) == 1


def test_a_defect_at_one_publisher_costs_no_other(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(log_max=1000, has_snapshot=False)
    publisher.store(None, [1, 1])
    serve = subscriber_module._Feed.serve

    def fail_at_one(feed, ready, now) -> None:
        if feed.source.topic == "bad":
            raise RuntimeError("a defect")
        serve(feed, ready, now)

    monkeypatch.setattr(subscriber_module._Feed, "serve", fail_at_one)
    with closing(Wire(publisher)) as wire:
        bad = Source(endpoint=wire.source.endpoint, topic="bad")
        subscriber.follow({"bad": bad, "a": wire.source})
        wait_for(lambda: has(subscriber, "a", publisher), "the other's blocks")
        wait_for(lambda: subscriber.content("bad") is None, "that it is left")
    assert caplog.text.count("are followed no longer") == 1


class Held:
    """A publisher's content, as an outlet asks for it."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def num_blocks(self) -> int:
        return len(self._publisher.blocks)

    def page(self, after: int, step: int) -> tuple[list[Event], int | None]:
        blocks = [*self._publisher.blocks]
        more = after + 1 if after + 1 < len(blocks) else None
        return [self._publisher.event(block) for block in blocks[after : after + 1]], more


def test_our_own_publisher_is_followed_from_its_snapshot_on(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.events.outlet._START_S", 0.0)
    monkeypatch.setattr("kvray.events.outlet._BATCHES_MAX", 3)
    publisher = Publisher(log_max=1, has_snapshot=False)
    with closing(Outlet(Held(publisher), first=10**12)) as outlet:
        live, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        outlet.bind(live, replay)
        for token in range(20):
            publisher.store(None, [token, 1])
            outlet.publish([publisher.event(token + 1)])
        subscriber.follow({"a": Source(endpoint=live, replay_endpoint=replay)})

        def served() -> bool:
            outlet.serve(time.monotonic())
            return has(subscriber, "a", publisher)

        wait_for(served, "the snapshot")
        publisher.store(1, [6, 6])
        outlet.publish([publisher.event(21)])
        wait_for(served, "what came then")
        publisher.clear()
        outlet.publish([AllBlocksCleared()])
        wait_for(served, "the end of all")


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.PUB) as probe:
        return probe.bind_to_random_port("tcp://127.0.0.1")
