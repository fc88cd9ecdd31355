"""What `up` makes of parts that cannot be started, and who is told of new weights."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvray.actors.names import SUPERVISOR_NAME, shard_name
from kvray.actors.tier import rollout, tier
from kvray.actors.tier.changes import Plan, Step
from kvray.config import KVRayConfig, load_config
from kvray.errors import ConfigError, KVRayError, ShardUnavailable

SHARD = shard_name("a" * 12)
WHY = "An actor of the tier is gone (ModuleNotFoundError: No module named 'kvray')."
FAULT = f"{SHARD} cannot be started: {WHY}"


class Cluster:
    """A cluster where the first parts have just been made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_supervisor = False
        self.faults: dict[str, str] = {}
        for name in ("proof_of", "create_lookup"):
            monkeypatch.setattr(tier, name, lambda *_: None)
        monkeypatch.setattr(tier, "create_supervisor", lambda _: SimpleNamespace(ping=WHY))
        monkeypatch.setattr(tier.calls, "list_actors", lambda *_: [])
        monkeypatch.setattr(tier.calls, "current_namespace", lambda: "kvray-kvray")
        monkeypatch.setattr(tier.calls, "ask_shards", self._ask_shards)
        monkeypatch.setattr(tier.calls, "ask", lambda *_: {SUPERVISOR_NAME: self.faults})
        monkeypatch.setattr(tier.calls, "ask_all", self._ask_all)

    def up(self, config: KVRayConfig | None = None) -> Any:
        return tier.up(config or KVRayConfig(), timeout_s=30.0)

    def _ask_shards(self, method: str, timeout_s: float) -> dict[str, KVRayError]:
        if not self.has_supervisor:
            raise ShardUnavailable("There is no supervisor.")
        return {SHARD: ShardUnavailable("It is not there; run `kvray up`.")}

    def _ask_all(
        self, methods: dict[str, str], timeout_s: float, meanwhile: Any = None
    ) -> dict[str, KVRayError]:
        return {name: ShardUnavailable(method) for name, method in methods.items()}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_shard_that_cannot_be_started_ends_the_wait_with_its_reason(cluster):
    cluster.has_supervisor, cluster.faults[SHARD] = True, FAULT
    with pytest.raises(ShardUnavailable, match=f"{SHARD} cannot be started: .*No module named"):
        cluster.up()


def test_a_supervisor_that_has_ended_for_good_ends_the_wait_with_its_reason(cluster):
    with pytest.raises(ShardUnavailable, match=r"not answer\. An actor .*No module named"):
        cluster.up()


def test_a_shard_that_died_where_ray_starts_none_is_not_waited_for(cluster, monkeypatch):
    cluster.has_supervisor = True
    monkeypatch.setattr(tier, "going", lambda: {"a" * 12})
    (shard,) = cluster.up()
    assert shard["state"] == "unreachable"


def test_a_label_that_no_node_has_ends_no_shard(cluster, monkeypatch):
    monkeypatch.setattr(tier.calls, "list_actors", lambda *_: [SHARD])
    monkeypatch.setattr(tier, "look", lambda *_, **__: Plan(ends=("a" * 56,)))
    monkeypatch.setattr(tier, "ask_to_be_admitted", lambda *_, **__: None)
    monkeypatch.setattr("ray.nodes", list)
    monkeypatch.setattr(tier, "carry_out", lambda *_, **__: pytest.fail("it has ended the shard"))
    with pytest.raises(ConfigError, match="has the label 'pool=bgi'"):
        cluster.up(load_config(environ={}, overrides={"shard.label": "pool=bgi"}))


def test_a_tier_that_is_ended_while_its_parts_restart_is_not_started_again(cluster, monkeypatch):
    made: list[str] = []
    monkeypatch.setattr(tier.calls, "list_actors", lambda prefix="": [] if prefix else [SHARD])
    monkeypatch.setattr(tier, "look", lambda *_, **__: Plan())
    monkeypatch.setattr(tier, "ask_to_be_admitted", lambda *_, **__: None)
    monkeypatch.setattr(rollout, "create_supervisor", lambda _: SimpleNamespace(ping=WHY))
    monkeypatch.setattr(tier, "create_supervisor", lambda _: made.append("supervisor"))
    with pytest.raises(ShardUnavailable, match=r"kvray down"):
        cluster.up()
    assert not made


def test_nobody_waits_for_a_part_that_an_ended_tier_does_not_restart_or_that_cannot_start(
    cluster, monkeypatch
):
    def get_actor(name: str) -> Any:
        raise ShardUnavailable(f"There is no actor {name}.")

    monkeypatch.setattr(rollout.calls, "get_actor", get_actor)
    with pytest.raises(ShardUnavailable, match="no actor"):
        rollout._await(SHARD, 60.0, rollout.SILENT)

    monkeypatch.setattr(tier.calls, "list_actors", lambda prefix: [prefix])
    monkeypatch.setattr(rollout, "going", set)
    cluster.faults[SHARD] = FAULT
    with pytest.raises(ShardUnavailable, match="No module named"):
        rollout._await(SHARD, 60.0, rollout.SILENT)


def test_no_shard_ends_for_a_supervisor_that_cannot_start(cluster, monkeypatch):
    planned = Plan(steps=tuple(Step(name=one, reasons=("",)) for one in (SUPERVISOR_NAME, SHARD)))
    ended: list[str] = []
    monkeypatch.setattr(rollout, "going", set)
    monkeypatch.setattr(rollout, "_end", lambda name, *_, **__: ended.append(name))
    monkeypatch.setattr(rollout, "create_supervisor", lambda _: SimpleNamespace(ping=WHY))
    with pytest.raises(ShardUnavailable, match="No module named"):
        rollout.carry_out(planned, KVRayConfig(), timeout_s=1.0, observer=rollout.SILENT)
    assert ended == [SUPERVISOR_NAME]


# -- new weights ----------------------------------------------------------------------------------


Answers = dict[str, dict[int, int] | KVRayError]


class Replica:
    """Of which a lookup knows on which shards it has ranks, and those answer so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks: dict[int, str] = {}
        self.answers: Answers = {}
        self.told: list[tuple[str, Any]] = []
        monkeypatch.setattr(tier, "ask_to_be_admitted", lambda config, timeout_s: None)
        monkeypatch.setattr(tier.calls, "get_actor", self._actor)
        monkeypatch.setattr(tier.calls, "call", lambda method, *args, timeout_s: method(*args))
        monkeypatch.setattr(tier.calls, "ask_all", self._ask_all)

    def _actor(self, name: str) -> Any:
        return SimpleNamespace(replica=lambda replica: self.ranks, set_weights_version=name)

    def _ask_all(self, methods: dict[str, str], timeout_s: float, *args: Any) -> Answers:
        _, version, wait_s = args
        assert wait_s < timeout_s
        self.told += [(shard, version) for shard in sorted(methods)]
        return {shard: self.answers[shard] for shard in methods}

    def name(self, version: Any) -> list[int]:
        return tier.set_weights_version("one", version, config=KVRayConfig(), timeout_s=9.0)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    return Replica(monkeypatch)


@pytest.mark.parametrize(("version", "text"), [("a", "a"), (7, "7"), (0, "0"), (None, None)])
def test_every_shard_of_the_replica_is_told_once(replica, version, text):
    replica.ranks = {0: "a", 1: "a", 2: "b", 3: "b"}
    replica.answers = {"a": {0: 4, 1: 4}, "b": {2: 4, 3: 4}}
    assert replica.name(version) == [0, 1, 2, 3]
    assert replica.told == [("a", text), ("b", text)]


B_IS_GONE = ShardUnavailable("b is gone.")
LOST: dict[str, tuple[dict[int, str], Answers, type[KVRayError], str]] = {
    "a shard": ({0: "a", 1: "b"}, {"a": {0: 2}, "b": B_IS_GONE}, ShardUnavailable, "b is gone"),
    "rank 1": ({0: "a"}, {"a": {0: 2}}, ShardUnavailable, r"Ranks \[1\] of replica 'one'"),
    "rank 0": ({1: "a"}, {"a": {1: 2}}, ShardUnavailable, r"Ranks \[0\] of replica 'one'"),
    "the engine": ({}, {}, ConfigError, "No engine of a replica 'one' is connected"),
    "it meanwhile": ({0: "a"}, {"a": {}}, ConfigError, "No engine of a replica 'one'"),
}


@pytest.mark.parametrize("who", LOST)
def test_who_is_not_there_to_be_told_is_named(replica, who):
    replica.ranks, replica.answers, kind, words = LOST[who]
    with pytest.raises(kind, match=words):
        replica.name("2")


@pytest.mark.parametrize("version", ["", "x" * 257, True, 1.5, b"2", []])
def test_what_is_no_version_is_refused_before_anybody_is_told(replica, version):
    replica.ranks, replica.answers = {0: "a"}, {"a": {0: 1}}
    with pytest.raises(ConfigError, match="A version of weights is a number, or a text"):
        replica.name(version)
    assert replica.told == []
