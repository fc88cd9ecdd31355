"""What `kvray size` predicts on two busy nodes, beside what is counted there, for minutes."""

import json
import random
import time
from typing import Any

import pytest

from kvray.lab.chaos.machine import Machine
from tests.kit.ray.cluster import (
    PATIENT,
    Sharing,
    open_sharing,
    open_tier,
    prompts_that_begin_alike,
)
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

CAPACITY_MIB = 24
NUM_PROMPTS = 900
PROMPTS_PER_S = 5.0
"""So few that blocks stay for longer than four seconds, below which the policy knows no ages."""
SLACK = 0.03
"""Beside the error that is said: what counts as not sure."""


def counted(status: dict[str, Any]) -> tuple[int, int]:
    """Return how many prompt tokens hit on all ranks, and how many there were."""
    ranks = [rank["counters"] for shard in status["shards"] for rank in shard["replicas"]]
    hits = sum(one.get("local_tokens", 0) + one.get("hit_tokens", 0) for one in ranks)
    return hits, sum(one.get("prompt_tokens", 0) for one in ranks)


def run(machine: Machine, name: str, capacity_mib: int) -> tuple[float, dict[str, Any]]:
    """Have two replicas answer the same prompts each time, more than fit.

    Returns the share of prompt tokens that hit in the second half, and what `kvray size` says.
    """
    settings = {**PATIENT, "arena": {**PATIENT["arena"], "capacity": f"{capacity_mib}MiB"}}
    settings["arena"] |= {"slab": "4MiB"}
    prompts, chance = prompts_that_begin_alike(), random.Random(7)
    with open_tier(machine, name, settings) as tier, open_sharing(tier, num_blocks=64) as sharing:

        def ask(count: int) -> None:
            begun = time.monotonic()
            for number in range(count):
                time.sleep(max(0.0, begun + number / PROMPTS_PER_S - time.monotonic()))
                replica = chance.choice([sharing.first, sharing.second])
                replica.generate([next(prompts)], max_tokens=1)

        ask(NUM_PROMPTS // 2)
        before = counted_after(sharing, NUM_PROMPTS // 2)
        ask(NUM_PROMPTS - NUM_PROMPTS // 2)
        after = counted_after(sharing, NUM_PROMPTS)
        (entry,) = json.loads(tier.say("size", "--now", "--json"))["namespaces"]
    hits, prompts = (late - early for early, late in zip(before, after, strict=True))
    return hits / prompts, entry


def counted_after(sharing: Sharing, num_prompts: int) -> tuple[int, int]:
    wait_for(lambda: counted(sharing.status())[1] >= num_prompts * 544, "the engines' reports")
    return counted(sharing.status())


def predicted(entry: dict[str, Any], part: float) -> tuple[float, float]:
    """Return the share that is predicted for so many times the memory, and what it may be off."""
    at = entry["sizes"].index(int(entry["host_bytes"] * part))
    found = sum(entry[name][at] for name in ("host", "disk", "remote"))
    return entry["own"] + found, 2 * entry["error"][at]


def test_predictions_for_the_memory_of_today_and_for_half_are_what_is_counted():
    with Machine() as machine:
        whole, said = run(machine, "whole", CAPACITY_MIB)
        half, said_of_half = run(machine, "half", CAPACITY_MIB // 2)
    print(f"whole: counted {whole:.3f}", json.dumps(said))  # a failure shows it
    print(f"half: counted {half:.3f}", json.dumps(said_of_half))
    assert whole - half > 2 * SLACK, "memory is worth something here"
    for share, entry in ((whole, said), (half, said_of_half)):
        assert entry["is_sure"]
        assert abs(share - entry["measured"]) < 0.01
        assert abs(share - entry["predicted"]) <= SLACK
    share, off = predicted(said, 0.5)
    assert abs(share - half) <= off + SLACK
