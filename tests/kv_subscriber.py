"""A subscriber of KV events in the format's own words: pyzmq, msgpack and nothing of kvray's."""

import time
from collections import defaultdict

import msgpack
import zmq


class KvSubscriber:
    """Keeps what a publisher has: medium -> block hash -> (parent, tokens)."""

    def __init__(self, live: str, replay: str | None = None) -> None:
        """Subscribe; without `replay` gaps are only counted."""
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(live)
        self._replay = None
        if replay is not None:
            self._replay = self._context.socket(zmq.DEALER)
            self._replay.connect(replay)
        self.last = -1
        self.num_gaps = self.num_batches = 0
        self.content = defaultdict(dict)
        self.removed = []
        """(medium, hash) of all that was removed, in order."""

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        for socket in (self._live, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()

    def read(self, seconds: float = 0.3) -> "KvSubscriber":
        """Take what comes until nothing has come for `seconds`."""
        while self._live.poll(1000 * seconds):
            self.take()
        return self

    def read_until(self, condition, seconds: float = 20.0) -> "KvSubscriber":
        """Take what comes until `condition(self)` holds; AssertionError: it does not."""
        until = time.monotonic() + seconds
        while not condition(self):
            assert time.monotonic() < until, {one: len(v) for one, v in self.content.items()}
            if self._live.poll(50):
                self.take()
        return self

    def take(self) -> None:
        """Take one batch, and replay what was missed before it."""
        _topic, number, payload = self._live.recv_multipart()
        number = int.from_bytes(number, "big")
        if number <= self.last:
            return
        if number > self.last + 1:
            self.num_gaps += 1
            if self._replay is not None:
                self.replay(self.last + 1)
        if number > self.last:
            self._apply(number, payload)

    def replay(self, start: int) -> list[int]:
        """Ask for what came from number `start` on, take it, and return the numbers."""
        self._replay.send_multipart([b"", start.to_bytes(8, "big")])
        numbers = []
        while True:
            assert self._replay.poll(10_000), "the replay has no end"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            number = int.from_bytes(number, "big", signed=True)
            if number == -1:
                assert payload == b""
                return numbers
            numbers.append(number)
            if number > self.last:
                self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        at, events, dp_rank = msgpack.unpackb(payload)
        assert abs(at - time.time()) < 3600
        assert dp_rank == 0
        self.last = number
        self.num_batches += 1
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                self.content.clear()
            elif kind == "BlockRemoved":
                for block in event["block_hashes"]:
                    self.content[event["medium"]].pop(block, None)
                    self.removed.append((event["medium"], block))
            else:
                assert kind == "BlockStored"
                size, parent = event["block_size"], event["parent_block_hash"]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                for nth, block in enumerate(event["block_hashes"]):
                    tokens = tuple(event["token_ids"][nth * size : (nth + 1) * size])
                    self.content[event["medium"]][block] = parent, tokens
                    parent = block
