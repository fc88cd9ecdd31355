"""Calls behind breakers: what has failed costs nothing, and is tried again; how fast peers are."""

import asyncio
from typing import Any

import pytest

from kvray.actors.mover.orders import FetchOrder, FetchReport, SourceReport, Span
from kvray.actors.staging import peers as peers_module
from kvray.actors.staging import peers as rates_module
from kvray.actors.staging.peers import Peers, Rates, mover_of
from kvray.actors.staging.plan import Peer
from kvray.errors import ConfigError, ShardUnavailable

SPAN = Span(source="kvray-mover-b", part=0, keys=bytes(32), parent=b"", depth=0)
ORDER = FetchOrder(spans=(SPAN,), deadline_s=3.0)


class Line:
    """Other actors: answers in turn, or errors."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str, float]] = []
        self.args: list[tuple[Any, ...]] = []
        self.now = 100.0
        self.is_slow = False

    async def ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((actor, method, timeout_s))
        self.args.append(args)
        if self.is_slow:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def peers(self) -> Peers:
        return Peers("kvray-shard-a", self.ask, call_timeout_s=1.0, now=lambda: self.now)


def report(**fields: Any) -> FetchReport:
    known = {"num_blocks": 1, "num_bytes": 10**7, "seconds": 0.01, "transport": "nixl"}
    return FetchReport(here=(1,), sources={"kvray-mover-b": SourceReport(**known | fields)})


async def ping(peers: Peers) -> None:
    peers.tick(0.0, num_shards=0)
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_call_that_failed_is_not_made_again_until_a_ping_was_answered():
    async def scene() -> None:
        line = Line(ShardUnavailable("No answer."), None, "ok")
        peers = line.peers()
        for _ in range(3):
            with pytest.raises(ShardUnavailable, match="No answer"):
                await peers.call("lookup", "x")
        await ping(peers)
        assert [call[1] for call in line.calls] == ["x"]
        line.now += 0.3
        await ping(peers)
        assert await peers.call("lookup", "x") == "ok"
        assert [call[1] for call in line.calls] == ["x", "ping", "x"]

    asyncio.run(scene())


def test_who_does_not_answer_costs_no_request_any_time():
    async def scene() -> None:
        line = Line(*[ShardUnavailable("No answer.")] * 50)
        peers = line.peers()
        with pytest.raises(ShardUnavailable, match="No answer"):
            await peers.call("b", "x")
        for _ in range(100):
            line.now += 1
            await ping(peers)
            with pytest.raises(ShardUnavailable, match="left alone"):
                await peers.call("b", "x")
        methods = [call[1] for call in line.calls]
        assert methods.count("x") == 1
        assert 10 < methods.count("ping") < 40

    asyncio.run(scene())


def test_there_is_one_ping_at_a_time_and_none_is_left_behind():
    async def scene() -> None:
        line = Line(ShardUnavailable("No answer."))
        peers = line.peers()
        with pytest.raises(ShardUnavailable):
            await peers.call("b", "x")
        line.now += 0.3
        line.is_slow = True
        for _ in range(3):
            await ping(peers)
        assert [call[1] for call in line.calls] == ["x", "ping"]
        peers.close()
        peers.close()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scene())


def test_an_error_that_it_answers_with_is_an_answer():
    line = Line(ConfigError("No."), "ok")
    peers = line.peers()
    with pytest.raises(ConfigError):
        asyncio.run(peers.call("b", "x"))
    assert asyncio.run(peers.call("b", "x")) == "ok"


def test_deadlines_are_those_of_the_work_and_of_an_answer():
    line = Line("ok", report())
    peers = line.peers()
    asyncio.run(peers.call("b", "x"))
    asyncio.run(peers.fetch(ORDER))
    assert [timeout_s for _, _, timeout_s in line.calls] == [1.0, 4.0]
    assert line.calls[1][0] == "kvray-mover-a"


def test_a_source_that_failed_is_not_asked_for_blocks_for_a_while():
    async def scene() -> None:
        failed = report(num_bytes=0, error="TransferTimeout", message="Late.")
        line = Line(failed, None, report())
        peers = line.peers()
        await peers.fetch(ORDER)
        shards = ["kvray-shard-b", "kvray-shard-c"]
        assert list(peers.may_ask(shards, without=frozenset())) == ["kvray-shard-c"]
        line.now += 0.3
        await ping(peers)
        assert peers.may_ask(shards, without=frozenset())["kvray-shard-b"].has_failed
        await peers.fetch(ORDER)
        known = peers.may_ask(shards, without=frozenset())["kvray-shard-b"]
        assert (known.has_failed, known.bytes_per_s) == (False, pytest.approx(1e9))

    asyncio.run(scene())


def test_what_is_no_fault_of_the_source_is_not_held_against_it():
    line = Line(report(error="CapacityError", message="Full."))
    peers = line.peers()
    asyncio.run(peers.fetch(ORDER))
    assert not peers.may_ask(["kvray-shard-b"], without=frozenset())["kvray-shard-b"].has_failed


def test_neither_itself_nor_who_is_left_out_is_asked():
    peers = Line().peers()
    shards = ["kvray-shard-a", "kvray-shard-b", "kvray-shard-c"]
    without = frozenset({mover_of("kvray-shard-c")})
    assert list(peers.may_ask(shards, without=without)) == ["kvray-shard-b"]


def test_where_ranks_are_is_known_for_seconds():
    line = Line({0: "a"}, {0: "b"}, {0: "c"})
    peers = line.peers()

    def ask() -> Any:
        return asyncio.run(peers.homes("replica"))

    assert ask() == {0: "a"}
    assert ask() == {0: "a"}
    line.now += 2.1
    assert ask() == {0: "b"}
    peers.forget_homes("replica")
    assert ask() == {0: "c"}


def test_a_person_sees_transport_rate_and_breaker_of_each():
    line = Line(report(), ShardUnavailable("No answer."))
    peers = line.peers()
    asyncio.run(peers.fetch(ORDER))
    with pytest.raises(ShardUnavailable):
        asyncio.run(peers.call("kvray-lookup", "x"))
    lookup, own, other = peers.status()
    assert lookup == {
        "peer": "kvray-lookup",
        "transport": None,
        "bytes_per_s": None,
        "breaker": "open",
        "error": "No answer.",
    }
    assert (own["peer"], own["breaker"]) == ("kvray-mover-a", "closed")
    assert (other["transport"], other["bytes_per_s"]) == ("nixl", pytest.approx(1e9))


def test_as_many_peers_are_remembered_as_told(monkeypatch):
    monkeypatch.setattr(peers_module, "_BREAKERS_MAX", 3)
    peers = Line(*["ok"] * 5).peers()
    for number in range(5):
        asyncio.run(peers.call(f"peer {number}", "x"))
    assert len(peers.status()) == 3


def test_an_introduction_names_all_others_to_the_mover_and_warms_it():
    names = ["kvray-shard-c", "kvray-shard-a", "kvray-shard-b", "kvray-shard-0"]
    line = Line(names, None, FetchReport(here=()))
    asyncio.run(line.peers().connect())
    assert [call[:2] for call in line.calls] == [
        ("kvray-lookup", "shards"),
        ("kvray-mover-a", "connect"),
        ("kvray-mover-a", "fetch"),
    ]
    assert line.args[1] == (["kvray-mover-b", "kvray-mover-c", "kvray-mover-0"],)


def test_a_peer_that_the_tier_has_no_more_is_forgotten():
    line = Line(report(), report(error="TransferError", message="It broke."))
    peers = line.peers()
    asyncio.run(peers.fetch(ORDER))
    asyncio.run(peers.fetch(ORDER))
    gone, here = "kvray-mover-b", "kvray-mover-a"
    assert [one["peer"] for one in peers.status()] == [here, gone]
    line.answers = [["kvray-shard-a", "kvray-shard-c"], None, FetchReport(here=())]
    asyncio.run(peers.connect())
    assert [one["peer"] for one in peers.status()] == [here]
    assert peers.may_ask(["kvray-shard-b"], without=frozenset())["kvray-shard-b"].latency_s == 0


def test_a_mover_that_cannot_be_introduced_yet_is_not_held_against_it():
    line = Line(["kvray-shard-a", "kvray-shard-b"], ShardUnavailable("It starts."))
    peers = line.peers()
    with pytest.raises(ShardUnavailable):
        asyncio.run(peers.connect())
    assert peers.can_fetch


def test_every_shard_begins_with_another_one():
    names = [f"kvray-shard-{name}" for name in "dbac"]
    order = [name[-1] for name in Line().peers().may_ask(names, without=frozenset())]
    assert order == ["b", "c", "d"]
    other = Peers("kvray-shard-c", Line().ask, call_timeout_s=1.0)
    assert [name[-1] for name in other.may_ask(names, without=frozenset())] == ["d", "a", "b"]


def test_nodes_that_come_and_go_all_the_time_have_a_large_tier_ask_for_names_rarely():
    async def asked(num_shards: int) -> int:
        line = Line(*[[]] * 1000)
        peers = line.peers()
        for tenth in range(300):
            peers.tick(tenth / 10, num_shards=num_shards + tenth % 2)
            for _ in range(5):
                await asyncio.sleep(0)
        return [call[1] for call in line.calls].count("shards")

    assert asyncio.run(asked(2)) == 300, "a small one at every change"
    assert asyncio.run(asked(1000)) == 2


MB = 10**6


def note(
    rates: Rates, source: str, transport: str, *, num_bytes: int, seconds: float, now: float
) -> None:
    report = SourceReport(num_bytes=num_bytes, seconds=seconds, transport=transport)
    rates.note(source, report, now=now)


def test_a_large_fetch_tells_the_rate_and_a_small_one_the_latency():
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=1000, seconds=0.01, now=0.0)
    note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.11, now=0.0)
    rate = rates.peer("b", 0.0)
    assert rate.latency_s == 0.01
    assert rate.bytes_per_s == pytest.approx(1e9)


def test_new_measurements_count_more_the_newer_they_are():
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.1, now=0.0)
    for _ in range(20):
        note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.2, now=0.0)
    rate = rates.peer("b", 0.0)
    assert rate.bytes_per_s == pytest.approx(0.5e9, rel=0.01)


def test_transports_are_measured_apart_and_the_last_one_counts():
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.1, now=0.0)
    note(rates, "b", "object_ref", num_bytes=100 * MB, seconds=1.0, now=1.0)
    assert rates.latest()["b"].transport == "object_ref"
    assert rates.peer("b", 1.0).bytes_per_s == pytest.approx(1e8)


def test_what_is_old_says_nothing():
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=100 * MB, seconds=0.1, now=0.0)
    assert rates.peer("b", 31.0) == Peer()
    assert rates.peer("c", 0.0) == Peer()
    assert rates.latest()["b"].bytes_per_s == pytest.approx(1e9)


def test_nothing_that_came_measures_nothing():
    rates = Rates()
    note(rates, "b", "nixl", num_bytes=0, seconds=1.0, now=0.0)
    note(rates, "b", "nixl", num_bytes=5 * MB, seconds=0.0, now=0.0)
    assert rates.peer("b", 0.0) == Peer()


def test_of_too_many_rates_the_one_used_longest_ago_goes(monkeypatch):
    monkeypatch.setattr(rates_module, "_RATES_MAX", 2)
    rates = Rates()
    for source in ("b", "c", "b", "d"):
        note(rates, source, "nixl", num_bytes=5 * MB, seconds=0.1, now=0.0)
    assert sorted(rates.latest()) == ["b", "d"]
