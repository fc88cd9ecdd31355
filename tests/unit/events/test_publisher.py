"""Publishing KV events, heard by a subscriber that knows nothing of kvray; batches for replays."""

import contextlib
import socket
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.errors import ConfigError
from kvray.events import BlockRemoved, BlockStored
from kvray.events import publisher as publisher_module
from kvray.events.message import pack_sequence
from kvray.events.native import EventLog
from kvray.events.publisher import BATCH_BLOCKS, ZmqPublisher
from kvray.events.zmtp import parse_endpoint
from tests.examples import examples
from tests.kv_subscriber import KvSubscriber
from tests.unit.events.attacks import GREETING, READY, frame

FIRST = 10**12
FREE = "tcp://127.0.0.1:*"


def stored(block: int) -> BlockStored:
    return BlockStored(
        block_hashes=[block],
        parent_block_hash=block - 1 if block % 8 else None,
        token_ids=[block, 2 * block],
        block_size=2,
        medium="CPU",
    )


class Held:
    def __init__(self, blocks=()) -> None:
        self.blocks = dict.fromkeys(blocks)

    def num_blocks(self) -> int:
        return len(self.blocks)

    def page(self, after: int, step: int):
        """The place is the number of the block before, as blocks are stored in their order."""
        ahead = sorted(block for block in self.blocks if block >= after)
        end = ahead[step] if step < len(ahead) else None
        return [stored(block) for block in ahead[:step]], end


class Publisher:
    """A publisher in a thread of its own, as it is used."""

    def __init__(self, *blocks: int, first: int = FIRST, port: int | str = "*") -> None:
        self.held = Held(blocks)
        self.publisher = ZmqPublisher(self.held, first=first)
        self.live, self.replay = self.publisher.bind(f"tcp://127.0.0.1:{port}", FREE)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self._is_over.set()
        self._thread.join()
        self.publisher.close()

    def store(self, block: int) -> None:
        with self._lock:
            self.held.blocks[block] = None
            self.publisher.publish([stored(block)])

    def remove(self, block: int) -> None:
        with self._lock:
            self.held.blocks.pop(block, None)
            self.publisher.publish([BlockRemoved(block_hashes=[block], medium="CPU")])

    def _run(self) -> None:
        while not self._is_over.wait(0.002):
            with self._lock:
                self.publisher.serve(time.monotonic())


def free_port() -> int:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


@contextmanager
def connected():
    """Have a publisher, and a subscriber that takes replays and has heard something."""
    with Publisher() as publisher, KvSubscriber(publisher.live, publisher.replay) as subscriber:
        subscriber.read_until(lambda one: one.num_batches)
        yield publisher, subscriber


def has(*blocks: int):
    return lambda subscriber: set(subscriber.content["CPU"]) == set(blocks)


def test_a_client_that_asks_by_a_plain_request_gets_two_frames_a_batch():
    with Publisher(1, 2) as publisher, zmq.Context() as context:
        with context.socket(zmq.REQ) as client:
            client.connect(publisher.replay)
            client.send((0).to_bytes(8, "big"))
            assert client.poll(5000)
            number, payload = client.recv_multipart()
            assert int.from_bytes(number, "big") < FIRST
            assert payload


def test_a_replay_of_batches_that_are_kept_is_those_batches():
    with connected() as (publisher, subscriber):
        for block in range(20):
            publisher.store(block)
        last = publisher.publisher.last
        assert subscriber.replay(last - 4) == [*range(last - 4, last + 1)]
        assert set(subscriber.content["CPU"]) == {15, 16, 17, 18, 19}
        assert subscriber.replay(last + 100) == []


def test_a_replay_of_batches_that_are_gone_is_a_snapshot_whose_numbers_ascend(monkeypatch):
    monkeypatch.setattr(publisher_module, "_BATCHES_MAX", 5)
    with connected() as (publisher, subscriber):
        for block in range(600):
            publisher.store(block)
        publisher.remove(7)
        last = publisher.publisher.last
        numbers = subscriber.replay(last - 50)
        assert numbers[0] == last - 50
        assert numbers == sorted(set(numbers))
        assert last in numbers
        assert set(subscriber.content["CPU"]) == set(range(600)) - {7}


def test_a_replay_without_room_for_numbers_is_one_batch(monkeypatch):
    monkeypatch.setattr(publisher_module, "_BATCHES_MAX", 1)
    with Publisher(*range(500)) as publisher:
        publisher.store(500)
        publisher.store(501)
        with KvSubscriber(publisher.live, publisher.replay) as subscriber:
            last = publisher.publisher.last
            numbers = subscriber.replay(last - 1)
            assert sum(number <= last for number in numbers) <= 2
            assert set(subscriber.content["CPU"]) == set(range(502))


def test_a_subscriber_without_replays_gets_everything_and_loses_what_a_later_run_lacks():
    blocks, port = range(300), free_port()
    with Publisher(*blocks, port=port) as publisher:
        plain = KvSubscriber(publisher.live)
        plain.read_until(has(*blocks))
    with plain, Publisher(3, 4, port=port, first=FIRST + 1000):
        plain.read_until(has(3, 4))


def test_clients_that_do_not_read_their_replays_hold_nobody_up():
    blocks = range(100 * BATCH_BLOCKS)
    with Publisher(*blocks) as publisher, zmq.Context() as context, ExitStack() as stack:
        for _ in range(30):
            stuck = stack.enter_context(context.socket(zmq.DEALER))
            stuck.set_hwm(1)
            stuck.connect(publisher.replay)
            for _ in range(3):
                stuck.send_multipart([b"", (0).to_bytes(8, "big")])
        with KvSubscriber(publisher.live, publisher.replay) as subscriber:
            subscriber.take()
            assert (subscriber.num_gaps, len(subscriber.content["CPU"])) == (1, len(blocks))
            publisher.store(10**6)
            subscriber.read_until(lambda one: 10**6 in one.content["CPU"])


@pytest.mark.parametrize(
    "request_frames", [[b""], [b"", b"123"], [b"", b"", b"", b"x" * 8], [b"x" * 9], [b""] * 5]
)
def test_other_requests_are_passed_over(request_frames):
    with Publisher(1) as publisher, zmq.Context() as context:
        with context.socket(zmq.DEALER) as client:
            client.connect(publisher.replay)
            client.send_multipart(request_frames)
            assert not client.poll(100)
        with KvSubscriber(publisher.live, publisher.replay) as subscriber:
            assert subscriber.replay(0)


def test_an_address_that_is_taken_is_named():
    with Publisher() as publisher, closing(ZmqPublisher(Held(), first=1)) as other:
        with pytest.raises(ConfigError, match=publisher.live):
            other.bind(publisher.live, FREE)
        with pytest.raises(ConfigError, match=publisher.replay):
            other.bind(FREE, publisher.replay)
        other.bind(FREE, FREE)


STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "remove"]), st.integers(0, 30))
    | st.tuples(st.just("lose"), st.integers(1, 4)),
    max_size=30,
)


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(1, 6))
def test_however_many_batches_are_lost_a_replay_gives_the_content(monkeypatch, steps, kept):
    monkeypatch.setattr(publisher_module, "_BATCHES_MAX", kept)
    with connected() as (publisher, subscriber):
        for step, number in steps:
            if step != "lose":
                getattr(publisher, step)(number)
                continue
            for _ in range(number):
                if subscriber._live.poll(20):
                    subscriber._live.recv_multipart()
        subscriber.replay(subscriber.last + 1)
        subscriber.read(0.05)
        assert set(subscriber.content["CPU"]) == set(publisher.held.blocks)


class Still:
    """A publisher whose time the test says, and clients that are plain sockets."""

    def __init__(self, blocks=()) -> None:
        self.held = Held(blocks)
        self.publisher = ZmqPublisher(self.held, first=FIRST)
        bound = self.publisher.bind(FREE, FREE)
        self.places = dict(zip(("live", "replay"), map(parse_endpoint, bound), strict=True))
        self.now = 10.0**6
        self.peers = []

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.publisher.close()

    def join(self, port: str = "live", says: bytes = GREETING + READY):
        """Return a client that is connected and has been heard."""
        peer = socket.create_connection(self.places[port])
        peer.setblocking(False)
        peer.sendall(says)
        self.peers.append(peer)
        self.serve()
        return peer

    def serve(self, rounds: int = 3, step_s: float = 0.05) -> None:
        for _ in range(rounds):
            self.now += step_s
            time.sleep(0.001)  # what was sent is there in the next round
            self.publisher.serve(self.now)

    def drain(self, peer) -> bytes:
        """Return all that a client gets."""
        found, idle = b"", 0
        while idle < 3:
            self.serve(1)
            try:
                came = peer.recv(2**20)
            except BlockingIOError:
                idle += 1
                continue
            if not came:
                break
            found, idle = found + came, 0
        return found

    def is_there(self, peer) -> bool:
        """Return whether the publisher has not hung up on a client."""
        with contextlib.suppress(BlockingIOError):
            while peer.recv(2**20):
                pass
            return False
        return True


@pytest.fixture
def still(monkeypatch):
    monkeypatch.setattr(publisher_module, "_START_S", 0.0)
    with closing(Still(range(1000))) as made:
        made.publisher._start_until = 0.0
        yield made


HELLO = GREETING + READY
SUBSCRIBED = HELLO + frame(0, b"\x01")


def test_a_hundred_subscriptions_are_greeted_with_one_batch(still):
    peers = [still.join() for _ in range(20)]
    before = still.publisher.last
    for peer in peers:
        peer.sendall(frame(0, b"\x01") + frame(0, b"\x00") + frame(0, b"\x01"))
    still.serve(1)
    still.serve(1, step_s=1.0)
    pages = -(-1000 // BATCH_BLOCKS)
    assert still.publisher.last - before <= 3 + pages


def test_who_says_too_much_is_read_later(still):
    peer = still.join()
    ping = frame(4, b"\x04PING\x00\x01" + bytes(16))
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 2**20:
            sent += peer.send(ping * 100)
    (client,) = still.publisher._clients
    still.serve(200, step_s=0.0)
    still.drain(peer)
    assert client.read_until - still.now <= 5.0, "at most what was saved up"
    assert client in still.publisher._unread
    assert not client.waits_for
    still.serve(1, step_s=2.0)
    assert client.waits_for, "it is read again"
    assert still.is_there(peer)


def test_of_a_client_that_reads_nothing_nothing_more_is_kept(still):
    peer = still.join("replay")
    peer.sendall((frame(1, b"") + frame(0, bytes(8))) * 20)
    still.join(says=SUBSCRIBED)
    for _ in range(500):
        still.publisher._log.add(bytes(2**16))
        still.publisher.serve(still.now)
    assert sum(client.wire.is_sending for client in still.publisher._clients)
    for client in still.publisher._clients:
        assert len(client.wire._out) <= 2 * 3, "one message, in pieces"
        assert len(client.wire._received) < 2048


@pytest.fixture
def crowded(still):
    still.publisher._places = 3
    return still


@pytest.mark.parametrize(
    ("port", "say", "are_there"),
    [  # one that has not said what it is, the same on the other port, one that has not subscribed
        ("live", [SUBSCRIBED, SUBSCRIBED, GREETING[:20], SUBSCRIBED], [True, True, False, True]),
        ("replay", [HELLO, HELLO, GREETING[:20], HELLO], [True, True, False, True]),
        ("live", [HELLO, SUBSCRIBED, SUBSCRIBED, SUBSCRIBED], [False, True, True, True]),
    ],
)
def test_a_newcomer_gets_the_place_of_one_that_says_less(crowded, port, say, are_there):
    peers = [crowded.join(port, says) for says in say]
    assert [*map(crowded.is_there, peers)] == are_there


def test_a_newcomer_gets_the_place_of_the_one_that_reads_least(crowded):
    stuck = crowded.join(says=SUBSCRIBED)
    crowded.serve()
    big = [stored(block) for block in range(2000)]
    (client,) = crowded.publisher._clients
    while not client.wire.is_sending:
        crowded.publisher.publish(big)
        crowded.serve(1)
    first, second = (crowded.join(says=SUBSCRIBED) for _ in range(2))
    crowded.drain(first), crowded.drain(second)
    third = crowded.join(says=SUBSCRIBED)
    assert [*map(crowded.is_there, (first, second, third))] == [True] * 3
    assert client not in crowded.publisher._clients
    assert stuck


def test_who_has_hung_up_keeps_no_place_though_not_all_it_said_has_been_read(crowded):
    waits = crowded.join("replay")
    for _ in range(2):
        peer = crowded.join("replay")
        with contextlib.suppress(BlockingIOError):
            while True:
                peer.send(frame(0, b"no number") * 100)
        crowded.serve(50, step_s=0.0)
        peer.close()
    assert len(crowded.publisher._unread) == 2
    newcomer = crowded.join("replay")
    assert [*map(crowded.is_there, (waits, newcomer))] == [True, True]
    assert len(crowded.publisher._clients) == 2


def test_clients_of_one_port_take_no_places_of_the_other_and_silent_ones_none_for_long(crowded):
    quiet = crowded.join()
    for _ in range(9):
        crowded.join("replay")
    silent = crowded.join(says=b"")
    crowded.serve(1, step_s=20.0)
    assert [*map(crowded.is_there, (quiet, silent))] == [True, False]


ASKS = frame(1, b"") + frame(0, bytes(8))
END = frame(1, pack_sequence(-1)) + frame(0, b"")


def test_a_replay_that_nobody_takes_holds_nobody_up_and_ends(still):
    # More than fits between two ends of a connection.
    large = replace(stored(1), token_ids=[1] * 1000)
    still.held.blocks = dict.fromkeys(range(10_000))
    still.held.page = lambda after, step: (
        [large] * step,
        after + step if after < 10_000 else None,
    )
    still.publisher.publish([])
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.connect(still.places["replay"])
    still.peers.append(stuck)
    stuck.sendall(HELLO + ASKS)
    while not any(one.wire.is_sending for one in still.publisher._replays):
        still.serve(1)
    (client,) = still.publisher._replays
    second = still.join("replay", says=HELLO + ASKS)
    assert still.drain(second).endswith(END)
    assert client in still.publisher._clients
    still.serve(2, step_s=61.0)
    assert client not in still.publisher._clients


def test_replays_take_turns_whatever_each_has_got_before(still):
    still.publisher.publish([])
    peer = still.join("replay", says=HELLO + ASKS)
    (old,) = still.publisher._clients
    for _ in range(20):
        still.drain(peer)
        peer.sendall(ASKS)
    still.drain(peer)
    for _ in range(40):
        still.publisher.publish([])
    for _ in range(3):
        still.join("replay")
    for client in still.publisher._clients - {old}:
        still.publisher._take_question(client, [b"", bytes(8)])
    still.publisher._take_question(old, [b"", pack_sequence(still.publisher.last)])
    still.serve(1)
    assert old.replay is None, "it has got all of it"
    assert len(still.publisher._replays) == 3


def test_who_asks_again_before_its_turn_keeps_its_place_in_the_row(still):
    still.publisher.publish([])
    for _ in range(2):
        still.join("replay")
    first, second = still.publisher._clients
    for client in (first, second, first):
        still.publisher._take_question(client, [b"", bytes(8)])
    assert first.turn < second.turn


def test_replays_side_by_side_share_what_is_made_for_them(still):
    asked = []
    page = still.held.page
    still.held.page = lambda after, step: asked.append(after) or page(after, step)
    still.publisher.publish([])
    asks = HELLO + ASKS
    peers = [still.join("replay", says=asks) for _ in range(5)]
    for peer in peers:
        still.drain(peer)
    assert len(asked) == len(set(asked)) == -(-1000 // BATCH_BLOCKS)
    still.publisher.publish([])
    late = still.join("replay", says=asks)
    still.drain(late)
    assert len(asked) > len(set(asked)), "what is older than the last batch is made again"


@given(
    st.integers(0, 2**62), st.integers(1, 5), st.integers(1, 40), st.lists(st.binary(max_size=20))
)
def test_the_latest_batches_are_kept_within_the_bounds(first, batches_max, bytes_max, payloads):
    log = EventLog(first, batches_max=batches_max, bytes_max=bytes_max)
    assert (log.oldest, log.last) == (first, first - 1)
    numbers = [log.add(payload) for payload in payloads]
    assert numbers == list(range(first, first + len(payloads)))
    assert log.last == first + len(payloads) - 1
    kept = [log[number] for number in range(log.oldest, log.last + 1)]
    assert kept == payloads[len(payloads) - len(kept) :]
    assert len(kept) <= batches_max
    assert sum(map(len, kept)) <= bytes_max
    if len(kept) < min(len(payloads), batches_max):
        assert sum(map(len, kept)) + len(payloads[len(payloads) - len(kept) - 1]) > bytes_max
