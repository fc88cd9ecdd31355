"""The router in a real Ray Serve, with replicas that a real tier knows, or whose pools it knows."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from kvray.actors.tier.local_ray import local_dir
from kvray.config import KVRayConfig
from kvray.events.pool_feed import PoolFeed
from kvray.node import Registration, attach
from tests.kit.ray.cluster import scrape, total
from tests.kit.ray.engine import NAMESPACE
from tests.ray.conftest import TIMEOUT_S, actor_process, frozen
from tests.waiting import wait_for

serve = pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.ray]

NUM_REPLICAS = 3
BLOCK = 32
NUM_BLOCKS = 64
APP, TELL, EVICT = "stubs", "tell", "evict"

Ask = Callable[[Any], str]


def own_prompt(name: str) -> list[int]:
    """Return a prompt that only the replica of this name has, though nobody sent it there."""
    seed = int.from_bytes(name.encode(), "little") % 2**32
    made: list[int] = np.random.default_rng(seed).integers(0, 30_000, NUM_BLOCKS * BLOCK).tolist()
    return [*made, 1]


class Stub:
    """In an engine's place: registered with the tier by the name of its Serve replica.

    Once it is to tell of its pool, that has its own prompt until it is to evict it; nothing that it
    is asked gets in.
    """

    def __init__(self, directory: Path) -> None:
        self.name = str(serve.get_replica_context().replica_id.unique_id)
        self.link = attach(directory, label="stub", lock_wait_s=0.5, attach_retry_s=0.1)
        named = Registration(replica=self.name, rank=0, namespace=NAMESPACE, counters=dict)
        self.link.register(named)
        self.stats: dict[str, Any] = {"kvray_prefill_tokens_per_s": 10_000.0}
        self.events: list[Any] = []

    def drain(self) -> list[Any]:
        told, self.events = self.events, []
        return told

    async def generate(self, asked: Any) -> str:
        if asked == TELL and "kv_event_metadata" not in self.stats:
            tokens = own_prompt(self.name)
            blocks = [
                {"block_hash": at + 1, "tokens": tokens[at * BLOCK : (at + 1) * BLOCK]}
                for at in range(NUM_BLOCKS)
            ]
            stored = {"type": "stored", "parent_hash": None, "blocks": blocks}
            self.events = [{"event_id": 0, "data": stored}]
            self.feed = PoolFeed(self.drain, block_size=BLOCK, host="127.0.0.1")
            self.stats["kv_event_metadata"] = self.feed.metadata
        if asked == EVICT:
            gone = {"type": "removed", "block_hashes": [*range(1, NUM_BLOCKS + 1)]}
            self.events = [{"event_id": 1, "data": gone}]
        return self.name

    def record_routing_stats(self) -> dict[str, Any]:
        return self.stats


class Ingress:
    """A process with a handle: the router is in it."""

    def ask(self, asked: Any) -> str:
        return str(serve.get_app_handle(APP).generate.remote(asked).result(timeout_s=20))


@pytest.fixture(scope="module")
def ask(steady: KVRayConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Ask replicas behind the router; the one that answered is returned."""
    from ray.serve.config import RequestRouterConfig

    file = tmp_path_factory.mktemp("router") / "kvray.yaml"
    file.write_text(f"cluster_name: {steady.cluster_name}\n")
    router = RequestRouterConfig(
        request_router_class="kvray.serve.router:KvRayRouter",
        request_router_kwargs={"kvray_config": str(file), "timeout_s": 1.0},
        request_routing_stats_period_s=0.5,
    )
    deployment = serve.deployment(
        num_replicas=NUM_REPLICAS,
        max_ongoing_requests=8,
        request_router_config=router,
        ray_actor_options={"num_cpus": 0},
    )(Stub)
    serve.run(deployment.bind(steady.node_dir), name=APP, route_prefix=None)
    ingress = ray.remote(Ingress).options(num_cpus=0).remote()
    yield lambda asked: str(ray.get(ingress.ask.remote(asked), timeout=TIMEOUT_S))
    ray.kill(ingress)
    serve.shutdown()


def prompt(seed: int, num_tokens: int = 2048) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 30_000, num_tokens).tolist()
    return tokens


def wait_until_routed(ask: Ask) -> None:
    """Wait until the router knows with which shard the replicas are registered."""
    wait_for(lambda: len({ask(prompt(0)) for _ in range(8)}) == 1, "routing by prompts")


def test_a_prompt_goes_back_to_the_replica_that_had_it(ask):
    wait_until_routed(ask)
    first = {seed: ask(prompt(seed)) for seed in range(1, 10)}
    assert len(set(first.values())) == NUM_REPLICAS, "prompts with nothing in common are spread"
    again = {seed: ask(prompt(seed)) for seed in range(1, 10)}
    assert sum(first[seed] == again[seed] for seed in first) >= 8


def test_a_frozen_tier_costs_no_request(ask, local):
    wait_until_routed(ask)
    with frozen(*(actor_process(local, kind) for kind in ("Shard", "Lookup"))):
        began = time.monotonic()
        answers = Counter(ask(prompt(seed)) for seed in range(20, 60))
        took_s = time.monotonic() - began
    assert sum(answers.values()) == 40
    assert len(answers) == NUM_REPLICAS
    assert took_s < 10, "the deadline is waited for now and then only"


def test_calls_without_token_ids_are_spread(ask):
    assert len({ask("text") for _ in range(40)}) > 1


def test_metrics_say_why_requests_went_where_they_went(ask, steady):
    wait_until_routed(ask)

    def requests(reason: str) -> int:
        samples = scrape(local_dir(steady.cluster_name) / "ray")
        labels = {"reason": reason, "cluster_name": steady.cluster_name}
        return total(samples, "routed_requests_total", **labels)

    asked = prompt(100)
    for _ in range(5):
        ask(asked)
        ask("text")
    wait_for(
        lambda: requests("prefix") >= 4 and requests("fallback") >= 5,
        "the counts",
    )


def test_a_prompt_goes_where_its_blocks_are_told_of_until_they_are_evicted(ask):
    """Comes last: from here on the router goes by what the replicas tell of their pools."""
    names: set[str] = set()
    wait_for(lambda: names.add(ask(TELL)) or len(names) == NUM_REPLICAS, "all replicas")
    wait_for(
        lambda: all(ask(own_prompt(name)) == name for name in names),
        "routing by what engines tell",
    )
    assert all(ask(own_prompt(name)) == name for name in names for _ in range(5))
    evicted: set[str] = set()
    wait_for(lambda: evicted.add(ask(EVICT)) or evicted == names, "all evict")

    def are_spread() -> bool:
        return all(len({ask(own_prompt(name)) for _ in range(6)}) > 1 for name in names)

    wait_for(are_spread, "routing by what engines no longer have")
