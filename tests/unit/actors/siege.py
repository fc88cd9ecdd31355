"""A shard in a process of its own, and a process that sends its socket whatever it can think of.

`python -m tests.unit.actors.siege shard DIRECTORY` prints its memory and the longest time between
two heartbeats for each line of its input. `... besiege DIRECTORY SEED` goes on until it is killed.
"""

import contextlib
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from kvray import wire
from kvray.actors.shard.shard import Shard
from kvray.trace.request_note import NOTES_MAX, RequestNote, pack
from tests.unit.actors.small_shard import NAMESPACE, Line, settings_for, wait_until_serving

_THREADS = 6
_KEYS_MAX = 32_768


class _Heard(Line):
    """A lookup's line that measures the time between two announcements."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.longest_s = time.monotonic(), 0.0

    def announce(self, announcement: Any) -> Any:
        now = time.monotonic()
        self.longest_s, self.last = max(self.longest_s, now - self.last), now
        return super().announce(announcement)


def serve(directory: Path) -> None:
    line = _Heard()
    shard = Shard("besieged", settings_for(directory), [line.announce])
    shard.start()
    wait_until_serving(shard)
    line.last, line.longest_s = time.monotonic(), 0.0
    print("serving", flush=True)
    for _ in sys.stdin:
        line.heard.clear()
        gap_s = max(line.longest_s, time.monotonic() - line.last)
        print(psutil.Process().memory_info().rss, gap_s, flush=True)
    shard.stop(retire=True, timeout_s=10)


class Besieger:
    """One thread of many; each act opens connections of its own."""

    def __init__(self, path: str, seed: int) -> None:
        self._path = path
        self._chance = random.Random(seed)

    def go_on(self) -> None:
        acts = (self.junk, self.halves, self.odd, self.stage, self.large, self.notes, self.crowd)
        while True:
            with contextlib.suppress(OSError, ValueError):
                self._chance.choice(acts)()

    def junk(self) -> None:
        with self.connected() as peer:
            peer.sendall(self._chance.randbytes(self._chance.randrange(4000)))
            peer.recv(1)

    def halves(self) -> None:
        frame = wire.encode({"op": "hello", "more": bytes(self._chance.randrange(300_000))})
        with self.connected() as peer:
            peer.sendall(frame[: self._chance.randrange(len(frame))])
            time.sleep(0.05)

    def odd(self) -> None:
        values = (None, -1, 2**63, 1e308, float("nan"), "[/x]\x1b[2J", b"\0" * 99, [[]], {0: 1})
        names = ("replica", "rank", "namespace", "counters", "requests", "keys", "wait_s", "spans")
        with self.connected() as peer:
            for op in ("register", "report", "stage", "describe", "hello", "other"):
                fields = {one: self._chance.choice(values) for one in self._chance.sample(names, 4)}
                self.ask(peer, op=op, **fields)

    def stage(self) -> None:
        """Legal, and as large as can be; the answer is not always read."""
        name = f"large-{self._chance.randrange(4)}"
        keys = os.urandom(32 * self._chance.choice((1, 64, _KEYS_MAX)))
        with self.connected() as peer:
            parts = [[part, None] for part in range(16)]
            namespace = NAMESPACE.to_wire()
            self.ask(peer, op="register", replica=name, rank=0, namespace=namespace, wanted=parts)
            request = {"op": "stage", "replica": name, "rank": 0, "keys": keys, "wait_s": 0.05}
            for _ in range(3):
                if self._chance.random() < 0.3:
                    peer.sendall(wire.encode(request))
                else:
                    self.ask(peer, **request)

    def large(self) -> None:
        item = self._chance.choice((0, b"", [], {}, "x" * 9))
        with self.connected() as peer:
            self.ask(peer, op="report", replica="r", rank=0, counters=[item] * 16_000)
            peer.sendall(wire.LENGTH.pack(wire.FRAME_MAX) + bytes(self._chance.randrange(2**21)))

    def notes(self) -> None:
        name = f"replica-{self._chance.randrange(10**9)}"
        note = RequestNote(1, 1.0, 40, 4, 0, 0, 9, "x" * 60)
        with self.connected() as peer:
            self.ask(peer, op="register", replica=name, rank=0, namespace=NAMESPACE.to_wire())
            for number in range(20):
                some = [
                    pack(note._replace(request_id=number * 200 + one)) for one in range(NOTES_MAX)
                ]
                counters = {f"c{one}-{name}": one for one in range(250)}
                self.ask(peer, op="report", replica=name, rank=0, counters=counters, requests=some)

    def crowd(self) -> None:
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


def besiege(directory: Path, seed: int) -> None:
    path = str(directory / wire.SOCKET_FILE)
    for number in range(_THREADS):
        threading.Thread(target=Besieger(path, seed + number).go_on, daemon=True).start()
    print("besieging", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "shard":
        serve(Path(sys.argv[2]))
    else:
        besiege(Path(sys.argv[2]), int(sys.argv[3]))
