"""What a rank tells its shard: its name, namespace, figures, and what it reads."""

import contextlib
import dataclasses
import threading
import time

import pytest

from kvray.actors.shard.shard import Shard
from kvray.errors import LayoutMismatch
from kvray.node import Registration
from kvray.node.stage_calls import ShardSocket
from kvray.store import PartRequest
from kvray.wire import FRAME_MAX
from tests.kit.shard_socket import StageServer
from tests.unit.actors.small_shard import NAMESPACE, OTHER_LAYOUT
from tests.unit.node.conftest import arena_of, registration
from tests.waiting import HANG_S, wait_for


def connected(shard: Shard) -> list[str]:
    return [entry["replica"] for entry in shard.status()["replicas"] if entry["connected"]]


def counted(shard: Shard) -> dict[str, dict[str, int]]:
    return {entry["replica"]: entry["counters"] for entry in shard.status()["replicas"]}


def test_a_registration_refused_later_is_named_once_and_keeps_no_other_waiting(
    make_shard, make_link, caplog
):
    link = make_link()
    first, last = registration(), registration("three")
    refused = registration("two", namespace=OTHER_LAYOUT)
    for one in (first, refused, last):
        link.register(one)
    shard = make_shard()
    wait_for(lambda: [*counted(shard)] == ["one", "three"])
    wait_for(lambda: refused.refusal)
    time.sleep(0.1)
    assert caplog.text.count("replica two is refused") == 1
    link.unregister(first)
    link.unregister(last)


def test_a_refused_rank_is_accepted_once_the_other_is_gone(shard, link, directory, monkeypatch):
    monkeypatch.setattr(link, "_report", lambda: None)  # one under way might register it, too
    waiting = registration("two", namespace=OTHER_LAYOUT)
    with contextlib.closing(ShardSocket(directory)) as other:
        rank = {"replica": "one", "rank": 0, "namespace": NAMESPACE.to_wire()}
        other.call("register", timeout_s=HANG_S, **rank)
        with pytest.raises(LayoutMismatch, match="Replicas two and one both claim"):
            link.register(waiting)
        assert waiting not in link._registrations
    wait_for(lambda: not connected(shard))
    link.register(waiting)
    assert waiting.accepted


def test_a_namespace_that_is_renewed_during_a_report_is_told_with_the_next(shard, link):
    renewed = dataclasses.replace(NAMESPACE, model="renewed")

    def counters() -> dict[str, int]:
        if one.namespace is NAMESPACE:
            one.namespace = renewed
        return {}

    one = registration(counters=counters)
    link.register(one)
    digest = renewed.digest().hex()[:8]
    wait_for(lambda: shard.status()["replicas"][0]["namespace"] == digest)
    wait_for(lambda: one.accepted)


def test_figures_that_fail_end_neither_thread_nor_link(link, caplog):
    link.register(registration(counters=lambda: {"a": 1 // 0}))
    wait_for(lambda: "a defect in the background" in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count("a defect in the background") == 1
    done = threading.Event()
    link.defer(arena_of(link), lambda arena: done.set() or True)
    assert done.wait(HANG_S)


def test_figures_that_no_frame_takes_are_refused_quietly(shard, link):
    link.register(registration("huge", counters=lambda: {"x" * FRAME_MAX: 1}))
    link.register(registration("two"))
    wait_for(lambda: counted(shard) == {"huge": {}, "two": {"hits": 3}})


def test_a_rank_tells_what_it_reads_and_where_it_holds_leases(directory, link):
    arena = arena_of(link)
    membership = arena.membership
    with StageServer(directory) as server:
        parts = (PartRequest(2), PartRequest(5, 16))
        link.register(registration(rank=1, part_requests=parts, num_ranks=4, adapters="plain"))
        link.detach()
    told = server.registered[0]
    assert {name: told[name] for name in ("wanted", "num_ranks", "holder", "adapters")} == {
        "wanted": [[2, None], [5, 16]],
        "num_ranks": 4,
        "holder": [arena.arena_id, *membership],
        "adapters": "plain",
    }


def test_a_rank_tells_its_place_in_the_next_arena_too(directory, shard, make_shard, link):
    link.register(registration())
    before = arena_of(link).arena_id
    shard.stop(retire=True, timeout_s=5)
    make_shard()
    with StageServer(directory) as server:
        link._socket.close()  # it may have told the shard before the server was there
        wait_for(lambda: server.registered, "being told again")
        assert server.registered[-1]["holder"][0] == arena_of(link).arena_id != before
        link.detach()


def test_a_rank_that_follows_its_leaders_name_has_no_other(shard, link):
    one = registration("process-7")
    link.register(one)
    one.rename("leader")
    one.rename("the leader")
    wait_for(lambda: connected(shard) == ["the leader"], "the other name")
    wait_for(lambda: counted(shard)["the leader"] == {"hits": 3}, "its figures")
    assert not counted(shard)["process-7"]


def test_two_engines_of_one_name_are_two_and_the_second_says_so(shard, make_link, caplog):
    one, two = registration("chat"), registration("chat", counters=lambda: {"hits": 10})
    for each in (one, two):
        make_link().register(each)
    assert one.replica == "chat"
    assert two.replica == f"chat-{two.instance}"
    assert "another living engine on this node is replica chat; this one goes by" in caplog.text
    both = {"chat": {"hits": 3}, two.replica: {"hits": 10}}
    wait_for(lambda: counted(shard) == both, "figures of both")


def test_a_name_that_is_taken_while_the_engine_gives_another_is_not_kept(
    shard, make_link, monkeypatch
):
    make_link().register(registration("chat"))
    two = registration("chat")
    take_name = Registration.take_name

    def rename_first(one: Registration, asked: str, given: object) -> None:
        if one is two and asked == "chat":
            two.rename("the leader")
        take_name(one, asked, given)

    monkeypatch.setattr(Registration, "take_name", rename_first)
    make_link().register(two)
    wait_for(lambda: connected(shard) == ["chat", "the leader"], "the leader's name, and no third")
