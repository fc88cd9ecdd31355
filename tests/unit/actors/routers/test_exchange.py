"""What routers tell each other: each hears every other once, in order, and none itself."""

import pytest

pytest.importorskip("ray")

from kvray.actors.routers.exchange import Exchange


def test_each_router_hears_the_others_once_and_in_order():
    made = Exchange()
    cursor_a, heard, num_routers = made.exchange("a", None, [("done", "1")])
    assert (heard, num_routers) == ([], 1)
    cursor_b, heard, num_routers = made.exchange("b", None, [("done", "2")])
    assert (heard, num_routers) == ([], 2), "what was before a router came is nothing to it"
    cursor_a, heard, _ = made.exchange("a", cursor_a, [("done", "3"), ("token", "4")])
    assert heard == [("done", "2")]
    cursor_b, heard, _ = made.exchange("b", cursor_b, [])
    assert heard == [("done", "3"), ("token", "4")]
    assert made.exchange("a", cursor_a, [])[1] == made.exchange("b", cursor_b, [])[1] == []


def test_a_router_that_is_not_heard_any_more_does_not_count(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("kvray.actors.routers.exchange.time.monotonic", lambda: now[0])
    made = Exchange()
    made.exchange("a", None, [])
    assert made.exchange("b", None, [])[2] == 2
    now[0] = 60.0
    assert made.exchange("b", 0, [])[2] == 1


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr("kvray.actors.routers.exchange._KEPT_MAX", 4)
    made = Exchange()
    cursor, _, _ = made.exchange("a", None, [])
    made.exchange("b", None, [("done", str(number)) for number in range(9)])
    assert [one for _, one in made.exchange("a", cursor, [])[1]] == ["5", "6", "7", "8"]
