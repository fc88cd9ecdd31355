"""Who is taken for frozen, and who is only not heard."""

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvray.actors.supervisor import supervisor as supervisor_module
from kvray.actors.supervisor import watch
from kvray.actors.supervisor.supervisor import SupervisorActor
from kvray.actors.supervisor.watch import Pings, Silences, reachable
from kvray.errors import ShardUnavailable


def heard(*names: str) -> Silences:
    """Silences of parts that all answered at 0."""
    silences = Silences(frozen_s=5, start_s=60)
    assert silences.note(names, names, 0) == []
    return silences


def test_a_part_that_is_silent_for_long_is_frozen() -> None:
    silences = heard("a", "b")

    assert silences.note({"a", "b"}, {"a"}, 1) == []
    assert silences.note({"a", "b"}, {"a"}, 4.9) == []
    assert silences.note({"a", "b"}, {"a"}, 5) == ["b"]


def test_an_answer_ends_a_silence() -> None:
    silences = heard("a")
    silences.note({"a"}, {"a"}, 4)

    assert silences.note({"a"}, set(), 8.9) == []
    assert silences.note({"a"}, set(), 9) == ["a"]


def test_a_part_that_was_ended_may_take_long_to_start() -> None:
    silences = heard("a")

    assert silences.note({"a"}, set(), 5) == ["a"]
    assert silences.note({"a"}, set(), 64) == []
    assert silences.note({"a"}, set(), 65) == ["a"]


def test_a_part_that_never_answered_may_take_long_to_start() -> None:
    silences = heard()

    assert silences.note({"a"}, set(), 1) == []
    assert silences.note({"a"}, set(), 60) == []
    assert silences.note({"a"}, set(), 61) == ["a"]


def test_a_part_that_answers_after_its_start_has_no_more_time_than_others() -> None:
    silences = heard()
    silences.note({"a"}, set(), 1)
    silences.note({"a"}, {"a"}, 2)

    assert silences.note({"a"}, set(), 7) == ["a"]


def test_a_part_that_is_no_more_is_forgotten() -> None:
    silences = heard("a")
    silences.note(set(), set(), 4)

    assert silences.note({"a"}, set(), 6) == []


def test_a_machine_is_reachable_if_its_ray_can_be_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert reachable({"a": node}, timeout_s=1)
    assert not reachable({"a": node}, timeout_s=1)


def test_nodes_that_are_cut_off_are_tried_all_at_once() -> None:
    # Of a network for documentation: nothing answers from there, as behind a cut cable.
    cut = {
        f"cut {n}": {"NodeManagerAddress": f"192.0.2.{n}", "NodeManagerPort": 1} for n in range(9)
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        began = time.monotonic()
        assert reachable(cut | {"here": here}, timeout_s=0.3) == {"here"}
        assert time.monotonic() - began < 1
    assert reachable({}, timeout_s=1) == frozenset()


def test_a_long_round_with_one_ping_missed_makes_no_part_frozen() -> None:
    silences = Silences(frozen_s=5, start_s=60, misses=3)
    silences.note({"a"}, {"a"}, 0)

    assert silences.note({"a"}, set(), 21) == [], "nobody asked it for 20 s"
    assert silences.note({"a"}, set(), 42) == []
    assert silences.note({"a"}, {"a"}, 63) == []
    assert silences.note({"a"}, set(), 84) == []
    assert silences.note({"a"}, set(), 105) == []
    assert silences.note({"a"}, set(), 126) == ["a"]


def test_a_part_that_says_it_starts_may_take_long() -> None:
    silences = heard("a")
    silences.note({"a"}, {"a"}, 1, starting={"a"})

    assert silences.note({"a"}, set(), 60) == []
    assert silences.note({"a"}, set(), 61) == ["a"]


def test_a_part_that_has_started_has_no_more_time_than_others() -> None:
    silences = heard("a")
    silences.note({"a"}, {"a"}, 1, starting={"a"})
    silences.note({"a"}, {"a"}, 2)

    assert silences.note({"a"}, set(), 7) == ["a"]


class Parts:
    """Actors whose pings are numbers, and what some of them were answered with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.answers: dict[int, Any] = {}
        monkeypatch.setattr(watch, "ray", self)

    def actor(self, name: str) -> Any:
        return SimpleNamespace(ping=SimpleNamespace(remote=lambda: self._ask(name)))

    def wait(self, pings: list[int], *, num_returns: int, timeout: float) -> Any:
        return [one for one in pings if one in self.answers], []

    def get(self, ping: int, timeout: float) -> Any:
        if isinstance(self.answers[ping], Exception):
            raise self.answers[ping]
        return self.answers[ping]

    def _ask(self, name: str) -> int:
        self.asked.append(name)
        return len(self.asked) - 1


def test_pings_tell_who_lives_who_starts_who_ended_and_who_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts(monkeypatch)
    actors = {name: parts.actor(name) for name in ("lives", "starts", "ended", "silent", "old")}
    parts.answers = {0: False, 1: True, 2: ShardUnavailable("It is gone."), 4: None}
    found = Pings(patience_s=60).round(actors, timeout_s=0)
    assert found.alive == {"lives", "starts", "old"}
    assert (found.starting, found.dead) == ({"starts"}, {"ended"})


def test_an_answer_that_comes_a_round_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, pings = Parts(monkeypatch), Pings(patience_s=60)
    actors = {"slow": parts.actor("slow")}
    assert not pings.round(actors, timeout_s=0).alive
    parts.answers[0] = False
    assert pings.round(actors, timeout_s=0).alive == {"slow"}
    assert parts.asked == ["slow"], "and it was not asked twice meanwhile"
    pings.round(actors, timeout_s=0)
    assert parts.asked == ["slow", "slow"]


def test_a_ping_that_may_be_lost_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, pings = Parts(monkeypatch), Pings(patience_s=-1)
    for _ in range(2):
        pings.round({"a": parts.actor("a")}, timeout_s=0)
    assert parts.asked == ["a", "a"]


# -- the supervisor ------------------------------------------------------------------------------


@pytest.fixture
def excused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Asks a supervisor whom it excuses; "cut" is a node that cannot be reached."""
    status: dict[str, Any] = {"shards": {"kvray-shard-a": {}, "kvray-shard-b": {}}, "silent": []}
    lookup = SimpleNamespace(status=status)
    monkeypatch.setattr(supervisor_module.calls, "get_actor", lambda name: lookup)
    monkeypatch.setattr(supervisor_module.calls, "call", lambda method, timeout_s: method)
    monkeypatch.setattr(
        supervisor_module, "reachable", lambda nodes, timeout_s: frozenset(nodes) - {"cut"}
    )

    def ask(silent: set[str], *, quiet: tuple[str, ...] = ()) -> Any:
        status["silent"] = list(quiet)
        homes = {"kvray-shard-a": "a", "kvray-shard-b": "b", "kvray-shard-c": "cut"}
        nodes: dict[str, Any] = {name: {} for name in ("a", "b", "cut")}
        supervisor = object.__new__(SupervisorActor)
        return supervisor._excused(silent, homes, nodes)

    return ask


def test_who_sends_heartbeats_to_the_lookup_is_not_frozen(excused: Any) -> None:
    assert excused({"kvray-shard-a", "kvray-shard-b"}, quiet=("kvray-shard-b",)) == {
        "kvray-shard-a"
    }


def test_who_is_cut_off_is_not_frozen(excused: Any) -> None:
    assert excused({"kvray-shard-c", "kvray-lookup"}) == {"kvray-shard-c"}
