"""Who is taken for frozen, who is only not heard, and which nodes kvray leaves."""

import socket
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.actors.names import LOOKUP_NAME, mover_name, shard_name
from kvray.actors.supervisor import supervisor as supervisor_module
from kvray.actors.supervisor import watch
from kvray.actors.supervisor.supervisor import SupervisorActor
from kvray.actors.supervisor.watch import Answers, IdleNodes, Pings, Silences, reachable
from kvray.config import KVRayConfig
from kvray.errors import ShardUnavailable
from tests.examples import examples


@pytest.fixture
def silences() -> Silences:
    """Silences of parts, of which `a` and `b` answered at 0."""
    made = Silences(frozen_s=5, start_s=60)
    assert made.note({"a", "b"}, {"a", "b"}, 0) == []
    return made


FOR_29_S = "".join(f"b b {now} - | " for now in range(1, 30))
ROUNDS = {
    "who is silent for long is frozen": "ab a 1 - | ab a 4.9 - | ab a 5 b",
    "an answer ends a silence": "a a 4 - | a - 8.9 - | a - 9 a",
    "who was ended may take long to start": "a - 5 a | a - 64 - | a - 65 a",
    "who never answered may take long to start": "c - 1 - | c - 60 - | c - 61 c",
    "who answers after its start has no more time than others": "c - 1 - | c c 2 - | c - 7 c",
    "who says that it starts may take long": "a A 1 - | a - 60 - | a - 61 a",
    "who has started has no more time than others": "a A 1 - | a a 2 - | a - 7 a",
    "time in which nobody asked is no silence": f"{FOR_29_S}ab b 30 - | a - 33.9 - | a - 34 a",
    "who was heard of without being asked is not silent": "a - 4 - | - a 5 - | a - 9 - | a - 10 a",
}
"""A round is who is asked, who answers (as a capital: that it starts), when, and who is frozen."""


@pytest.mark.parametrize("rounds", ROUNDS.values(), ids=ROUNDS)
def test_who_is_frozen(silences, rounds):
    for one in rounds.split(" | "):
        asked, answered, now, frozen = (word.strip("-") for word in one.split())
        starting = {name.lower() for name in answered if name.isupper()}
        found = silences.note(set(asked), set(answered.lower()), float(now), starting=starting)
        assert found == list(frozen), now
        assert asked or not silences.silent


def test_a_part_whose_start_was_ended_has_twice_as_long_until_it_has_started():
    silences = Silences(frozen_s=5, start_s=60)
    ends = [now for now in range(2000) if silences.note({"a"}, set(), float(now))]
    assert [later - first for first, later in pairwise(ends)] == [120, 240, 480, 480, 480]
    silences.note({"a"}, {"a"}, 2000.0)
    assert [now for now in range(2001, 2100) if silences.note({"a"}, set(), now)] == [2005, 2065]


def test_a_part_that_is_no_more_is_forgotten(silences):
    silences.note(set(), set(), 4)
    silences.forget({"a"})
    assert silences.note({"a"}, set(), 6) == []


def test_nodes_that_can_be_connected_to_are_reachable_and_all_are_tried_at_once():
    def node(host: str, port: int) -> dict[str, Any]:
        return {"NodeManagerAddress": host, "NodeManagerPort": port}

    # Of a network for documentation: nothing answers from there, as behind a cut cable.
    cut = {f"cut {n}": node(f"192.0.2.{n}", 1) for n in range(9)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = node("127.0.0.1", server.getsockname()[1])
        began = time.monotonic()
        assert reachable(cut | {"here": here}, timeout_s=1) == {"here"}
        assert time.monotonic() - began < 6, "one after the other takes longer"
    assert reachable({"here": here}, timeout_s=1) == reachable({}, timeout_s=1) == frozenset()


def test_a_long_round_with_one_ping_missed_makes_no_part_frozen():
    silences = Silences(frozen_s=5, start_s=60, misses=3)
    silences.note({"a"}, {"a"}, 0)
    answers = {63: {"a"}}
    frozen = [silences.note({"a"}, answers.get(now, set()), now) for now in range(21, 127, 21)]
    assert frozen == [[], [], [], [], [], ["a"]], "nobody asked it for 20 s before each ping"


class Parts:
    """Actors whose pings are numbers, and what some of them were answered with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.answers: dict[int, Any] = {}
        monkeypatch.setattr(watch, "ray", self)

    def actor(self, name: str) -> Any:
        def ask() -> int:
            self.asked.append(name)
            return len(self.asked) - 1

        return SimpleNamespace(ping=SimpleNamespace(remote=ask))

    def wait(self, pings: list[int], *, num_returns: int, timeout: float) -> Any:
        return [one for one in pings if one in self.answers], []

    def get(self, ping: int, timeout: float) -> Any:
        if isinstance(self.answers[ping], Exception):
            raise self.answers[ping]
        return self.answers[ping]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    return Parts(monkeypatch)


def test_pings_tell_who_lives_who_starts_who_ended_and_who_is_silent(parts):
    actors = {name: parts.actor(name) for name in ("lives", "starts", "ended", "silent", "old")}
    parts.answers = {0: False, 1: True, 2: ShardUnavailable("It is gone."), 4: None}
    found = Pings(patience_s=60).round(actors, timeout_s=0)
    assert found.alive == {"lives", "starts", "old"}
    assert (found.starting, found.dead) == ({"starts"}, {"ended"})


def test_an_answer_that_comes_a_round_later_counts_and_a_ping_that_may_be_lost_is_repeated(parts):
    pings, actors = Pings(patience_s=60), {"slow": parts.actor("slow")}
    assert not pings.round(actors, timeout_s=0).alive
    parts.answers[0] = False
    assert pings.round(actors, timeout_s=0).alive == {"slow"}
    assert parts.asked == ["slow"], "and it was not asked twice meanwhile"
    pings.round(actors, timeout_s=0)
    pings._patience_s = -1.0
    pings.round(actors, timeout_s=0)
    assert parts.asked == ["slow"] * 3


# -- the supervisor ------------------------------------------------------------------------------


NUM_NODES, LEAVE_S = 1500, 30.0


def node_id(number: int) -> str:
    return f"{number:012d}"


class Tier:
    """Nodes that are recorded, and a supervisor whose rounds see who was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> None:
        self.asked: list[set[str]] = []
        self.looks = Mock(side_effect=lambda: self.nodes_now)
        self.made: list[tuple[str, float]] = []  # shards that were started, and when
        self.ended: list[str] = []
        self.mute: set[str] = set()  # answers no ping
        self.cut: set[str] = set()  # nodes
        self.now = 0.0
        self.draining: dict[str, float | None] = {}  # nodes that Ray wants to go
        self.unused: set[str] = set()
        self.told: list[tuple[Any, ...]] = []
        self.leaving: list[tuple[str, float]] = []  # nodes whose shards have so long to leave
        self.forgetting: set[str] = set()  # shards that have ended and still have their names
        self.answered: set[str] = set()  # those of them that have done so, or will not
        self.status: dict[str, Any] = {"shards": {}, "silent": []}
        self.nodes_now = [{"NodeID": node_id(n), "Alive": True} for n in range(num_nodes)]
        self.names = {shard_name(node["NodeID"]) for node in self.nodes_now}
        self.movers = {mover_name(node["NodeID"]) for node in self.nodes_now}
        lookup = SimpleNamespace(status=lambda: self.status)
        fakes = {
            "ray": SimpleNamespace(
                nodes=self.looks,
                kill=self.kill,
                wait=lambda asked, **_: ([one for one in asked if one in self.answered], []),
                get=self.get,
                exceptions=SimpleNamespace(RayError=RuntimeError),
                get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: ""),
            ),
            "time": SimpleNamespace(monotonic=lambda: self.now),
            "draining_nodes": lambda: self.draining,
            "unused_nodes": lambda: self.unused,
            "create_shard": self.make_shard,
            "create_mover": lambda node, _: mover_name(node),
            "reachable": lambda nodes, timeout_s: frozenset(nodes) - self.cut,
            "build_info_of": lambda *args: {},
            "calls.kill_actor": self.ended.append,
            "calls.list_actors": lambda: [*self.names, *self.movers, LOOKUP_NAME],
            "calls.get_actor": lambda _: lookup,
            "calls.call": lambda method, *args, timeout_s: method(*args),
            "calls.ask_all": lambda asked, _, by: {name: ask(by) for name, ask in asked.items()},
            "calls.set_up_process": lambda: None,
            "SupervisorActor._run": lambda self: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(f"{supervisor_module.__name__}.{name}", fake)
        self.supervisor = SupervisorActor(KVRayConfig(cluster_name="x"))
        self.supervisor._looked.set()
        monkeypatch.setattr(self.supervisor._pings, "round", self.ping)
        monkeypatch.setattr(self.supervisor._metrics, "attempt", lambda look, now: None)

    def make_shard(self, node: str, _: KVRayConfig) -> Any:
        self.made.append((node, self.now))

        class Shard(str):
            def ping(shard) -> None:
                raise ShardUnavailable("No module named 'kvray'.")

            drain = SimpleNamespace(remote=lambda *order: self.told.append((node, *order)))
            leave = SimpleNamespace(remote=lambda seconds: self.leave(node, seconds))

            def call_off_drain(shard, by: str) -> None:
                self.told.append((node, by))

        return Shard(shard_name(node))

    def leave(self, node: str, seconds: float) -> str:
        self.leaving.append((node, seconds))
        return node

    def get(self, node: str, timeout: float) -> bool:
        if shard_name(node) in self.names - self.forgetting:
            return False
        raise RuntimeError("it has ended")

    def kill(self, part: Any, *, no_restart: bool) -> None:
        assert not no_restart
        self.ended.append(part)

    def ping(self, parts: dict[str, Any], *, timeout_s: float) -> Answers:
        self.asked.append(set(parts))
        return Answers(alive=frozenset(parts) - self.mute, dead=frozenset())

    def hear(self, shards: set[str]) -> None:
        self.status["shards"] = {shard: {} for shard in shards}

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.supervisor._reconcile()
            self.now += 1.0


large = pytest.mark.parametrize("tier", [NUM_NODES], indirect=True)


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Tier:
    """Three nodes, or as many as its parameter says; the lookup hears all their shards."""
    made = Tier(monkeypatch, getattr(request, "param", 3))
    made.hear(made.names)
    return made


def test_a_node_that_ray_lost_is_told_of_until_its_host_is_back(tier):
    for number, node in enumerate(tier.nodes_now):
        node |= {"NodeManagerHostname": f"gpu-{number}", "NodeManagerAddress": f"10.0.0.{number}"}
    tier.rounds(1)
    wanted, lost = tier.nodes_now[1], tier.nodes_now[2]
    tier.draining = {wanted["NodeID"]: None}
    tier.rounds(1)
    wanted["Alive"] = lost["Alive"] = False
    tier.draining = {}  # Ray does not name the dead
    tier.rounds(3)
    host = {"name": "gpu-2", "ip": "10.0.0.2"}
    assert tier.supervisor.lost() == {lost["NodeID"][:12]: {"host": host, "s_ago": 3.0}}
    tier.nodes_now.append({**lost, "NodeID": node_id(9), "Alive": True})
    tier.rounds(1)
    assert tier.supervisor.lost() == {}
    tier.nodes_now[-1]["Alive"] = False
    tier.rounds(1)
    assert [*tier.supervisor.lost()] == [lost["NodeID"], node_id(9)]
    tier.now += 3600.0
    assert tier.supervisor.lost() == {}


def test_a_shard_that_cannot_be_started_is_tried_ever_less_often_and_its_fault_is_told(tier):
    tier.rounds(1)
    shard, well = shard_name(node_id(1)), shard_name(node_id(2))
    tier.names -= {shard, well}  # both have ended
    tier.mute = {shard}
    tier.hear(tier.names)
    tier.made.clear()
    tier.rounds(1)
    assert tier.made == [(node_id(1), 1.0), (node_id(2), 1.0)], "what served is replaced at once"
    assert tier.supervisor.faults() == {}
    tier.names.add(well)
    tier.rounds(130)
    assert [at for _, at in tier.made[2:]] == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 124.0]
    (why,) = tier.supervisor.faults().values()
    assert why.startswith(f"{shard} cannot be started: No module named 'kvray'.")
    tier.names.add(shard)
    tier.mute.clear()
    tier.rounds(1)
    assert tier.supervisor.faults() == {}


@pytest.mark.parametrize("tier", [100], indirect=True)
def test_every_round_asks_all_of_a_small_tier(tier):
    tier.rounds(5)
    assert tier.asked == [{*tier.names, *tier.movers, LOOKUP_NAME}] * 5
    assert tier.looks.call_count == 5


def test_a_shard_is_told_each_time_that_ray_wants_its_node_to_go_and_once_that_it_stays(tier):
    tier.rounds(1)
    tier.draining = {node_id(1): 30.0, "without a shard": None}
    tier.rounds(2)
    tier.draining = {}
    tier.rounds(2)
    assert tier.told == [(node_id(1), "Ray", 30.0)] * 2 + [(node_id(1), "Ray")]


@pytest.mark.parametrize(("given", "taken"), [(600.0, 600.0), (2.0, LEAVE_S), (None, LEAVE_S)])
def test_a_node_that_ray_drains_and_nobody_uses_has_the_time_that_ray_gives(tier, given, taken):
    tier.rounds(1)
    tier.unused, tier.draining = {node_id(1)}, {node_id(1): given}
    tier.rounds(3)
    assert tier.leaving == [(node_id(1), taken)]


def test_a_node_that_nobody_uses_loses_its_shard_until_somebody_does(tier):
    idle = node_id(1)
    tier.unused = {idle}
    tier.rounds(60)
    assert not tier.leaving
    tier.rounds(5)
    assert tier.leaving == [(idle, LEAVE_S)]
    assert idle in tier.supervisor.shards(), "it takes its time"
    tier.names.remove(shard_name(idle))
    tier.answered.add(idle)
    tier.rounds(5)
    assert idle not in tier.supervisor.shards()
    assert tier.ended == [mover_name(idle)]
    tier.unused = set()
    tier.rounds(1)
    assert idle in tier.supervisor.shards()


def test_a_shard_that_has_left_and_still_has_its_name_is_not_started_again(tier):
    idle = node_id(1)
    tier.unused = tier.answered = {idle}
    tier.forgetting = {shard_name(idle)}
    tier.rounds(65)
    tier.names.remove(shard_name(idle))
    tier.rounds(70)
    assert idle not in tier.supervisor.shards()
    assert tier.ended == [mover_name(idle)]


def test_a_shard_that_an_engine_uses_stays_and_is_asked_again(tier):
    tier.unused = tier.answered = {node_id(1)}
    tier.rounds(150)
    assert tier.leaving == [(node_id(1), LEAVE_S)] * 2
    assert node_id(1) in tier.supervisor.shards()
    assert not tier.ended


@large
def test_a_round_asks_no_more_parts_however_many_there_are_and_those_not_heard_in_turn(tier):
    tier.rounds(8)
    assert [len(one) for one in tier.asked] == [201] * 8
    assert all(LOOKUP_NAME in one for one in tier.asked)
    assert set().union(*tier.asked) == tier.movers | {LOOKUP_NAME}, "shards are heard"
    assert tier.looks.call_count == 3, "at 500 nodes a second"
    tier.hear(set())
    tier.asked.clear()
    tier.rounds(15)
    assert set().union(*tier.asked) == tier.names | tier.movers | {LOOKUP_NAME}


@large
def test_a_frozen_part_is_found_among_many_that_are_cut_off(tier):
    tier.rounds(20)
    tier.cut = {node_id(n) for n in range(NUM_NODES - 1)}
    gone = {shard_name(node) for node in tier.cut}
    frozen = mover_name(node_id(NUM_NODES - 1))
    tier.mute = {frozen, *gone, *map(mover_name, tier.cut)}
    tier.status["silent"] = sorted(gone)
    tier.rounds(15 + 5)
    assert tier.ended == [frozen]
    assert max(map(len, tier.asked)) == 201


def test_the_shards_of_living_nodes_are_named_to_the_lookup_after_the_first_look(tier):
    tier.supervisor._looked.clear()
    with pytest.raises(ShardUnavailable, match="not looked"):
        tier.supervisor.shard_names()
    tier.supervisor._looked.set()
    tier.rounds(1)
    assert set(tier.supervisor.shard_names()) == tier.names
    tier.nodes_now[0]["Alive"] = False
    tier.rounds(1)
    assert set(tier.supervisor.shard_names()) == tier.names - {shard_name(node_id(0))}


def test_who_answers_the_lookup_or_is_cut_off_is_not_frozen(tier):
    tier.rounds(1)
    tier.mute = tier.names | tier.movers
    tier.status["silent"] = [shard_name(node_id(n)) for n in (0, 1)]
    tier.cut = {node_id(0)}
    tier.rounds(6)
    movers = {mover_name(node_id(n)) for n in (1, 2)}
    assert {*tier.ended} == movers | {shard_name(node_id(1))}


# -- nodes that are left --------------------------------------------------------------------------


NODES = st.frozensets(st.sampled_from("abc"))


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(NODES, NODES, st.floats(0, 8)), max_size=20), st.sampled_from([10.0, None])
)
def test_nodes_are_left_that_are_to_go_and_none_that_was_in_use_within_the_time(rounds, after_s):
    idle, now, used_at = IdleNodes(after_s), 0.0, dict.fromkeys("abc", 0.0)
    went: set[str] = set()  # were to go at some time since somebody used them
    for unused, going, step in rounds:
        now += step
        used_at |= dict.fromkeys(set("abc") - unused, now)
        went = went & unused | going
        idle.note(unused, going, now)
        due = {node for node, at in used_at.items() if after_s and now - at >= after_s}
        assert idle.left <= went | due
        assert going <= idle.left <= unused | going
