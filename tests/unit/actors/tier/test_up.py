"""What `up` makes of parts that cannot be started, and of a supervisor that is there no more."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvray.actors.names import SUPERVISOR_NAME, shard_name
from kvray.actors.tier import tier
from kvray.config import KVRayConfig
from kvray.errors import KVRayError, ShardUnavailable

SHARD = shard_name("a" * 12)
WHY = "An actor of the tier is gone (ModuleNotFoundError: No module named 'kvray')."


class Cluster:
    """A cluster where the first parts have just been made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_supervisor = False
        self.faults: dict[str, str] = {}
        for name in ("proof_of", "_check_namespace", "create_lookup"):
            monkeypatch.setattr(tier, name, lambda *_: None)
        monkeypatch.setattr(tier, "create_supervisor", lambda _: SimpleNamespace(ping=WHY))
        monkeypatch.setattr(tier.calls, "list_actors", lambda *_: [])
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
    with pytest.raises(ShardUnavailable, match=r"ended for good: .*No module named"):
        cluster.up()
