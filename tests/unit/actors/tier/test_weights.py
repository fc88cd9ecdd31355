"""A client's call reaches all ranks of an engine, or says that it has not."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvray.actors.tier import tier
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError, ShardUnavailable

Answers = dict[str, dict[int, int] | KVRayError]


class Cluster:
    """A lookup that knows on which shards a replica has ranks, and what those answer."""

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
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.mark.parametrize(("version", "text"), [("a", "a"), (7, "7"), (0, "0"), (None, None)])
def test_every_shard_of_the_replica_is_told_once(cluster, version, text):
    cluster.ranks = {0: "a", 1: "a", 2: "b", 3: "b"}
    cluster.answers = {"a": {0: 4, 1: 4}, "b": {2: 4, 3: 4}}
    assert cluster.name(version) == [0, 1, 2, 3]
    assert cluster.told == [("a", text), ("b", text)]


B_IS_GONE = ShardUnavailable("b is gone.")
LOST: dict[str, tuple[dict[int, str], Answers, type[KVRayError], str]] = {
    "a shard": ({0: "a", 1: "b"}, {"a": {0: 2}, "b": B_IS_GONE}, ShardUnavailable, "b is gone"),
    "rank 1": ({0: "a"}, {"a": {0: 2}}, ShardUnavailable, r"Ranks \[1\] of replica 'one'"),
    "rank 0": ({1: "a"}, {"a": {1: 2}}, ShardUnavailable, r"Ranks \[0\] of replica 'one'"),
    "the engine": ({}, {}, ConfigError, "No engine of a replica 'one' is connected"),
    "it meanwhile": ({0: "a"}, {"a": {}}, ConfigError, "No engine of a replica 'one'"),
}


@pytest.mark.parametrize("who", LOST)
def test_who_is_not_there_to_be_told_is_named(cluster, who):
    cluster.ranks, cluster.answers, kind, words = LOST[who]
    with pytest.raises(kind, match=words):
        cluster.name("2")


@pytest.mark.parametrize("version", ["", "x" * 257, True, 1.5, b"2", []])
def test_what_is_no_version_is_refused_before_anybody_is_told(cluster, version):
    cluster.ranks, cluster.answers = {0: "a"}, {"a": {0: 1}}
    with pytest.raises(ConfigError, match="A version of weights is a number, or a text"):
        cluster.name(version)
    assert cluster.told == []
