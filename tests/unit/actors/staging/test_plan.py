"""What is planned to be brought: all that helps, nothing that does not, from those who have it."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given
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
from tests.unit.store.small_arena import chain

MB = 10**6


def request(num_blocks: int, *requests: PartRequest, seconds_per_block: float = 0.0) -> Prefix:
    parts = requests or (PartRequest(0),)
    return Prefix(
        keys=tuple(chain(num_blocks)),
        readers=(parts,),
        block_bytes={one.part: MB for one in parts},
        seconds_per_block=seconds_per_block,
    )


def mask(num_blocks: int, *blocks: int) -> Mask:
    made = np.zeros(num_blocks, dtype=bool)
    made[list(blocks)] = True
    return made


def nothing(of: Prefix) -> dict[int, Mask]:
    return {one.part: mask(of.num_blocks) for one in of.parts}


def dealt(plan: StagingPlan) -> list[tuple[str, int, int, int]]:
    return [(step.shard, step.part, step.start, step.stop) for step in plan.steps]


def test_what_one_shard_has_comes_from_it_in_one_piece():
    asked = request(300)
    plan = plan_staging(asked, nothing(asked), [Run(stop=300, holders={"b": 1})], {"b": Peer()})
    assert dealt(plan) == [("b", 0, 0, 300)]
    assert (plan.num_blocks, plan.reason) == (300, "none")


def test_only_what_is_missing_comes():
    asked = request(10)
    here = {0: mask(10, 0, 1, 2, 5)}
    plan = plan_staging(asked, here, [Run(stop=10, holders={"b": 1})], {"b": Peer()})
    assert dealt(plan) == [("b", 0, 3, 5), ("b", 0, 6, 10)]


def test_it_ends_before_the_first_block_that_nobody_has():
    asked = request(10)
    runs: list[Run] = [
        Run(stop=4, holders={"b": 1}),
        Run(stop=5, holders={}),
        Run(stop=10, holders={"b": 1}),
    ]
    plan = plan_staging(asked, nothing(asked), runs, {"b": Peer()})
    assert dealt(plan) == [("b", 0, 0, 4)]
    assert (plan.num_blocks, plan.reason) == (4, "not_stored")


def test_what_is_here_bridges_what_nobody_has():
    asked = request(10)
    runs: list[Run] = [
        Run(stop=4, holders={"b": 1}),
        Run(stop=5, holders={}),
        Run(stop=10, holders={"b": 1}),
    ]
    plan = plan_staging(asked, {0: mask(10, 4)}, runs, {"b": Peer()})
    assert dealt(plan) == [("b", 0, 0, 4), ("b", 0, 5, 10)]
    assert plan.reason == "none"


def test_all_here_needs_nothing():
    asked = request(3)
    plan = plan_staging(asked, {0: mask(3, 0, 1, 2)}, [], {})
    assert plan == StagingPlan(num_blocks=3, reason="none")


def test_nobody_has_anything():
    asked = request(3)
    plan = plan_staging(asked, nothing(asked), [], {"b": Peer()})
    assert plan == StagingPlan(num_blocks=0, reason="not_stored")


def test_a_shard_that_must_not_be_asked_counts_for_nothing():
    asked = request(3)
    plan = plan_staging(
        asked, nothing(asked), [Run(stop=3, holders={"a": 1, "b": 1})], {"b": Peer()}
    )
    assert dealt(plan) == [("b", 0, 0, 3)]
    assert not plan_staging(
        asked, nothing(asked), [Run(stop=3, holders={"a": 1})], {"b": Peer()}
    ).steps


def test_parts_may_come_from_different_shards_and_all_are_needed():
    asked = request(4, PartRequest(0), PartRequest(1))
    runs: list[Run] = [
        Run(stop=3, holders={"b": 0b01, "c": 0b10}),
        Run(stop=4, holders={"b": 0b01}),
    ]
    plan = plan_staging(asked, nothing(asked), runs, {"b": Peer(), "c": Peer()})
    assert dealt(plan) == [("b", 0, 0, 3), ("c", 1, 0, 3)]
    assert (plan.num_blocks, plan.reason) == (3, "not_stored")


def test_of_a_part_with_a_window_only_the_last_blocks_come():
    asked = request(10, PartRequest(0), PartRequest(1, 3))
    plan = plan_staging(asked, nothing(asked), [Run(stop=10, holders={"b": 0b11})], {"b": Peer()})
    assert dealt(plan) == [("b", 0, 0, 10), ("b", 1, 7, 10)]


def test_a_window_that_nobody_has_makes_the_prefix_shorter():
    asked = request(10, PartRequest(0), PartRequest(1, 3))
    runs: list[Run] = [
        Run(stop=2, holders={"b": 0b01}),
        Run(stop=6, holders={"b": 0b11}),
        Run(stop=10, holders={"b": 0b01}),
    ]
    plan = plan_staging(asked, nothing(asked), runs, {"b": Peer()})
    assert dealt(plan) == [("b", 0, 0, 6), ("b", 1, 3, 6)]
    assert plan.num_blocks == 6


def test_a_long_run_is_dealt_out_to_all_that_have_it_in_prefix_order():
    asked = request(4 * CHUNK_BLOCKS)
    runs: list[Run] = [Run(stop=4 * CHUNK_BLOCKS, holders={"b": 1, "c": 1})]
    plan = plan_staging(asked, nothing(asked), runs, {"b": Peer(), "c": Peer()})
    assert [step.shard for step in plan.steps] == ["b", "c", "b", "c"]
    assert [step.start for step in plan.steps] == [n * CHUNK_BLOCKS for n in range(4)]


def test_the_faster_shard_gives_more():
    asked = request(16 * CHUNK_BLOCKS)
    runs: list[Run] = [Run(stop=16 * CHUNK_BLOCKS, holders={"slow": 1, "fast": 1})]
    peers = {"slow": Peer(bytes_per_s=1e9), "fast": Peer(bytes_per_s=3e9)}
    plan = plan_staging(asked, nothing(asked), runs, peers)
    given = {"slow": 0, "fast": 0}
    for step in plan.steps:
        given[step.shard] += step.stop - step.start
    assert given == {"slow": 4 * CHUNK_BLOCKS, "fast": 12 * CHUNK_BLOCKS}


def test_a_short_run_comes_from_the_one_that_has_all_of_it():
    asked = request(40)
    runs: list[Run] = [Run(stop=3, holders={"b": 1, "c": 1}), Run(stop=40, holders={"c": 1})]
    peers = {"b": Peer(bytes_per_s=9e9), "c": Peer(bytes_per_s=1e9)}
    assert dealt(plan_staging(asked, nothing(asked), runs, peers)) == [("c", 0, 0, 40)]


def test_a_doubtful_shard_gives_only_what_nobody_else_has():
    asked = request(10)
    runs: list[Run] = [Run(stop=6, holders={"b": 1, "c": 1}), Run(stop=10, holders={"b": 1})]
    peers = {"b": Peer(bytes_per_s=9e9, has_failed=True), "c": Peer(bytes_per_s=1e6)}
    plan = plan_staging(asked, nothing(asked), runs, peers)
    assert dealt(plan) == [("c", 0, 0, 6), ("b", 0, 6, 10)]


def test_what_takes_longer_than_computing_it_does_not_come():
    asked = request(10, seconds_per_block=0.001)
    slow = {"b": Peer(bytes_per_s=0.9e9)}  # 1 MB a block: 1.1 ms
    plan = plan_staging(asked, nothing(asked), [Run(stop=10, holders={"b": 1})], slow)
    assert plan == StagingPlan(num_blocks=0, reason="cheaper_to_recompute")
    fast = {"b": Peer(bytes_per_s=1.1e9)}
    assert (
        plan_staging(asked, nothing(asked), [Run(stop=10, holders={"b": 1})], fast).num_blocks == 10
    )


def test_the_time_before_the_first_byte_counts():
    asked = request(10, seconds_per_block=0.001)
    peers = {"b": Peer(bytes_per_s=1e12, latency_s=0.02)}
    plan = plan_staging(asked, nothing(asked), [Run(stop=10, holders={"b": 1})], peers)
    assert plan.reason == "cheaper_to_recompute"
    longer = replace(asked, keys=tuple(chain(30)))
    assert (
        plan_staging(longer, nothing(longer), [Run(stop=30, holders={"b": 1})], peers).num_blocks
        == 30
    )


def test_what_was_not_measured_is_tried():
    asked = request(10, seconds_per_block=1e-9)
    plan = plan_staging(asked, nothing(asked), [Run(stop=10, holders={"b": 1})], {"b": Peer()})
    assert plan.num_blocks == 10


def test_a_prefix_is_cut_where_only_a_slow_shard_goes_on():
    asked = request(10, seconds_per_block=0.001)
    runs: list[Run] = [Run(stop=6, holders={"fast": 1}), Run(stop=10, holders={"slow": 1})]
    peers = {"fast": Peer(bytes_per_s=5e9), "slow": Peer(bytes_per_s=0.3e9)}
    plan = plan_staging(asked, nothing(asked), runs, peers)
    assert dealt(plan) == [("fast", 0, 0, 6)]
    assert plan.reason == "cheaper_to_recompute"


def fetch_in_turns(asked: Prefix, runs: list[Run], peers: Mapping[str, Peer]) -> tuple[int, int]:
    """Return what is here once there is nothing left to plan, and the most steps of one plan."""
    here, most = nothing(asked), 0
    while (plan := plan_staging(asked, here, runs, peers)).steps:
        most = max(most, len(plan.steps))
        for step in plan.steps:
            here[step.part][step.start : step.stop] = True
    return longest_prefix(asked, here), most


def test_a_prefix_whose_every_block_is_elsewhere_comes_bit_by_bit():
    shards = [f"s{number}" for number in range(50)]
    peers = dict.fromkeys(shards, Peer())
    asked = request(2000)
    runs: list[Run] = [
        Run(stop=block + 1, holders={shards[block * 7 % 50]: 1}) for block in range(1990)
    ]
    reached, most = fetch_in_turns(asked, runs, peers)
    assert reached == 1990
    assert most <= 64


def test_parts_that_are_on_many_nodes_come_bit_by_bit_too():
    shards = [f"s{number}" for number in range(64)]
    peers = dict.fromkeys(shards, Peer())
    asked = request(200, *(PartRequest(part) for part in range(32)))
    runs: list[Run] = [
        Run(stop=block + 1, holders={shards[(block + part) % 64]: 1 << part for part in range(32)})
        for block in range(200)
    ]
    reached, most = fetch_in_turns(asked, runs, peers)
    assert reached == 200
    assert most <= 32 * 4


def test_of_very_many_holders_some_are_chosen_that_have_all_parts():
    peers = {f"s{number:03}": Peer() for number in range(300)}
    holders = dict.fromkeys(list(peers)[:-1], 1) | {"s299": 2}
    asked = request(4096, PartRequest(0), PartRequest(1))
    plan = plan_staging(asked, nothing(asked), [Run(stop=4096, holders=holders)], peers)
    assert plan.num_blocks == 4096
    assert len({step.shard for step in plan.steps}) <= 16


def test_of_a_window_far_behind_much_that_is_here_the_end_is_found():
    asked = request(500, PartRequest(0), PartRequest(1, 4))
    here = {0: np.ones(500, dtype=bool), 1: mask(500)}
    runs = [Run(stop=block + 1, holders={f"s{block % 2}": 1}) for block in range(496)]
    runs.append(Run(stop=500, holders={"s0": 3}))
    plan = plan_staging(asked, here, runs, {"s0": Peer(), "s1": Peer()})
    assert dealt(plan) == [("s0", 1, 496, 500)]
    assert plan.reason == "none"


SHARDS = ("b", "c", "d")
wanted_parts = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.integers(1, 5)),
    min_size=1,
    max_size=4,
    unique_by=lambda one: one[0],
)


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
    runs: list[Run] = [Run(stop=stop, holders=data.draw(bits)) for stop in range(1, known + 1)]
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
    reach = longest_prefix(asked, _everywhere(here, runs, peers))
    assert plan.num_blocks <= reach
    if not asked.seconds_per_block:
        assert plan.num_blocks == reach
    assert (plan.reason == "none") == (plan.num_blocks == num_blocks)
    assert (plan.reason == "cheaper_to_recompute") == (plan.num_blocks < reach)


def _everywhere(
    here: Mapping[int, Mask], runs: list[Run], peers: Mapping[str, Peer]
) -> dict[int, Mask]:
    found = {part: mask.copy() for part, mask in here.items()}
    for block, run in enumerate(runs):
        for part, held in found.items():
            held[block] |= any(run.holders.get(shard, 0) >> part & 1 for shard in peers)
    return found
