import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray import wire
from kvray.errors import ShardUnavailable, TransferError
from kvray.node import stage_calls as shard_socket_module
from kvray.node.stage_calls import ShardSocket
from tests.unit.node.conftest import StartShard
from tests.unit.node.peer import Peer, echo, request_on
from tests.waiting import HANG_S


@pytest.fixture
def peer(directory: Path) -> Iterator[Peer]:
    made = Peer(directory / wire.SOCKET_FILE)
    yield made
    made.close()


@pytest.fixture
def shard_socket(directory: Path) -> Iterator[ShardSocket]:
    made = ShardSocket(directory)
    yield made
    made.close()


def test_replies_belong_to_their_requests(peer: Peer, shard_socket: ShardSocket) -> None:
    peer.scripts = [echo]
    got: list[tuple[int, object]] = []

    def ask(n: int) -> None:
        got.append((n, shard_socket.call("echo", timeout_s=5, n=n)["n"]))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [(n, n) for n in range(20)]
    assert peer.connections == 1


def test_without_a_shard_the_call_says_so(shard_socket: ShardSocket) -> None:
    with pytest.raises(ShardUnavailable, match="did not answer"):
        shard_socket.call("hello", timeout_s=1)


def test_a_shard_that_never_answers_costs_the_deadline(
    peer: Peer, shard_socket: ShardSocket
) -> None:
    done = threading.Event()
    peer.scripts = [lambda connection: done.wait(5) and None]
    began = time.monotonic()
    with pytest.raises(ShardUnavailable):
        shard_socket.call("hello", timeout_s=0.2)
    assert 0.15 < time.monotonic() - began < 1
    done.set()


def test_an_answer_that_trickles_in_does_not_extend_the_deadline(
    peer: Peer, shard_socket: ShardSocket
) -> None:
    def trickle(connection: socket.socket) -> None:
        for byte in wire.encode({"ok": True, "text": "x" * 100}):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    peer.scripts = [trickle]
    began = time.monotonic()
    with pytest.raises(ShardUnavailable):
        shard_socket.call("hello", timeout_s=0.3)
    assert time.monotonic() - began < 1


def test_an_answer_that_came_in_time_counts_though_nobody_looked_before_the_deadline(
    peer: Peer, shard_socket: ShardSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that asked may get no core until its deadline is over."""
    answered = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(wire.encode({"ok": True, "n": request_on(connection)["n"]}))
        answered.set()
        request_on(connection)

    def look_late(*args: object) -> bytes:
        assert answered.wait(HANG_S)
        time.sleep(0.3)
        return receive(*args)

    receive = shard_socket_module._receive
    monkeypatch.setattr(shard_socket_module, "_receive", look_late)
    peer.scripts = [answer]
    assert shard_socket.call("echo", timeout_s=0.2, n=1)["n"] == 1


def test_a_late_reply_is_never_taken_for_the_next_one(
    peer: Peer, shard_socket: ShardSocket
) -> None:
    def late(connection: socket.socket) -> None:
        request = request_on(connection)
        time.sleep(0.3)
        connection.sendall(wire.encode({"ok": True, "n": request["n"]}))

    peer.scripts = [late, echo]
    with pytest.raises(ShardUnavailable):
        shard_socket.call("echo", timeout_s=0.1, n=1)
    assert shard_socket.call("echo", timeout_s=5, n=2)["n"] == 2


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 8, wire.LENGTH.pack(3) + b"\x93\x01\x02" + b"more", b"\x00" * 12]
)
def test_after_garbage_the_next_call_has_a_new_connection(
    peer: Peer, shard_socket: ShardSocket, garbage: bytes
) -> None:
    def answer(connection: socket.socket) -> None:
        request_on(connection)  # else it may have hung up before it was asked
        connection.sendall(garbage)

    peer.scripts = [answer, echo]
    with pytest.raises(TransferError):
        shard_socket.call("echo", timeout_s=5, n=1)
    assert shard_socket.call("echo", timeout_s=5, n=2)["n"] == 2


def test_a_shard_that_was_restarted_is_reached_at_the_first_call(
    start_shard: StartShard, directory: Path, shard_socket: ShardSocket
) -> None:
    first = start_shard()
    assert shard_socket.call("hello", timeout_s=5)["shard_epoch"] == 1
    first.stop(retire=False, timeout_s=5)
    with pytest.raises(ShardUnavailable):
        shard_socket.call("hello", timeout_s=1)
    start_shard().stop(retire=False, timeout_s=5)
    start_shard()
    assert shard_socket.call("hello", timeout_s=5)["shard_epoch"] == 3


def test_a_hang_up_between_calls_is_noticed_before_the_next(
    peer: Peer, shard_socket: ShardSocket
) -> None:
    def once(connection: socket.socket) -> None:
        connection.sendall(wire.encode({"ok": True, "n": request_on(connection)["n"]}))

    peer.scripts = [once, once, once]
    for n in range(3):
        assert shard_socket.call("echo", timeout_s=5, n=n)["n"] == n
        time.sleep(0.05)


def test_a_request_that_no_frame_takes_leaves_the_connection_alone(
    peer: Peer, shard_socket: ShardSocket
) -> None:
    peer.scripts = [echo]
    assert shard_socket.call("echo", timeout_s=5, n=1)["n"] == 1
    with pytest.raises(TransferError):
        shard_socket.call("echo", timeout_s=5, n=bytes(wire.FRAME_MAX))
    assert shard_socket.call("echo", timeout_s=5, n=2)["n"] == 2
    assert peer.connections == 1


def test_a_forked_child_cannot_use_it_and_does_no_harm(
    peer: Peer, shard_socket: ShardSocket
) -> None:
    peer.scripts = [echo]
    assert shard_socket.call("echo", timeout_s=5, n=1)["n"] == 1
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(ShardUnavailable):
            try:
                shard_socket.call("echo", timeout_s=5, n=9)
            except ShardUnavailable:
                status = 0
        shard_socket.close()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shard_socket.call("echo", timeout_s=5, n=2)["n"] == 2
    assert peer.connections == 1


def test_it_works_with_descriptors_above_what_select_takes(
    peer: Peer, shard_socket: ShardSocket
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this user may not open that many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        peer.scripts = [echo]
        for n in range(2):
            assert shard_socket.call("echo", timeout_s=5, n=n)["n"] == n
        shard_socket.close()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_call_that_waits_can_be_interrupted_and_the_next_one_is_answered(
    peer: Peer, shard_socket: ShardSocket
) -> None:
    asked, done = threading.Event(), threading.Event()

    def silent(connection: socket.socket) -> None:
        connection.recv(1)
        asked.set()
        done.wait(5)

    peer.scripts = [silent, echo]
    errors: list[str] = []

    def ask() -> None:
        try:
            shard_socket.call("hello", timeout_s=600)
        except ShardUnavailable as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(30)
    shard_socket.interrupt()
    thread.join(60)
    assert not thread.is_alive()
    assert "hung up" in errors[0]
    done.set()
    shard_socket.interrupt()  # nobody waits
    assert shard_socket.call("echo", timeout_s=30, n=1)["n"] == 1
