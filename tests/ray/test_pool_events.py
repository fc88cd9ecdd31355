"""The router in a real Ray Serve, with replicas that tell what their own pools have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.config import KVRayConfig
from kvray.events.pool_feed import PoolFeed
from tests.ray.test_router import NUM_REPLICAS, Stub, deployed
from tests.waiting import wait_for

serve = pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.ray]

BLOCK = 32
NUM_BLOCKS = 64
EVICT = "evict"


def own_prompt(name: str) -> list[int]:
    """Return a prompt that only the replica of this name has, though nobody sent it there."""
    seed = int.from_bytes(name.encode(), "little") % 2**32
    made: list[int] = np.random.default_rng(seed).integers(0, 30_000, NUM_BLOCKS * BLOCK).tolist()
    return [*made, 1]


class Telling(Stub):
    """Its pool has its own prompt until it is told to evict; nothing that it is asked gets in."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        tokens = own_prompt(self.name)
        blocks = [
            {"block_hash": at + 1, "tokens": tokens[at * BLOCK : (at + 1) * BLOCK]}
            for at in range(NUM_BLOCKS)
        ]
        self.events: list[Any] = [
            {"event_id": 0, "data": {"type": "stored", "parent_hash": None, "blocks": blocks}}
        ]
        self.feed = PoolFeed(self.drain, block_size=BLOCK, host="127.0.0.1")

    def drain(self) -> list[Any]:
        told, self.events = self.events, []
        return told

    async def generate(self, asked: Any) -> str:
        if asked == EVICT:
            gone = {"type": "removed", "block_hashes": [*range(1, NUM_BLOCKS + 1)]}
            self.events = [{"event_id": 1, "data": gone}]
        return self.name

    def record_routing_stats(self) -> dict[str, Any]:
        return {**super().record_routing_stats(), "kv_event_metadata": self.feed.metadata}


def test_a_prompt_goes_where_its_blocks_are_told_of_until_they_are_evicted(
    running: KVRayConfig, tmp_path: Path
) -> None:
    with deployed(running, tmp_path, Telling, request_routing_stats_period_s=0.5) as ask:
        names: set[str] = set()
        wait_for(lambda: names.add(ask("text")) or len(names) == NUM_REPLICAS, "all replicas")
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
