"""What is planned to be brought: all that helps, nothing that does not, from those who have it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.actors.staging.plan import (
    CHUNK_BLOCKS,
    Mask,
    Peer,
    Prefix,
    StagingPlan,
    longest_prefix,
    plan_staging,
)
from kvray.index import Run
from kvray.store import PartRequest
from tests.examples import examples
from tests.unit.actors.nodes import prefix_of
from tests.unit.store.small_arena import chain

MB = 10**6


def request(num_blocks: int, *requests: PartRequest, seconds_per_block: float = 0.0) -> Prefix:
    made = prefix_of(chain(num_blocks), *requests, seconds_per_block=seconds_per_block)
    return replace(made, block_bytes=dict.fromkeys(made.block_bytes, MB))


def nothing(of: Prefix) -> dict[int, Mask]:
    return {one.part: np.zeros(of.num_blocks, dtype=bool) for one in of.parts}


def plan(asked: Prefix, *runs: Any, **peers: Peer) -> StagingPlan:
    """Plan with runs (end, shard=parts), where no block is here."""
    known = [Run(stop=stop, holders=holders) for stop, holders in runs]
    return plan_staging(asked, nothing(asked), known, peers or {"b": Peer(), "c": Peer()})


B, C = {"b": 1}, {"c": 1}
FAST, SLOW = Peer(bytes_per_s=9e9), Peer(bytes_per_s=0.3e9)


CHUNKS = [n * CHUNK_BLOCKS for n in range(5)]
DOUBTFUL = replace(FAST, has_failed=True)
PLANS = {
    "one piece of one shard": (request(300), [(300, B)], {}, [("b", 0, 0, 300)]),
    "a long run is dealt out in prefix order": (
        *(request(CHUNKS[4]), [(CHUNKS[4], B | C)], {}),
        [("bc"[n % 2], 0, CHUNKS[n], CHUNKS[n + 1]) for n in range(4)],
    ),
    "of a part with a window only the last blocks": (
        *(request(10, PartRequest(0), PartRequest(1, 3)), [(10, {"b": 0b11})], {}),
        [("b", 0, 0, 10), ("b", 1, 7, 10)],
    ),
    "a short run from the one that has all of it": (
        *(request(40), [(3, B | C), (40, C)], {"b": FAST, "c": SLOW}, [("c", 0, 0, 40)]),
    ),
    "of a doubtful shard what nobody else has": (
        *(request(10), [(6, B | C), (10, B)], {"b": DOUBTFUL, "c": SLOW}),
        [("c", 0, 0, 6), ("b", 0, 6, 10)],
    ),
    "a prefix is cut where only a slow shard goes on": (
        *(request(10, seconds_per_block=0.001), [(6, B), (10, C)], {"b": FAST, "c": SLOW}),
        [("b", 0, 0, 6)],
    ),
}


@pytest.mark.parametrize(("asked", "runs", "peers", "steps"), PLANS.values(), ids=PLANS)
def test_what_helps_comes_from_who_has_it_and_gives_it_fast(asked, runs, peers, steps):
    found = plan(asked, *runs, **peers)
    assert [(step.shard, step.part, step.start, step.stop) for step in found.steps] == steps
    is_whole = steps[-1][3] == asked.num_blocks
    assert found.reason == ("none" if is_whole else "cheaper_to_recompute")


def test_the_faster_shard_gives_more():
    run = 16 * CHUNK_BLOCKS, B | C
    given = {"b": 0, "c": 0}
    for step in plan(request(run[0]), run, b=Peer(bytes_per_s=1e9), c=Peer(bytes_per_s=3e9)).steps:
        given[step.shard] += step.stop - step.start
    assert given == {"b": 4 * CHUNK_BLOCKS, "c": 12 * CHUNK_BLOCKS}


@pytest.mark.parametrize(
    ("num_blocks", "ms_per_block", "peer", "comes"),
    [
        (10, 1, Peer(bytes_per_s=0.9e9), False),  # 1.1 ms for a block of 1 ms
        (10, 1, Peer(bytes_per_s=1.1e9), True),  # 0.9 ms for a block of 1 ms
        (10, 1, Peer(bytes_per_s=1e12, latency_s=0.02), False),  # 20 ms for 10 ms
        (30, 1, Peer(bytes_per_s=1e12, latency_s=0.02), True),  # 20 ms for 30 ms
        (10, 1e-6, Peer(), True),  # what was not measured is tried
    ],
)
def test_what_takes_longer_than_computing_it_does_not_come(num_blocks, ms_per_block, peer, comes):
    found = plan(
        request(num_blocks, seconds_per_block=ms_per_block / 1000), (num_blocks, B), b=peer
    )
    expected = (num_blocks, "none") if comes else (0, "cheaper_to_recompute")
    assert (found.num_blocks, found.reason) == expected
    assert bool(found.steps) == comes


# -- many nodes, and long prompts -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_blocks", "num_parts", "num_shards", "stride", "most"),
    [
        pytest.param(1990, 1, 50, 7, 64, id="every block is elsewhere"),
        pytest.param(200, 32, 64, 1, 32 * 4, id="parts are on many nodes"),
    ],
)
def test_what_is_on_many_nodes_comes_bit_by_bit(num_blocks, num_parts, num_shards, stride, most):
    parts = range(num_parts)
    runs = []
    for block in range(num_blocks):
        holders = {f"s{(block * stride + part) % num_shards}": 1 << part for part in parts}
        runs.append(Run(stop=block + 1, holders=holders))
    peers = {f"s{number}": Peer() for number in range(num_shards)}
    asked = request(num_blocks + 10, *map(PartRequest, parts))
    here = nothing(asked)
    while (planned := plan_staging(asked, here, runs, peers)).steps:
        assert len(planned.steps) <= most
        for step in planned.steps:
            here[step.part][step.start : step.stop] = True
    assert longest_prefix(asked, here) == num_blocks


def test_of_very_many_holders_some_are_chosen_that_have_all_parts():
    peers = {f"s{number:03}": Peer() for number in range(300)}
    holders = dict.fromkeys(list(peers)[:-1], 1) | {"s299": 2}
    asked = request(4096, PartRequest(0), PartRequest(1))
    plan = plan_staging(asked, nothing(asked), [Run(stop=4096, holders=holders)], peers)
    assert plan.num_blocks == 4096
    assert len({step.shard for step in plan.steps}) <= 16


def test_of_a_window_far_behind_much_that_is_here_the_end_is_found():
    asked = request(500, PartRequest(0), PartRequest(1, 4))
    here = nothing(asked) | {0: np.ones(500, dtype=bool)}
    runs = [Run(stop=block + 1, holders={f"s{block % 2}": 1}) for block in range(496)]
    runs.append(Run(stop=500, holders={"s0": 3}))
    plan = plan_staging(asked, here, runs, {"s0": Peer(), "s1": Peer()})
    assert [(step.part, step.start, step.stop) for step in plan.steps] == [(1, 496, 500)]
    assert plan.reason == "none"


SHARDS = ("b", "c", "d")
wanted_parts = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.integers(1, 5)),
    min_size=1,
    max_size=4,
    unique_by=lambda one: one[0],
)


@settings(max_examples=examples(100))
@given(data=st.data())
def test_a_plan_makes_exactly_its_prefix_usable(data):
    num_blocks = data.draw(st.integers(1, 12))
    asked = replace(
        request(num_blocks, *(PartRequest(*one) for one in data.draw(wanted_parts))),
        seconds_per_block=data.draw(st.sampled_from([0.0, 0.001])),
    )
    blocks = st.lists(st.booleans(), min_size=num_blocks, max_size=num_blocks)
    here = {one.part: np.array(data.draw(blocks)) for one in asked.parts}
    bits = st.dictionaries(st.sampled_from(SHARDS), st.integers(1, 15))
    known = data.draw(st.integers(0, num_blocks))
    runs = [Run(stop=stop, holders=data.draw(bits)) for stop in range(1, known + 1)]
    rates = st.none() | st.sampled_from([1e7, 1e9, 1e11])
    peers = {
        shard: Peer(bytes_per_s=data.draw(rates), has_failed=data.draw(st.booleans()))
        for shard in data.draw(st.sets(st.sampled_from(SHARDS)))
    }

    plan = plan_staging(asked, here, runs, peers)

    after = {part: mask.copy() for part, mask in here.items()}
    for step in plan.steps:
        assert step.shard in peers
        assert step.start < step.stop <= plan.num_blocks
        for block in range(step.start, step.stop):
            assert not after[step.part][block], "a block that is here, or comes twice"
            after[step.part][block] = True
            assert runs[block].holders[step.shard] >> step.part & 1
    assert longest_prefix(asked, after) >= plan.num_blocks
    assert plan.num_blocks >= longest_prefix(asked, here)
    assert [step.start for step in plan.steps] == sorted(p.start for p in plan.steps)
    everywhere = {part: mask.copy() for part, mask in here.items()}
    for block, run in enumerate(runs):
        for part, held in everywhere.items():
            held[block] |= any(run.holders.get(shard, 0) >> part & 1 for shard in peers)
    reach = longest_prefix(asked, everywhere)
    assert plan.num_blocks <= reach
    if not asked.seconds_per_block:
        assert plan.num_blocks == reach
    assert (plan.reason == "none") == (plan.num_blocks == num_blocks)
    assert (plan.reason == "cheaper_to_recompute") == (plan.num_blocks < reach)
