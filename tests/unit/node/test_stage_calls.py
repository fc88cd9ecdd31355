"""A scheduler that asks for blocks of other nodes always gets an answer, and in time."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray import wire
from kvray.breaker import Breaker
from kvray.errors import ShardUnavailable
from kvray.node import StageCalls, StageReply
from kvray.store import Lease
from tests.unit.node.peer import Peer, Script, request_on
from tests.unit.store.small_arena import chain
from tests.waiting import HANG_S

KEYS = chain(6)
MISS = StageReply(num_blocks=0, reason="not_stored")
GONE = StageReply(num_blocks=0, reason="store_down")
LATE = StageReply(num_blocks=0, reason="too_slow")


@pytest.fixture
def peer(directory: Path) -> Iterator[Peer]:
    made = Peer(directory / wire.SOCKET_FILE)
    yield made
    made.close()


@pytest.fixture
def calls(directory: Path) -> Iterator[StageCalls]:
    made = StageCalls(directory)
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every failed call forgotten at once."""
    monkeypatch.setattr(Breaker, "state", lambda *_: "closed")


def ask(calls: StageCalls, wait_s: float = 5.0) -> StageReply:
    return calls.stage(KEYS, replica="one", rank=2, wait_s=wait_s, tokens_per_s=1000.0)


def answering(*replies: dict[str, Any], heard: list[dict[str, Any]] | None = None) -> Script:
    """Return a script that answers one request after the other."""

    def play(connection: socket.socket) -> None:
        for reply in replies:
            request = request_on(connection)
            if heard is not None:
                heard.append(request)
            connection.sendall(wire.encode({"ok": True, **reply}))

    return play


def test_the_shard_hears_what_is_wanted_by_whom_and_until_when(
    peer: Peer, calls: StageCalls
) -> None:
    heard: list[dict[str, Any]] = []
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


def test_leases_of_ranks_on_other_nodes_come_with_the_answer(peer: Peer, calls: StageCalls) -> None:
    leases = {1: ["far", 7, 3, 4, 5], "3": ["farther", 8, 0, 4, 6]}
    peer.scripts = [answering({"num_blocks": 4, "reason": "none", "leases": leases})]
    assert ask(calls).leases == {
        1: ("far", Lease(lease_id=7, page=3, num_slots=4, check=5)),
        3: ("farther", Lease(lease_id=8, page=0, num_slots=4, check=6)),
    }


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"num_blocks": "many", "reason": "none"},
        {"num_blocks": float("inf"), "reason": "none"},
        {"num_blocks": 2, "reason": "none", "leases": [1]},
        {"num_blocks": 2, "reason": "none", "leases": {1: 2}},
        {"num_blocks": 2, "reason": "none", "leases": {1: ["far", 2]}},
    ],
)
def test_an_answer_of_another_kind_counts_as_none(
    peer: Peer, calls: StageCalls, reply: dict[str, Any]
) -> None:
    peer.scripts = [answering(reply)]
    assert ask(calls) == GONE
    assert not calls.can_ask


def test_more_blocks_than_were_asked_for_are_none(peer: Peer, calls: StageCalls) -> None:
    peer.scripts = [answering({"num_blocks": 99, "reason": "none"})]
    assert ask(calls).num_blocks == len(KEYS)


def test_an_unknown_reason_is_the_stores_fault(peer: Peer, calls: StageCalls) -> None:
    peer.scripts = [answering({"num_blocks": 1, "reason": ["odd"]})]
    assert ask(calls) == StageReply(num_blocks=1, reason="store_down")


def test_without_a_shard_the_answer_is_that_it_is_away(calls: StageCalls) -> None:
    assert ask(calls) == GONE
    assert not calls.can_ask


def test_a_shard_that_refuses_is_left_alone_for_a_while(peer: Peer, calls: StageCalls) -> None:
    def refuse(connection: socket.socket) -> None:
        request_on(connection)
        connection.sendall(wire.encode(wire.error_reply(ShardUnavailable("It starts."))))

    peer.scripts = [refuse]
    assert ask(calls) == GONE
    assert not calls.can_ask


def test_a_frozen_shard_costs_the_wait_once_and_then_nothing(peer: Peer, calls: StageCalls) -> None:
    done = threading.Event()
    peer.scripts = [lambda connection: done.wait(5) and None]
    began = time.monotonic()
    assert ask(calls, wait_s=0.1) == LATE
    assert time.monotonic() - began >= 0.1
    assert not calls.can_ask
    done.set()


def test_an_answer_that_trickles_in_costs_no_more_than_the_wait(
    peer: Peer, calls: StageCalls
) -> None:
    ended = threading.Event()

    def trickle(connection: socket.socket) -> None:
        for byte in wire.encode({"ok": True, "num_blocks": 2, "reason": "none" + " " * 500}):
            connection.sendall(bytes([byte]))
            if ended.wait(0.02):
                return

    peer.scripts = [trickle]
    assert ask(calls, wait_s=0.1) == LATE
    ended.set()


def test_a_full_backlog_does_not_hold_the_scheduler_up(directory: Path, calls: StageCalls) -> None:
    directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / wire.SOCKET_FILE))
        listener.listen(0)
        clients = []
        for _ in range(3):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            client.connect_ex(str(directory / wire.SOCKET_FILE))
            clients.append(client)
        assert ask(calls, wait_s=0.2) in (GONE, LATE)
        for client in clients:
            client.close()


def test_a_late_answer_is_never_taken_for_the_next(
    peer: Peer, calls: StageCalls, impatient: None
) -> None:
    released = threading.Event()

    def late(connection: socket.socket) -> None:
        request_on(connection)
        released.wait(HANG_S)
        connection.sendall(wire.encode({"ok": True, "num_blocks": 6, "reason": "none"}))

    peer.scripts = [late, answering({"num_blocks": 0, "reason": "not_stored"})]
    assert ask(calls, wait_s=0.1) == LATE
    released.set()
    assert ask(calls) == MISS


@pytest.mark.parametrize("garbage", [b"\xff" * 8, wire.LENGTH.pack(3) + b"\x93\x01\x02" + b"more"])
def test_after_garbage_the_next_call_is_answered_again(
    peer: Peer, calls: StageCalls, impatient: None, garbage: bytes
) -> None:
    def answer(connection: socket.socket) -> None:
        request_on(connection)
        connection.sendall(garbage)

    peer.scripts = [answer, answering({"num_blocks": 3, "reason": "not_stored"})]
    assert ask(calls) == GONE
    assert ask(calls) == StageReply(num_blocks=3, reason="not_stored")


def test_a_shard_that_cannot_find_out_is_left_alone_for_a_moment(
    peer: Peer, calls: StageCalls
) -> None:
    reply = {"num_blocks": 0, "reason": "store_down"}
    peer.scripts = [answering(*[reply] * 6)]
    for _ in range(6):
        assert ask(calls) == GONE
    assert not calls.can_ask
    time.sleep(0.25)
    assert calls.can_ask


def test_the_shard_hears_once_whose_answers_did_not_arrive(
    peer: Peer, calls: StageCalls, impatient: None
) -> None:
    """It may have leased for ranks on other nodes, which nobody would ever release."""
    released = threading.Event()
    lost: list[dict[str, Any]] = []
    heard: list[dict[str, Any]] = []

    def late(connection: socket.socket) -> None:
        lost.append(request_on(connection))
        released.wait(HANG_S)

    reply = {"num_blocks": 0, "reason": "not_stored"}
    peer.scripts = [late, answering(reply, reply, heard=heard)]
    ask(calls, wait_s=0.1)
    released.set()
    ask(calls)
    ask(calls)
    assert [request["unread"] for request in heard] == [[lost[0]["token"]], []]
    assert len({request["token"] for request in lost + heard}) == 3


def test_calls_share_a_connection_while_all_is_well(peer: Peer, calls: StageCalls) -> None:
    reply = {"num_blocks": 0, "reason": "not_stored"}
    peer.scripts = [answering(reply, reply, reply)]
    assert [ask(calls) for _ in range(3)] == [MISS] * 3
    assert peer.connections == 1


def test_a_prompt_that_fills_more_than_a_frame_is_asked_about_in_part(
    peer: Peer, calls: StageCalls
) -> None:
    heard: list[dict[str, Any]] = []
    peer.scripts = [answering({"num_blocks": 1, "reason": "none"}, heard=heard)]
    many = [KEYS[0]] * 200_000
    calls.stage(many, replica="one", rank=0, wait_s=5.0, tokens_per_s=0.0)
    assert len(heard[0]["keys"]) < wire.FRAME_MAX
