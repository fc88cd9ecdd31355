"""What anybody may do to a port of KV events, for a while, from a process of its own.

Run as `python -m tests.unit.events.attacks SECONDS SEED ADDRESS...`.
"""

import contextlib
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvray.events.zmtp import parse_endpoint

ROOT = Path(__file__).parents[3]
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x08Identity\x00\x00\x00\x00"
THREADS = 4

Attack = Callable[[socket.socket, random.Random, float], None]


@contextlib.contextmanager
def attacked(seconds: float, *addresses: str, seed: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Attack ports during the block, for at most so many seconds."""
    command = [sys.executable, "-m", "tests.unit.events.attacks", str(seconds), str(seed)]
    with subprocess.Popen([*command, *addresses], cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


def frame(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def question(number: int) -> bytes:
    return frame(1, b"") + frame(0, number.to_bytes(8, "big", signed=True))


def endless(make: Callable[[random.Random], bytes], first: bytes = b"") -> Attack:
    """Return what says hello and `first`, and then sends what `make` gives without end."""

    def attack(peer: socket.socket, rng: random.Random, until: float) -> None:
        peer.sendall(GREETING + READY + first)
        while time.monotonic() < until:
            peer.sendall(make(rng))

    return attack


def questions_without_end(peer: socket.socket, rng: random.Random, until: float) -> None:
    peer.sendall(GREETING + READY)
    while time.monotonic() < until:
        peer.sendall(question(rng.choice([0, 1, 2**62])))
        peer.recv(2**20)


def silent(make: Callable[[random.Random], bytes]) -> Attack:
    """Return what says what `make` gives, and then neither speaks nor reads."""

    def attack(peer: socket.socket, rng: random.Random, until: float) -> None:
        peer.sendall(make(rng))
        time.sleep(max(0.0, min(rng.uniform(0, 2), until - time.monotonic())))

    return attack


def nonsense(peer: socket.socket, rng: random.Random, until: float) -> None:
    said = bytearray(GREETING + READY + frame(0, b"\x01") + question(0) * 3)
    for _ in range(rng.randrange(4)):
        said[rng.randrange(len(said))] = rng.randrange(256)
    peer.sendall(said + rng.randbytes(rng.randrange(2000)))


ATTACKS: list[Attack] = [
    endless(lambda _: bytes(2**16), b"\x02" + (2**62).to_bytes(8, "big")),  # one frame
    endless(lambda rng: frame(1, rng.randbytes(rng.choice([0, 9, 900]))) * 50),  # parts
    endless(lambda rng: b"".join(frame(0, b"\x01" + rng.randbytes(20)) for _ in range(100))),
    endless(lambda _: (frame(0, b"\x01") + frame(0, b"\x00")) * 100),  # it subscribes and leaves
    endless(lambda rng: question(rng.choice([0, 1, -1, 2**62])) * 50),  # it reads no answer
    endless(lambda rng: frame(4, b"\x04PING\x00\x01" + rng.randbytes(16)) * 50),
    questions_without_end,
    silent(lambda _: GREETING + READY + frame(0, b"\x01")),  # a subscription
    silent(lambda rng: GREETING[: rng.randrange(65)]),
    nonsense,
    lambda peer, rng, until: None,  # it hangs up
]


def attack_once(place: tuple[str, int], rng: random.Random, until: float) -> None:
    """Do one thing on one connection, and on some more at the same time."""
    attack = rng.choice(ATTACKS)
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(socket.create_connection(place, timeout=1))
            for _ in range(rng.choice([1, 1, 5, 50]))
        ]
        until = min(until, time.monotonic() + rng.uniform(0, 2))
        for peer in peers[1:]:
            peer.setblocking(False)
            with contextlib.suppress(OSError):
                attack(peer, rng, time.monotonic() + 0.001)
        attack(peers[0], rng, until)


def main() -> None:
    seconds, seed, *addresses = sys.argv[1:]
    until = time.monotonic() + float(seconds)
    places = [parse_endpoint(one) for one in addresses]

    def attack(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < until:
            attack_once(rng.choice(places), rng, until)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(attack, range(THREADS)))


if __name__ == "__main__":
    main()
