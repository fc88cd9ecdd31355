"""A shard without Ray for all tests of the folder, found through the environment as engines do."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.breaker import Breaker
from kvray.engine import prefix_finder
from kvray.node import link as link_module
from tests.kit.connector import PROMPT, Pair
from tests.kit.devices import HostDevice
from tests.kit.shard_socket import StageServer
from tests.kit.tier import SMALL, Tier, tier_environment
from tests.kit.two_nodes import TwoNodes

MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Variables that lead to a directory of this module's own; nothing runs there yet."""
    with tier_environment(**SMALL) as variables:
        yield variables


@pytest.fixture(scope="module")
def running_shard(environment: dict[str, str]) -> Iterator[Shard]:
    tier = Tier()
    yield tier.shard
    tier.stop()


@pytest.fixture
def shard(running_shard: Shard) -> Shard:
    running_shard.clear(10)
    return running_shard


@pytest.fixture
def server(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> Iterator[StageServer]:
    """A test between the shard and its engines: it says what other nodes have."""
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "5")
    with StageServer(shard._settings.directory) as made:
        yield made


@pytest.fixture(scope="module")
def running_nodes() -> Iterator[TwoNodes]:
    often = {"SHARD__HEARTBEAT_S": "0.05", "STAGING__HANDOVER_S": "0.1"}
    with tier_environment(**SMALL, **often, CONNECTOR__STAGE_WAIT_S="5") as variables:
        made = TwoNodes(Path(variables["KVRAY_ARENA__DIR"]))
        yield made
        made.close()


@pytest.fixture
def nodes(running_nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> TwoNodes:
    monkeypatch.setattr(link_module, "_REPORT_S", 0.02)
    monkeypatch.setattr(Breaker, "state", lambda *_: "closed")
    monkeypatch.setattr(prefix_finder, "_ABSENT_S", 0.0)
    running_nodes.gone.clear()
    running_nodes.clear()
    return running_nodes


@pytest.fixture(params=["host", "device"])
def make_pair(
    shard: Shard, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakePair]:
    """Make connectors that end with the test, with the code of either kind of pool."""
    if request.param == "device":
        monkeypatch.setattr("kvray.engine.cache_layout.CacheLayout.is_host", False)
        monkeypatch.setattr("kvray.engine.device.gpu.CudaDevice", lambda _: HostDevice())
        monkeypatch.setenv("KVRAY_CONNECTOR__VERIFY_ON_LOAD", "always")
    pairs: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        pairs.append(Pair(*args, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
    pairs.clear()


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()


@pytest.fixture
def warm(make_pair: MakePair) -> Pair:
    pair = make_pair()
    pair.store(PROMPT)
    return pair
