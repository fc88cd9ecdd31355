"""A router's notes on their way to the shards."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from kvray.actors.routers.reports import Reports
from kvray.errors import ShardUnavailable
from kvray.trace.routing_note import ROUTING_NOTES_MAX, RoutingNote, unpack_routing


class Tier:
    """The `Ask` of shards, one of which is gone."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, list[RoutingNote]]] = []

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> None:
        if actor == "gone":
            raise ShardUnavailable("It is gone.")
        assert method == "routed"
        self.taken.append((actor, [*map(unpack_routing, args[0])]))


def note(request: str, replica: str = "here", **more: Any) -> RoutingNote:
    return RoutingNote(request, 1.0, replica, 7, b"", "fallback", **more)


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Tier:
    monkeypatch.setattr("kvray.actors.routers.reports._EVERY_S", 0.01)
    return Tier()


def sent(tier: Tier, *notes: RoutingNote) -> None:
    async def send() -> None:
        homes = {"here": "s1", "there": "gone"}
        reports = Reports(tier, "test", lambda name: homes.get(name, ""))
        for one in notes:
            reports.add(one)
        if reports._sending is not None:
            await reports._sending

    asyncio.run(send())


def test_a_shard_gets_the_last_note_of_each_of_its_requests(tier: Tier) -> None:
    last = note("one", outcome="answered", first_token_s=0.5)
    sent(tier, note("one"), note("two"), last, note("lost", "there"), note("nobody's", "unknown"))
    assert tier.taken == [("s1", [last, note("two")])]


def test_of_too_many_the_oldest_go(tier: Tier) -> None:
    sent(tier, *(note(str(number)) for number in range(ROUTING_NOTES_MAX + 2)))
    ((_, taken),) = tier.taken
    assert len(taken) == ROUTING_NOTES_MAX
    assert taken[0].request == "2"
