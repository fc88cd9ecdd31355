"""Whatever a process sends to a shard's socket, those who behave are served, and memory is flat."""

import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvray import wire
from kvray.actors.shard.shard import Shard
from kvray.node.stage_calls import ShardSocket
from kvray.trace.request_note import NOTES_MAX, RequestNote, pack
from tests.far import Far
from tests.unit.actors.small_shard import NAMESPACE, WAIT_S, Line, settings_for, wait_until_serving

_GROWTH_MAX = 96 * 2**20
"""Bytes between the first and the last look: bounds that fill, and what an allocator keeps."""
_THREADS = 6
_KEYS_MAX = 32_768


class Besieged(Line):
    """A shard in a process of its own; its lookup measures the time between two replies."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._last, self._longest_s = time.monotonic(), 0.0
        self._shard = self.follow(Shard("besieged", settings_for(directory)))
        self._shard.start()
        wait_until_serving(self._shard)
        self._last, self._longest_s = time.monotonic(), 0.0

    async def _ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        reply = await super()._ask(actor, method, *args, timeout_s=timeout_s)
        if method == "delta":
            now = time.monotonic()
            self._longest_s, self._last = max(self._longest_s, now - self._last), now
        return reply

    def look(self) -> tuple[int, float]:
        """Return the bytes of its memory, and the longest time between two heartbeats."""
        self.heard.clear()
        gap_s = max(self._longest_s, time.monotonic() - self._last)
        return psutil.Process().memory_info().rss, gap_s

    def stop(self) -> None:
        self._shard.stop(retire=True, timeout_s=10)


class Besiegers:
    """Threads of another process, which send whatever they can think of until it is killed."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._path, self._chance = str(directory / wire.SOCKET_FILE), random.Random(seed)
        for _ in range(_THREADS):
            threading.Thread(target=self._go_on, daemon=True).start()

    def _go_on(self) -> None:
        acts = (self.junk, self.halves, self.odd, self.stage, self.large, self.notes, self.crowd)
        while True:
            with contextlib.suppress(OSError, ValueError), self.connected() as peer:
                self._chance.choice(acts)(peer)

    def junk(self, peer: socket.socket) -> None:
        peer.sendall(self._chance.randbytes(self._chance.randrange(4000)))
        peer.recv(1)

    def halves(self, peer: socket.socket) -> None:
        frame = wire.encode({"op": "hello", "more": bytes(self._chance.randrange(300_000))})
        peer.sendall(frame[: self._chance.randrange(len(frame))])
        time.sleep(0.05)

    def odd(self, peer: socket.socket) -> None:
        values = (None, -1, 2**63, 1e308, float("nan"), "[/x]\x1b[2J", b"\0" * 99, [[]], {0: 1})
        names = ("replica", "rank", "namespace", "counters", "requests", "keys", "wait_s", "spans")
        for op in ("register", "report", "stage", "describe", "hello", "other"):
            fields = {one: self._chance.choice(values) for one in self._chance.sample(names, 4)}
            self.ask(peer, op=op, **fields)

    def stage(self, peer: socket.socket) -> None:
        """Legal, and as large as can be; the answer is not always read."""
        rank = {"replica": f"large-{self._chance.randrange(4)}", "rank": 0}
        keys = os.urandom(32 * self._chance.choice((1, 64, _KEYS_MAX)))
        parts = [[part, None] for part in range(16)]
        self.ask(peer, op="register", **rank, namespace=NAMESPACE.to_wire(), wanted=parts)
        request = {"op": "stage", **rank, "keys": keys, "wait_s": 0.05}
        for _ in range(3):
            if self._chance.random() < 0.3:
                peer.sendall(wire.encode(request))
            else:
                self.ask(peer, **request)

    def large(self, peer: socket.socket) -> None:
        item = self._chance.choice((0, b"", [], {}, "x" * 9))
        self.ask(peer, op="report", replica="r", rank=0, counters=[item] * 16_000)
        peer.sendall(wire.LENGTH.pack(wire.FRAME_MAX) + bytes(self._chance.randrange(2**21)))

    def notes(self, peer: socket.socket) -> None:
        rank = {"replica": f"replica-{self._chance.randrange(10**9)}", "rank": 0}
        note = RequestNote(1, 1.0, 40, 4, 0, 0, 9, "x" * 60)
        self.ask(peer, op="register", **rank, namespace=NAMESPACE.to_wire())
        for first in range(0, 4000, 200):
            some = [pack(note._replace(request_id=first + one)) for one in range(NOTES_MAX)]
            counters = {f"c{one}-{rank['replica']}": one for one in range(250)}
            self.ask(peer, op="report", **rank, counters=counters, requests=some)

    def crowd(self, _peer: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(self.connected())

    def connected(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(2)
        peer.connect(self._path)
        return peer

    def ask(self, peer: socket.socket, **request: Any) -> None:
        peer.sendall(wire.encode(request))
        length = wire.body_length(peer.recv(wire.LENGTH.size, socket.MSG_WAITALL).ljust(4, b"\0"))
        peer.recv(length, socket.MSG_WAITALL)


@pytest.mark.parametrize(
    "seconds", [2.0, pytest.param(120.0, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_an_engine_that_behaves_is_served_beside_a_process_that_does_not(directory, seconds):
    with contextlib.ExitStack() as stack:
        shard = Far(f"{__name__}:Besieged", directory)
        stack.callback(shard.kill)
        engine = stack.enter_context(contextlib.closing(ShardSocket(directory)))
        rank = {"timeout_s": WAIT_S, "replica": "good", "rank": 0}
        engine.call("register", **rank, namespace=NAMESPACE.to_wire())
        stack.callback(Far(f"{__name__}:Besiegers", directory, 7).kill)
        slowest_s, count, before = 0.0, 0, None
        until = time.monotonic() + seconds
        while time.monotonic() < until or count < 10:
            began, count = time.monotonic(), count + 1
            note = pack(RequestNote(count, 1.0, 40, 4, 0, 0, 9, "not_stored"))
            answer = engine.call("report", **rank, counters={"requests": count}, requests=[note])
            assert answer["known"], "its connection was ended"
            slowest_s = max(slowest_s, time.monotonic() - began)
            if before is None and time.monotonic() > until - 0.8 * seconds:
                before, _ = shard.call("look", timeout_s=WAIT_S)
            time.sleep(0.02)
        after, heartbeat_s = shard.call("look", timeout_s=WAIT_S)
        shard.call("stop", timeout_s=WAIT_S)
    growth = after - before
    print(
        f"{count} reports, the slowest {slowest_s:.3f} s; heartbeats at most"
        f" {heartbeat_s:.2f} s apart; {before >> 20} MiB, grown by {growth >> 20} MiB"
    )
    assert growth < _GROWTH_MAX
    assert heartbeat_s < WAIT_S / 2
