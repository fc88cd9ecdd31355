"""Calls behind breakers: what has failed costs nothing, and is tried again; how fast peers are."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvray.actors.mover.orders import FetchOrder, FetchReport, SourceReport, Span
from kvray.actors.staging import peers as peers_module
from kvray.actors.staging.peers import Peers, Rate, mover_of
from kvray.actors.staging.plan import Peer
from kvray.errors import ConfigError, ShardUnavailable

pytestmark = pytest.mark.anyio

SPAN = Span(source="kvray-mover-b", part=0, keys=bytes(32), parent=b"", depth=0)
ORDER = FetchOrder(spans=(SPAN,), deadline_s=3.0)
NO_ANSWER = ShardUnavailable("No answer.")


class Line:
    """Other actors: answers in turn, or errors."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.calls: list[tuple[str, str, float, tuple[Any, ...]]] = []
        self.now = 100.0
        self.is_slow = False
        self.peers = Peers("kvray-shard-a", self.ask, call_timeout_s=1.0, now=lambda: self.now)

    async def ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((actor, method, timeout_s, args))
        if self.is_slow:
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def methods(self) -> list[str]:
        return [call[1] for call in self.calls]

    async def tick(self, now: float = 0.0, num_shards: int = 0) -> None:
        """Do what is due, and let it be answered."""
        self.peers.tick(now, num_shards=num_shards)
        for _ in range(10):
            await asyncio.sleep(0)

    def known(self) -> dict[str, Peer]:
        shards = ["kvray-shard-b", "kvray-shard-c"]
        return dict(self.peers.may_ask(shards, without=frozenset()))


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    made = Line()
    yield made
    made.peers.close()


@pytest.fixture
def peers(line: Line) -> Peers:
    return line.peers


def source(megabytes: float = 10, seconds: float = 0.01, **fields: Any) -> SourceReport:
    known = {"num_bytes": int(megabytes * 10**6), "seconds": seconds, "transport": "nixl"}
    return SourceReport(**known | fields)


def report(**fields: Any) -> FetchReport:
    return FetchReport(here=(1,), sources={"kvray-mover-b": source(num_blocks=1, **fields)})


async def test_a_call_that_failed_is_not_made_again_until_a_ping_was_answered(line, peers):
    line.answers = [ConfigError("An error is an answer."), *[NO_ANSWER] * 30]
    with pytest.raises(ConfigError):
        await peers.call("b", "x")
    for _ in range(100):
        with pytest.raises(ShardUnavailable, match="No answer"):
            await peers.call("b", "x")
        await line.tick()
        line.now += 1
        await line.tick()
    assert line.methods.count("x") == 2
    assert 10 < line.methods.count("ping") < 40
    line.answers, line.now = [None, "ok"], line.now + 9
    await line.tick()
    assert await peers.call("b", "x") == "ok"


async def test_there_is_one_ping_at_a_time_and_none_is_left_behind(line, peers):
    before = asyncio.all_tasks()
    line.answers = [NO_ANSWER]
    with pytest.raises(ShardUnavailable):
        await peers.call("b", "x")
    await line.tick()
    assert line.methods == ["x"], "not at once"
    line.now += 0.3
    line.is_slow = True
    for _ in range(3):
        await line.tick()
    assert line.methods == ["x", "ping"]
    peers.close()
    peers.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_deadlines_are_those_of_the_work_and_of_an_answer(line, peers):
    line.answers = ["ok", report()]
    await peers.call("b", "x")
    await peers.fetch(ORDER)
    assert [call[2] for call in line.calls] == [1.0, 4.0]
    assert line.calls[1][0] == "kvray-mover-a"


async def test_a_source_that_failed_is_not_asked_for_blocks_for_a_while(line, peers):
    failed = report(num_bytes=0, error="TransferTimeout", message="Late.")
    no_fault = report(error="CapacityError", message="Full.")
    too_much = report(error="TransferTimeout", message="Late, for all that came.")
    line.answers = [no_fault, too_much, failed, None, report()]
    for _ in range(2):
        await peers.fetch(ORDER)
        assert not line.known()["kvray-shard-b"].has_failed
    await peers.fetch(ORDER)
    assert list(line.known()) == ["kvray-shard-c"]
    line.now += 0.3
    await line.tick()
    assert line.known()["kvray-shard-b"].has_failed
    await peers.fetch(ORDER)
    known = line.known()["kvray-shard-b"]
    assert (known.has_failed, known.bytes_per_s) == (False, pytest.approx(1e9))


async def test_where_ranks_are_is_known_for_seconds(line, peers):
    line.answers = [{0: "a"}, {0: "b"}, {0: "c"}]
    assert [await peers.homes("replica") for _ in range(2)] == [{0: "a"}] * 2
    line.now += 2.1
    assert await peers.homes("replica") == {0: "b"}
    peers.forget_homes("replica")
    assert await peers.homes("replica") == {0: "c"}


async def test_as_many_peers_are_remembered_as_told(line, peers, monkeypatch):
    monkeypatch.setattr(peers_module, "_ACTORS_MAX", 3)
    line.answers = ["ok"] * 5
    for number in range(5):
        await peers.call(f"peer {number}", "x")
    assert len(peers.status()) == 3


async def test_every_shard_begins_with_another_one_and_leaves_itself_and_some_out(peers):
    names = [f"kvray-shard-{name}" for name in "dbac"]
    for without, order in ((set(), "bcd"), ({mover_of("kvray-shard-c")}, "bd")):
        asked = peers.may_ask(names, without=frozenset(without))
        assert [name[-1] for name in asked] == [*order]
    other = Peers("kvray-shard-c", Line().ask, call_timeout_s=1.0)
    assert [name[-1] for name in other.may_ask(names, without=frozenset())] == ["d", "a", "b"]


# -- the mover is connected with the others -------------------------------------------------------


async def test_an_introduction_names_all_others_to_the_mover_and_warms_it(line, peers):
    names = ["kvray-shard-c", "kvray-shard-a", "kvray-shard-b", "kvray-shard-0"]
    line.answers = [names, ShardUnavailable("It starts.")]
    with pytest.raises(ShardUnavailable):
        await peers.connect()
    assert peers.can_fetch, "which is not held against the mover"
    line.answers = [names, None, FetchReport(here=())]
    await peers.connect()
    assert [call[:2] for call in line.calls[2:]] == [
        ("kvray-lookup", "shards"),
        ("kvray-mover-a", "connect"),
        ("kvray-mover-a", "fetch"),
    ]
    assert line.calls[3][3] == (["kvray-mover-b", "kvray-mover-c", "kvray-mover-0"],)


async def test_a_peer_is_shown_to_people_until_the_tier_has_it_no_more(line, peers):
    line.answers = [report(), report(error="TransferError", message="It broke.")]
    for _ in range(2):
        await peers.fetch(ORDER)
    here, gone = peers.status()
    assert (here["peer"], here["transport"], here["breaker"]) == ("kvray-mover-a", None, "closed")
    assert gone == {
        "peer": "kvray-mover-b",
        "transport": "nixl",
        "bytes_per_s": pytest.approx(1e9),
        "latency_s": None,
        "breaker": "open",
        "error": "It broke.",
    }
    line.answers = [["kvray-shard-a", "kvray-shard-c"], None, FetchReport(here=())]
    await peers.connect()
    assert [one["peer"] for one in peers.status()] == ["kvray-mover-a"]
    assert line.known()["kvray-shard-b"].latency_s == 0


async def test_it_connects_as_soon_as_there_are_others_and_again_from_time_to_time(line):
    line.answers = [["kvray-shard-a", "kvray-shard-b"], None, FetchReport(here=())] * 3
    line.answers[6:6] = [NO_ANSWER]
    connects = ["shards", "connect", "fetch"]
    for now, num_shards, asked in (
        (10.0, 0, []),
        (10.0, 1, []),
        (11.0, 2, connects),
        (11.1, 2, []),
        (11.2, 3, connects),
        (17.0, 3, ["shards"]),  # which has no answer
        (23.0, 3, connects),
    ):
        before = len(line.methods)
        await line.tick(now, num_shards)
        assert line.methods[before:] == asked


@pytest.mark.parametrize(("num_shards", "num_asked"), [(2, 300), (1000, 2)])
async def test_nodes_that_come_and_go_have_a_large_tier_ask_rarely(line, num_shards, num_asked):
    line.answers = [[]] * 1000
    for tenth in range(300):
        await line.tick(tenth / 10, num_shards + tenth % 2)
    assert line.methods.count("shards") == num_asked


# -- how fast they are ----------------------------------------------------------------------------


FETCHES = {
    "the rate by large ones": ([(0.001, 0.01, 0), (100, 0.11, 0)], 0.0, 0.01, 1e9),
    "what is old says nothing": ([(100, 0.1, 0)], 31.0, 0.0, None),
    "nothing that came measures nothing": ([(0, 1.0, 0), (5, 0.0, 0)], 0.0, 0.0, None),
    "the newest count most": ([(100, 0.1, 0), *[(100, 0.2, 0)] * 20], 0.0, 0.0, 0.5e9),
    "as fast as a small one at least": ([(64, 64.0, 0), (0.5, 0.001, 5)], 5.0, 0.001, 5e8),
    "a bad moment is no latency of large ones": ([(0.5, 1.0, 0), (64, 0.064, 5)], 5.0, 0.032, 2e9),
    "what is forgotten has no weight": ([(64, 64.0, 0), (64, 0.064, 31)], 31.0, 0.0, 1e9),
}
"""Megabytes, seconds, and when it was, of each; then the present, the latency and the rate."""


@pytest.mark.parametrize(
    ("fetches", "now", "latency_s", "bytes_per_s"), FETCHES.values(), ids=FETCHES
)
def test_what_fetches_tell_of_the_one_that_sends(fetches, now, latency_s, bytes_per_s):
    rate = Rate()
    assert rate.peer(0.0) == Peer()
    for megabytes, seconds, at in fetches:
        rate.note(source(megabytes, seconds), now=at)
    found = rate.peer(now)
    assert found.latency_s == pytest.approx(latency_s)
    assert found.bytes_per_s == (bytes_per_s and pytest.approx(bytes_per_s, rel=0.01))


def test_transports_are_measured_apart_and_the_last_one_counts():
    rate = Rate()
    rate.note(source(100, 0.1), now=0.0)
    rate.note(source(100, 1.0, transport="object_ref"), now=1.0)
    assert rate.transport == "object_ref"
    assert rate.peer(1.0).bytes_per_s == pytest.approx(1e8)
    assert rate.bytes_per_s == pytest.approx(1e8), "however old it is"
