"""How a mover finds the movers of other nodes by Ray."""

import threading

import pytest

from kvray.actors.mover import actor as actor_module
from kvray.actors.mover.actor import RayMovers
from kvray.errors import ShardUnavailable
from tests.waiting import wait_for


def test_look_ups_that_nobody_waits_for_any_more_are_not_made(monkeypatch):
    searched: list[str] = []
    has_head = threading.Event()

    def get_actor(name: str) -> str:
        searched.append(name)
        assert has_head.wait(30)
        return name

    monkeypatch.setattr(actor_module, "get_actor", get_actor)
    movers = RayMovers()
    for _ in range(20):
        with pytest.raises(ShardUnavailable, match="head"):
            movers._found("a", 0.01)
    has_head.set()
    wait_for(movers._lookups._work_queue.empty)
    assert movers._found("b", 30.0) == "b"
    assert searched == ["a", "a", "b"], "each of its threads was in one"
    movers._lookups.shutdown()
