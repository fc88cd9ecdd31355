"""The feed of an engine and the subscriber of a router, each beside a peer that means harm.

The seconds of the long ones are `FUZZ_S`, 600 without it.
"""

import contextlib
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgpack
import psutil
import pytest

from kvray.events.message import pack_sequence
from kvray.events.pool_feed import PoolFeed
from kvray.events.subscriber import Source, Subscriber
from tests.unit.events.attacks import GREETING, READY, attacked, frame
from tests.unit.events.publisher import Publisher
from tests.unit.events.test_native import BLOCK, Engine, removed, stored
from tests.unit.events.test_pool_feed import Buffer, leading, source
from tests.unit.events.test_subscriber import Wire, has

FUZZ_S = float(os.environ.get("FUZZ_S", "600"))
SECONDS = [1.5, pytest.param(FUZZ_S, marks=[pytest.mark.long, pytest.mark.timeout(3 * FUZZ_S)])]
PATIENCE_S = 100.0
GROWTH_MAX = 160 * 2**20


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: it did not happen"
        time.sleep(0.005)


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with closing(Subscriber(blocks_max=1000)) as made:
        yield made


class Memory:
    """How much this process has grown since its third look."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._sizes: list[int] = []

    def look(self) -> None:
        self._sizes.append(self._process.memory_info().rss)

    @property
    def growth(self) -> int:
        return max(self._sizes) - self._sizes[min(2, len(self._sizes) - 1)]


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
def test_an_engines_feed_goes_on_whatever_is_done_to_its_ports(
    subscriber: Subscriber, what: str, seconds: float
) -> None:
    engine, buffer, memory = Engine(), Buffer(), Memory()
    with closing(PoolFeed(buffer.drain, block_size=BLOCK, host="127.0.0.1")) as feed:
        subscriber.follow({"a": source(feed)})
        with attacked(seconds, str(feed.metadata[what])):
            until, rounds, longest = time.monotonic() + seconds, 0, 0.0
            while rounds < 3 or time.monotonic() < until:
                began = time.monotonic()
                prompt = [rounds % 2**20, rounds >> 20, 1, 2]
                buffer.waiting.extend(NONSENSE)
                buffer.waiting.append(engine.event(stored([rounds + 1], prompt)))
                wait_for(lambda prompt=prompt: leading(subscriber, prompt) == 1, "a block")
                buffer.waiting.append(engine.event(removed(rounds + 1)))
                rounds += 1
                longest = max(longest, time.monotonic() - began)
                memory.look()
    print(f"feed, {what}: {rounds} rounds, at most {longest:.2f} s, {memory.growth >> 20} MiB more")
    assert memory.growth < GROWTH_MAX


class Hostile:
    """A publisher that sends whatever it likes, to all who connect, as fast as it can."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.source = Source(
            endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=f"tcp://127.0.0.1:{port}"
        )
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        peers: dict[socket.socket, bytes] = {}
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ)
        while not self._is_over.is_set():
            for key, _ in selector.select(0.05):
                if key.fileobj is self._listener:
                    peer, _ = self._listener.accept()
                    peer.setblocking(False)
                    peers[peer] = GREETING + READY
                    selector.register(peer, selectors.EVENT_WRITE)
                    continue
                peer = key.fileobj
                try:
                    with contextlib.suppress(BlockingIOError):
                        while len(peer.recv(2**16)) == 2**16:
                            pass
                    sent = peer.send(peers[peer])
                    self.num_bytes += sent
                    peers[peer] = peers[peer][sent:] or self._something()
                except OSError:
                    selector.unregister(peer)
                    peer.close()
                    del peers[peer]
        for peer in peers:
            peer.close()
        selector.close()

    def _something(self) -> bytes:
        """Return messages, or parts of such."""
        rng = self._rng
        match rng.randrange(8):
            case 0:
                return frame(1, rng.randbytes(rng.choice([0, 1000]))) * 1000
            case 1:
                return b"\x02" + rng.choice([2**62, 2**24, 2**22]).to_bytes(8, "big") + bytes(2**20)
            case 2:
                return frame(4, b"\x04PING\x00\x01" + rng.randbytes(16)) * 1000
            case 3:
                payload = msgpack.packb([1.0, [[]] * rng.choice([10, 10**6])])
            case 4:
                payload = b"\x91" * rng.choice([100, 10**6])
            case 5:
                number = rng.choice([1, 1000, 100_000])
                hashes = [rng.choice([bytes(64), rng.getrandbits(64)]) for _ in range(number)]
                payload = msgpack.packb(
                    [
                        1.0,
                        [["BlockStored", hashes, None, [1] * (4 * number), 4]],
                        rng.choice([0, 9]),
                    ]
                )
            case 6:
                payload = msgpack.packb([1.0, [["BlockRemoved", [rng.randbytes(2**16)] * 9]]])
            case _:
                payload = rng.randbytes(rng.choice([0, 10, 10_000]))
        number = rng.choice([rng.randrange(10), -1, 2**62, 0])
        return frame(1, b"") + frame(1, pack_sequence(number)) + frame(0, payload)


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_publisher_that_sends_anything_without_end_costs_itself(
    subscriber: Subscriber, seconds: float
) -> None:
    publisher, memory = Publisher(log_max=1000, has_snapshot=False), Memory()
    with closing(Wire(publisher)) as wire, closing(Hostile(1)) as hostile:
        subscriber.follow({"a": wire.source, "bad": hostile.source})
        until, rounds, longest = time.monotonic() + seconds, 0, 0.0
        while rounds < 3 or time.monotonic() < until:
            began = time.monotonic()
            wire.send(publisher.store(None, [rounds % 2**20, 1]))
            if len(publisher.blocks) > 50:
                wire.send(publisher.remove(next(iter(publisher.blocks))))
            wait_for(lambda: has(subscriber, "a", publisher), "what came last")
            rounds += 1
            longest = max(longest, time.monotonic() - began)
            memory.look()
        taken = hostile.num_bytes
    print(
        f"subscriber: {rounds} rounds, at most {longest:.2f} s, {memory.growth >> 20} MiB more,"
        f" {taken >> 20} MiB of the other's"
    )
    assert memory.growth < GROWTH_MAX
