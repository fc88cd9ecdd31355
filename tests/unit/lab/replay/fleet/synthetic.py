"""Traces of which all is known, and a small fleet for them."""

import random
from typing import Any

from kvray.lab.replay import Trace
from kvray.lab.replay.fleet import FleetPlan
from kvray.lab.replay.reading import TraceBuilder
from kvray.routing import Link, Rates

RATES = Rates(
    prefill_tokens_per_s=1000.0,
    token_bytes=1.0,
    host=Link(bytes_per_s=1e5),
    remote=Link(bytes_per_s=1e4),
)


def plan(num_replicas: int = 8, **fields: Any) -> FleetPlan:
    """Return a fleet that computes a block of 100 tokens in 0.1 s, and copies it in 1 or 11 ms."""
    known = {"pool_blocks": 100, "host_blocks": 1000, "rates": RATES, "deadline_s": 2.0}
    return FleetPlan(num_replicas=num_replicas, **known | fields)


def trace_of(*prompts: tuple[float, str]) -> Trace:
    """Return requests of a time and a letter for each block."""
    builder = TraceBuilder(name="letters", block_tokens=100)
    for time_s, letters in prompts:
        builder.add(time_s=time_s, num_tokens=100 * len(letters), ids=[*map(ord, letters)])
    return builder.build()


def random_trace(
    num_requests: int, *, shared_blocks: int, own_blocks: int, load: float, replicas: int = 8
) -> Trace:
    """Return requests with a prefix that all of them share, at a load of what is their own."""
    numbers, builder = random.Random(7), TraceBuilder(name="random", block_tokens=100)
    rate = load * replicas / (0.1 * own_blocks)
    now, block = 0.0, shared_blocks
    for _ in range(num_requests):
        now += numbers.expovariate(rate)
        count = numbers.randint(1, 2 * own_blocks - 1)
        ids = [*range(shared_blocks), *range(block, block + count)]
        block += count
        builder.add(time_s=now, num_tokens=100 * len(ids), ids=ids)
    return builder.build()


def conversations(num_users: int, *, turns: int, load: float, replicas: int) -> Trace:
    """Return users who each say a few blocks more in every turn, at a load with all that reuse."""
    numbers, builder = random.Random(7), TraceBuilder(name="conversations", block_tokens=100)
    rate, now, block = load * replicas / (0.1 * 3), 0.0, 1
    said: dict[int, list[int]] = {user: [0] for user in range(num_users)}
    for _ in range(num_users * turns):
        now += numbers.expovariate(rate)
        ids = said[numbers.randrange(num_users)]
        count = numbers.randint(1, 5)
        ids += range(block, block + count)
        block += count
        builder.add(time_s=now, num_tokens=100 * len(ids), ids=ids.copy())
    return builder.build()
