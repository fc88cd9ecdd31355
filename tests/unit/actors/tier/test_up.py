"""What `up` makes of parts that cannot be started, and of a supervisor that is there no more."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvray.actors.names import SUPERVISOR_NAME, shard_name
from kvray.actors.tier import rollout, tier
from kvray.actors.tier.changes import Plan
from kvray.config import KVRayConfig
from kvray.errors import KVRayError, ShardUnavailable

SHARD = shard_name("a" * 12)
WHY = "An actor of the tier is gone (ModuleNotFoundError: No module named 'kvray')."


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

    def up(self) -> Any:
        return tier.up(KVRayConfig(), timeout_s=30.0)

    def _ask_shards(self, method: str, timeout_s: float) -> dict[str, KVRayError]:
        if not self.has_supervisor:
            raise ShardUnavailable("There is no supervisor.")
        return {SHARD: ShardUnavailable("It is not there; run `kvray up`.")}

    def _ask_all(self, methods: dict[str, str], timeout_s: float) -> dict[str, KVRayError]:
        return {name: ShardUnavailable(method) for name, method in methods.items()}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_shard_that_cannot_be_started_ends_the_wait_with_its_reason(cluster):
    cluster.has_supervisor, cluster.faults[SHARD] = True, WHY
    with pytest.raises(ShardUnavailable, match=f"{SHARD} cannot be started: .*No module named"):
        cluster.up()


def test_a_supervisor_that_has_ended_for_good_ends_the_wait_with_its_reason(cluster):
    with pytest.raises(ShardUnavailable, match=r"not answer\. An actor .*No module named"):
        cluster.up()


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


def test_nobody_waits_for_a_part_that_an_ended_tier_does_not_restart(cluster, monkeypatch):
    def get_actor(name: str) -> Any:
        raise ShardUnavailable(f"There is no actor {name}.")

    monkeypatch.setattr(rollout.calls, "get_actor", get_actor)
    with pytest.raises(ShardUnavailable, match="no actor"):
        rollout._await(SHARD, 60.0, rollout.SILENT)
