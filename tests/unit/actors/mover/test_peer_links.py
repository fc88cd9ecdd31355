"""Handshakes between movers, and transports that keep failing between two of them."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray

from kvray.actors.mover import peer_links as module
from kvray.actors.mover.fenced_slots import FencedSlots
from kvray.actors.mover.orders import LeaseRequest, ReadLease
from kvray.actors.mover.peer_links import PeerLinks
from kvray.errors import ShardUnavailable, TransferTimeout
from kvray.store import Arena
from kvray.transport.nixl import NixlTransport
from kvray.transport.object_ref import ObjectRefTransport
from kvray.transport.transport import Array
from tests.unit.actors.small_mover import MakeNode, Node, is_right, span
from tests.unit.store.small_arena import SLOT, chain, make_arena, spec, store
from tests.waiting import wait_for


@pytest.fixture
def firewall(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands before nixl's pushes, and notes how many blocks each has."""
    made, send = SimpleNamespace(is_shut=False, pushed=[]), NixlTransport.send

    def push(self: NixlTransport, address: bytes, sources: Array, *rest: Any, **more: Any) -> None:
        made.pushed.append(len(sources))
        if made.is_shut:
            raise TransferTimeout("A push did not end in time; there is a firewall.")
        send(self, address, sources, *rest, **more)

    monkeypatch.setattr(NixlTransport, "send", push)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # its transport needs no more here
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.1)
    return made


@pytest.fixture
def source(make_node: MakeNode, firewall: Any) -> Node:
    return make_node("a", transports=("nixl", "object_ref"))


@pytest.fixture
def target(make_node: MakeNode, firewall: Any) -> Node:
    return make_node("b", transports=("nixl", "object_ref"))


def failing(node: Node) -> list[dict[str, Any]]:
    return list(node.mover.status()["failing_links"])


def test_links_of_nodes_beyond_those_that_get_handshakes_are_left_out_too(target):
    names = [f"n{number}" for number in range(300)]
    links = target.mover._attached.links
    links.connect(names)
    for name in names:
        for _ in range(module.FAILURES_MAX):
            links.fail(name, "nixl", "A push did not end in time.")
    assert {tuple(links.transports_for(name)) for name in names} == {("object_ref",)}


def test_what_fails_between_nodes_is_left_out_until_a_handshake_arrives(source, target, firewall):
    firewall.is_shut = True
    target.mover.connect(["a"])
    wait_for(lambda: any(one["left_out"] for one in failing(target)))
    (link,) = failing(target)
    assert (link["source"], link["transport"]) == ("a", "nixl")
    assert "firewall" in link["error"]

    keys = chain(20)
    store(source.arena, keys[:10])
    report = target.fetch(span("a", keys[:10]))
    assert report.here == (10,)
    assert report.sources["a"].transport == "object_ref"
    assert is_right(target.arena, keys[:10], block_bytes=SLOT)

    firewall.is_shut = False
    wait_for(lambda: failing(target) == [])
    store(source.arena, keys)
    report = target.fetch(span("a", keys))
    assert report.here == (20,)
    assert report.sources["a"].transport == "nixl"


def test_after_a_handshake_requests_that_fail_count_too(source, target, firewall, monkeypatch):
    monkeypatch.setattr(module, "_SWEEP_S", 60.0)
    target.mover.connect(["a"])
    wait_for(lambda: firewall.pushed == [0])
    status = target.mover.status()
    assert (status["fetches"], status["bytes_fetched"], failing(target)) == (0, 0, [])
    assert source.num_leases == 0
    wait_for(lambda: len(source.mover._attached.read_leases) == 0)
    firewall.is_shut = True
    keys = chain(10)
    store(source.arena, keys)
    first = target.fetch(span("a", keys))
    assert first.here == (0,)
    assert (first.sources["a"].transport, first.sources["a"].error) == ("nixl", "TransferTimeout")
    wait_for(lambda: target.fetch(span("a", keys)).here == (10,))
    assert firewall.pushed.count(10) <= module.FAILURES_MAX + 1  # one may have met the fence


# -- without movers ---------------------------------------------------------------------------


class Scene:
    """Links by `first` and `second` to a mover `m`."""

    def __init__(self, arena: Arena) -> None:
        self.now = 100.0
        self.transports: list[list[str]] = []
        self.is_gone = False
        memory = np.zeros(8, dtype=np.uint8)
        self.fenced = {
            name: FencedSlots(arena, ObjectRefTransport(memory)) for name in ("first", "second")
        }
        self.links = PeerLinks(
            self.fenced, Mock(lease=self._lease), call_timeout_s=1.0, now=lambda: self.now
        )
        self.links.connect(["m"])

    def _lease(self, mover: str, request: LeaseRequest, *, timeout_s: float) -> ReadLease:
        self.transports.append(list(request.addresses))
        if self.is_gone:
            raise ShardUnavailable("It is gone.")
        return ReadLease(token=1, transport=next(iter(request.addresses)), groups=())

    def count_handshakes(self, seconds: float) -> int:
        before = len(self.transports)
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            self.links.handshake()
        return len(self.transports) - before

    def fail(self, transport: str) -> None:
        self.links.fail("m", transport, "It broke.")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    arena = make_arena(tmp_path, asked=spec())
    yield Scene(arena)
    arena.close()


def test_a_node_gets_a_handshake_about_once_a_minute_and_when_an_end_was_renewed(scene):
    for num_renewed in (1, 2):
        scene.links.handshake()
        scene.links.handshake()
        assert scene.transports == [["first", "second"]] * num_renewed
        scene.fenced["first"].incarnation += 1  # as `settle` does behind the fence
    scene.links.handshake()
    assert 5 <= scene.count_handshakes(600) <= 21


def test_who_does_not_answer_gets_fewer_and_fewer_handshakes_and_nothing_is_left_out(scene):
    scene.is_gone = True
    assert 5 <= scene.count_handshakes(120) <= 10
    assert scene.count_handshakes(1200) <= 21
    assert scene.links.transports_for("m") == ["first", "second"]
    assert scene.links.status() == []


def test_failures_in_a_row_leave_a_transport_out_unless_all_are(scene):
    scene.fail("first")
    scene.links.succeed("m", "first", 0)
    scene.fail("first")
    assert scene.links.transports_for("m") == ["first", "second"]
    scene.fail("first")
    assert scene.links.transports_for("m") == ["second"]
    assert scene.links.transports_for("another") == ["first", "second"]
    scene.links.handshake()
    assert scene.transports == [["second"]]
    scene.now += 10
    scene.links.handshake()
    assert scene.transports == [["second"], ["first"]]
    assert scene.links.transports_for("m") == ["first", "second"]
    for transport in ("first", "second") * module.FAILURES_MAX:
        scene.fail(transport)
    assert scene.links.transports_for("m") == ["first", "second"]


def test_handshakes_that_arrive_do_not_excuse_fetches_that_never_do(scene):
    """As where small packets pass and large ones are lost."""
    num_failed = 0
    for _ in range(1200):
        scene.now += 0.5
        scene.links.handshake()
        if scene.links.transports_for("m")[0] == "first":
            scene.fail("first")
            scene.fenced["first"].incarnation += 1  # as `settle` does behind the fence
            num_failed += 1
    assert module.FAILURES_MAX < num_failed < 20, "it is tried again, and less and less often"
    scene.links.succeed("m", "first", scene.fenced["first"].incarnation)
    scene.fail("first")
    assert scene.links.transports_for("m") == ["first", "second"]


def test_nodes_that_are_gone_are_forgotten(scene):
    scene.fail("first")
    assert [link["failures"] for link in scene.links.status()] == [1]
    scene.links.connect(["another"])
    assert scene.links.status() == []
    scene.fail("first")
    assert scene.links.status() == []


def test_closing_ends_the_handshakes(scene):
    scene.links.start()
    wait_for(lambda: bool(scene.transports))
    scene.links.close()
    scene.links.close()
    scene.links.connect(["another"])
    count = len(scene.transports)
    time.sleep(2 * module._SWEEP_S)
    assert len(scene.transports) == count
