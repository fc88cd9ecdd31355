"""A scheduler that asks for blocks of other nodes always gets an answer, and in time."""

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvray import wire
from kvray.errors import ShardUnavailable, TransferError
from kvray.node import StageCalls, StageReply, stage_calls
from kvray.node.stage_calls import ShardSocket
from kvray.store import Lease
from tests.kit.shard_socket import Peer, Script, echo, request_on
from tests.unit.store.small_arena import chain
from tests.waiting import HANG_S, wait_for

KEYS = chain(6)
GONE = StageReply(num_blocks=0, reason="store_down")
LATE = StageReply(num_blocks=0, reason="too_slow")
GARBAGE = [b"\xff" * 8, wire.LENGTH.pack(3) + b"\x93\x01\x02" + b"more", b"\x00" * 12]


@pytest.fixture
def peer(directory: Path) -> Iterator[Peer]:
    made = Peer(directory / wire.SOCKET_FILE)
    yield made
    made.close()


@pytest.fixture
def calls(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StageCalls]:
    """Calls after whose first failure the shard is left alone for longer than a test takes."""
    monkeypatch.setattr("kvray.breaker._FIRST_S", 600.0)
    made = StageCalls(directory)
    yield made
    made.close()


def ask(calls: StageCalls, wait_s: float = 5.0) -> StageReply:
    return calls.stage(KEYS, replica="one", rank=2, wait_s=wait_s, tokens_per_s=1000.0)


Requests = list[dict[str, Any]]


def silent(heard: Requests) -> Script:
    """Return a script that answers nothing until it is hung up on."""

    def play(connection: socket.socket) -> None:
        while True:
            heard.append(request_on(connection))

    return play


def sending(*answers: bytes, heard: Requests | None = None, after_s: float = 0.0) -> Script:
    """Return a script that answers one request after the other, and notes what it `heard`."""

    def play(connection: socket.socket) -> None:
        for answer in answers:
            request = request_on(connection)
            if heard is not None:
                heard.append(request)
            time.sleep(after_s)
            connection.sendall(answer)

    return play


def answering(*replies: dict[str, Any], **options: Any) -> Script:
    return sending(*(wire.encode({"ok": True, **reply}) for reply in replies), **options)


def test_the_shard_hears_what_is_wanted_by_whom_and_until_when(peer, calls):
    heard: Requests = []
    peer.scripts = [answering({"num_blocks": 4, "reason": "too_slow"}, heard=heard)]
    assert ask(calls) == StageReply(num_blocks=4, reason="too_slow")
    assert heard[0].pop("wait_s") < 5.0
    assert heard[0].pop("token")
    assert heard == [
        {
            "op": "stage",
            "replica": "one",
            "rank": 2,
            "keys": b"".join(KEYS),
            "tokens_per_s": 1000.0,
            "verify_from": None,
            "unread": [],
            "stored_by": None,
        }
    ]


@pytest.mark.parametrize(
    "script",
    [
        answering({}),
        answering({"num_blocks": "many", "reason": "none"}),
        answering({"num_blocks": float("inf"), "reason": "none"}),
        answering({"num_blocks": 2, "reason": "none", "leases": [1]}),
        answering({"num_blocks": 2, "reason": "none", "leases": {1: 2}}),
        answering({"num_blocks": 2, "reason": "none", "leases": {1: ["far", 2]}}),
        sending(wire.encode(wire.error_reply(ShardUnavailable("It starts.")))),
        *map(sending, GARBAGE),
    ],
)
def test_a_shard_that_refuses_or_answers_otherwise_is_left_alone_for_a_while(peer, calls, script):
    peer.scripts = [script, answering({"num_blocks": 3, "reason": "not_stored"})]
    assert ask(calls) == GONE
    assert not calls.can_ask
    expected = StageReply(num_blocks=3, reason="not_stored")
    wait_for(lambda: ask(calls) == expected)  # the first may still meet the old connection


LEASES = {1: ["far", 7, 3, 4, 5], "3": ["farther", 8, 0, 4, 6]}
READ = {
    1: ("far", Lease(lease_id=7, page=3, num_slots=4, check=5)),
    3: ("farther", Lease(lease_id=8, page=0, num_slots=4, check=6)),
}


@pytest.mark.parametrize(
    ("fields", "reply"),
    [
        ({"num_blocks": 99, "reason": "none"}, StageReply(num_blocks=len(KEYS), reason="none")),
        ({"num_blocks": 1, "reason": ["odd"]}, StageReply(num_blocks=1, reason="store_down")),
        (
            {"num_blocks": 4, "reason": "none", "leases": LEASES},
            StageReply(num_blocks=4, reason="none", leases=READ),
        ),
    ],
    ids=["more than asked for", "an unknown reason", "leases of ranks on other nodes"],
)
def test_an_answer_is_taken_as_far_as_it_is_known(peer, calls, fields, reply):
    peer.scripts = [answering(fields)]
    assert ask(calls) == reply


def test_without_a_shard_the_answer_is_that_it_is_away(calls):
    assert ask(calls) == GONE
    assert not calls.can_ask


def test_a_full_backlog_does_not_hold_the_scheduler_up(directory, calls):
    directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / wire.SOCKET_FILE))
        listener.listen(0)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(str(directory / wire.SOCKET_FILE))
        assert ask(calls, wait_s=0.2) in (GONE, LATE)
        for client in clients:
            client.close()


def test_a_shard_that_cannot_find_out_is_left_alone(peer, calls):
    peer.scripts = [answering(*[{"num_blocks": 0, "reason": "store_down"}] * 6)]
    assert [ask(calls) for _ in range(6)] == [GONE] * 6
    assert not calls.can_ask


def test_the_shard_hears_once_whose_answers_did_not_arrive(peer, calls):
    """It may have leased for ranks on other nodes, which nobody would ever release."""
    lost: Requests = []
    heard: Requests = []
    reply = {"num_blocks": 0, "reason": "not_stored"}
    peer.scripts = [silent(lost), answering(reply, reply, heard=heard)]
    assert ask(calls, wait_s=0.1) == LATE
    assert not calls.can_ask
    for _ in range(2):
        ask(calls)
    assert [request["unread"] for request in heard] == [[lost[0]["token"]], []]
    assert peer.connections == 2
    assert len({request["token"] for request in lost + heard}) == 3


def test_a_prompt_that_fills_more_than_a_frame_is_asked_about_in_part(peer, calls):
    heard: Requests = []
    peer.scripts = [answering({"num_blocks": 1, "reason": "none"}, heard=heard)]
    many = [KEYS[0]] * 200_000
    calls.stage(many, replica="one", rank=0, wait_s=5.0, tokens_per_s=0.0)
    assert len(heard[0]["keys"]) < wire.FRAME_MAX


@pytest.fixture
def client(directory: Path) -> Iterator[ShardSocket]:
    made = ShardSocket(directory)
    yield made
    made.close()


def test_replies_belong_to_their_requests_and_one_that_no_frame_takes_costs_itself(peer, client):
    peer.scripts = [echo]
    with ThreadPoolExecutor(20) as pool:
        got = pool.map(lambda n: client.call("echo", timeout_s=5, n=n)["n"], range(20))
    assert list(got) == list(range(20))
    with pytest.raises(TransferError):
        client.call("echo", timeout_s=5, n=bytes(wire.FRAME_MAX))
    assert client.call("echo", timeout_s=5, n=2)["n"] == 2
    assert peer.connections == 1


def test_an_answer_that_trickles_in_does_not_extend_the_deadline(peer, client):
    def trickle(connection: socket.socket) -> None:
        for byte in wire.encode({"ok": True, "text": "x" * 100}):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    peer.scripts = [trickle]
    began = time.monotonic()
    with pytest.raises(ShardUnavailable):
        client.call("hello", timeout_s=0.3)
    assert time.monotonic() - began < 4, "all of it takes longer"


def test_an_answer_that_came_in_time_counts_though_nobody_looked_before_the_deadline(
    peer, client, monkeypatch
):
    """A thread that asked may get no core until its deadline is over."""
    answered = threading.Event()

    def answer(connection: socket.socket) -> None:
        answering({"n": 1})(connection)
        answered.set()
        request_on(connection)

    def look_late(*args: object) -> bytes:
        assert answered.wait(HANG_S)
        time.sleep(0.3)
        return receive(*args)

    receive = stage_calls._receive
    monkeypatch.setattr(stage_calls, "_receive", look_late)
    peer.scripts = [answer]
    assert client.call("echo", timeout_s=0.2, n=1)["n"] == 1


def test_a_late_reply_is_never_taken_for_the_next_one(peer, client):
    peer.scripts = [answering({"n": 1}, after_s=0.3), echo]
    with pytest.raises(ShardUnavailable):
        client.call("echo", timeout_s=0.1, n=1)
    assert client.call("echo", timeout_s=5, n=2)["n"] == 2


def test_a_hang_up_between_calls_is_noticed_before_the_next(peer, client):
    peer.scripts = [answering({"n": n}) for n in range(3)]
    for n in range(3):
        assert client.call("echo", timeout_s=5, n=n)["n"] == n
        time.sleep(0.05)


def test_it_works_with_descriptors_above_what_select_takes(peer, client):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this user may not open that many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        peer.scripts = [echo]
        for n in range(2):
            assert client.call("echo", timeout_s=5, n=n)["n"] == n
        client.close()
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_call_that_waits_can_be_interrupted_and_the_next_one_is_answered(peer, client):
    heard: Requests = []
    peer.scripts = [silent(heard), echo]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "hello", timeout_s=600)
        wait_for(lambda: heard)
        client.interrupt()
        with pytest.raises(ShardUnavailable, match="hung up"):
            call.result(60)
    client.interrupt()  # nobody waits
    assert client.call("echo", timeout_s=30, n=1)["n"] == 1
