"""One local Ray for the session, a tier on it for a test, and engines that know nothing of Ray."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import ray

from kvray.actors.build_info import settings_of
from kvray.actors.owner.ownership import sweep
from kvray.actors.ray_glue import calls
from kvray.actors.tier import connection, local_ray, tier
from kvray.actors.tier.changes import plan
from kvray.actors.tier.local_ray import LocalRay
from kvray.actors.tier.rollout import Rollout
from kvray.config import KVRayConfig, load_config
from kvray.errors import KVRayError
from kvray.lab.chaos.machine import Machine, actors_of
from kvray.lab.chaos.network import why_impossible
from tests.kit.ray.cluster import OFTEN
from tests.kit.ray.command_line import Shell, open_shell
from tests.kit.ray.engine import Engine
from tests.waiting import wait_for

TIMEOUT_S = 120.0


def config_with(name: str = "t", **overrides: object) -> KVRayConfig:
    """Return the configuration of a small tier."""
    values = {
        "cluster_name": f"pytest-{os.getpid()}-{name}",
        "arena.capacity": "16MiB",
        "shard.heartbeat_s": 0.1,
        "shard.announce_s": 0.02,
    }
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(overrides=values | dotted, environ={})


@pytest.fixture(scope="session")
def local() -> Iterator[LocalRay]:
    """A local Ray of this session's own, to which this process is connected."""
    before = dict(os.environ)
    name = config_with().cluster_name
    started = local_ray.start(name, die_with_parent=True)
    try:
        connection.connect_configured(config_with())
        yield started
    finally:
        ray.shutdown()
        local_ray.stop(name)
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def config(local: LocalRay) -> Iterator[KVRayConfig]:
    """The configuration of a tier that is ended after the test, whatever it did."""
    made = config_with()
    yield made
    tier.down(timeout_s=TIMEOUT_S, config=made)
    sweep(made.node_dir, 5.0)
    assert not made.node_dir.exists()


@pytest.fixture(scope="session")
def steady(local: LocalRay) -> Iterator[KVRayConfig]:
    """The configuration of a tier that tests share."""
    made = config_with()
    tier.up(made, timeout_s=TIMEOUT_S)
    yield made
    tier.down(timeout_s=TIMEOUT_S, config=made)
    sweep(made.node_dir, 5.0)


@pytest.fixture
def running(steady: KVRayConfig) -> Iterator[KVRayConfig]:
    """The configuration of a tier that is up, without blocks; a test may break or change it."""
    yield steady
    if not is_whole(steady):
        tier.up(steady, timeout_s=TIMEOUT_S, rollout=Rollout(recreate=True))
    wait_for(is_empty, "an empty tier")


def is_whole(config: KVRayConfig) -> bool:
    """Return whether all parts of a tier on one node answer, and have its settings."""
    parts = calls.ask(calls.list_actors(), "build_info", TIMEOUT_S)
    if len(parts) != 3 or any(isinstance(one, KVRayError) for one in parts.values()):
        return False
    return not plan(parts, settings_of(config)).steps


def is_empty() -> bool:
    """Clear the tier; return whether no block is left, as what a dead engine has leased is."""
    with contextlib.suppress(KVRayError):
        tier.clear(timeout_s=TIMEOUT_S)
        shard = shard_status()
        return "arena" in shard and not shard["arena"]["blocks"]
    return False


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    """Two nodes with disks, on a Ray of their own, for one tier after the other."""
    with Machine(has_nvme=True, environ=OFTEN) as made:
        yield made


@pytest.fixture(scope="session")
def wired_machine() -> Iterator[Machine]:
    """Two nodes with cables, where this machine allows that; otherwise as `machine`."""
    with Machine(has_network=why_impossible() is None) as made:
        yield made


@pytest.fixture
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    """A user's shell with the name of a tier that each test file has for itself."""
    with open_shell(request.module.__name__.rpartition("_")[2]) as made:
        yield made


@pytest.fixture
def engine() -> Iterator[Callable[[KVRayConfig], Engine]]:
    """Starts engines for a tier, and ends them."""
    engines: list[Engine] = []

    def start(config: KVRayConfig) -> Engine:
        engines.append(Engine(config.node_dir))
        return engines[-1]

    yield start
    for one in engines:
        one.close()


def actor_process(local: LocalRay, kind: str) -> psutil.Process:
    """Return the process of the only actor whose class or repr begins with `kind`."""
    found = actors_of(psutil.Process(local.pid).children(recursive=True), kind)
    assert len(found) == 1, found
    return found[0]


@contextlib.contextmanager
def frozen(*processes: psutil.Process) -> Iterator[None]:
    """Have processes stand still for the time of a block, which they need not outlive."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def shard_status(timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return what the tier says of its only shard."""
    (shard,) = tier.status(timeout_s=timeout_s)["shards"]
    return dict(shard)
