"""Policies beside each other and the bounds, a shard's curve beside replays, and their pictures."""

import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from kvray.errors import ConfigError
from kvray.lab.replay import Comparison, Outcome, Plan, Trace, belady, compare, infinite
from kvray.lab.replay.curve_check import check_curve, check_curves, curves_to_json, print_curves
from kvray.lab.replay.reading import TraceBuilder
from kvray.lab.replay.report import make_figure
from tests.unit.cli.replay_stand_in import simulate
from tests.unit.lab.replay.excerpts import CONVERSATION, SESSIONS, SYNTHETIC, excerpt
from tests.unit.lab.replay.lru import lru_hits


def compared(plan: Plan) -> Comparison:
    return compare(excerpt(SYNTHETIC), plan, simulate)


def names(found: Comparison) -> list[tuple[int, str, str | None]]:
    return [(one.host_blocks, one.policy, one.admission) for one in found.outcomes]


def test_lru_is_replayed_at_each_size_whether_it_is_asked_for_or_not() -> None:
    found = compared(Plan(policies=["double"], host_blocks=[300, 1000]))
    assert names(found) == [
        (300, "lru", None),
        (300, "double", None),
        (1000, "lru", None),
        (1000, "double", None),
    ]


def test_with_a_disk_lru_that_writes_everything_is_the_baseline() -> None:
    plan = Plan(policies=["lru"], host_blocks=[300], nvme_blocks=1000, admissions=["half"])
    found = compared(plan)
    assert names(found) == [(300, "lru", "all"), (300, "lru", "half")]
    everything, half = found.outcomes
    assert everything.write_share == 1
    assert half.write_share == pytest.approx(0.5, abs=0.001)


def test_gain_is_0_for_lru_and_1_for_belady() -> None:
    found = compared(Plan(policies=["double"], host_blocks=[300]))
    trace = excerpt(SYNTHETIC)
    lru, double = found.outcomes
    most, least = belady(trace, 300).hit_blocks, sum(lru_hits(trace, 300))
    assert lru.gain == 0
    assert double.gain == (sum(lru_hits(trace, 600)) - least) / (most - least)


def test_there_is_no_gain_where_belady_finds_no_more_than_lru() -> None:
    found = compared(Plan(policies=["double"], host_blocks=[300, 1_000_000]))
    assert found.outcomes[-1].gain is None
    assert found.mean_gains()["double", None] == found.outcomes[1].gain


def test_the_mean_gain_is_that_of_one_policy_and_admission() -> None:
    plan = Plan(
        policies=["lru", "double"],
        host_blocks=[100, 300],
        nvme_blocks=300,
        admissions=["all", "half"],
    )
    found = compared(plan)
    gains = [one.gain for one in found.outcomes if one.policy == "double"]
    assert found.mean_gains()["double", "half"] == pytest.approx(sum(gains) / len(gains))
    assert found.mean_gains()["lru", "all"] == 0


def test_with_a_disk_belady_has_one_tier_as_large_as_both() -> None:
    found = compared(Plan(policies=[], host_blocks=[300], nvme_blocks=700, admissions=["all"]))
    assert found.belady[300] == belady(excerpt(SYNTHETIC), 1000)


def test_progress_counts_all_runs() -> None:
    seen: list[tuple[str, int, int]] = []
    compare(
        excerpt(CONVERSATION),
        Plan(policies=["double"], host_blocks=[100, 300]),
        simulate,
        progress=lambda *step: seen.append(step),
    )
    assert [step[1:] for step in seen] == [(done, 6) for done in range(6)]
    assert (seen[0][0], seen[-1][0]) == ("Belady, 100 blocks", "double, 300 blocks")


def outcome(**figures: float) -> Outcome:
    zeros = dict.fromkeys(
        (
            *("host_blocks", "nvme_blocks", "refs", "prompt_tokens", "hit_blocks"),
            *("hit_tokens", "host_hit_blocks", "nvme_hit_blocks", "nvme_written_blocks"),
        ),
        0,
    )
    return Outcome(**{"policy": "lru", "admission": None, "seconds": 0.0, **zeros, **figures})


def test_an_outcome_has_its_ratios() -> None:
    found = outcome(
        **{"refs": 100, "hit_blocks": 25, "prompt_tokens": 1000, "hit_tokens": 200},
        **{"nvme_hit_blocks": 10, "nvme_written_blocks": 30, "seconds": 0.5},
    )
    assert (found.hit_ratio, found.token_hit_ratio) == (0.25, 0.2)
    assert (found.written_per_hit, found.refs_per_s) == (3.0, 200.0)


def test_an_outcome_of_nothing_has_ratios_too() -> None:
    found = outcome()
    assert (found.hit_ratio, found.token_hit_ratio, found.refs_per_s) == (0, 0, 0)
    assert found.written_per_hit is None


EXCERPTS = (CONVERSATION, SYNTHETIC, SESSIONS)


def random_trace(seed: int, *, num_requests: int = 60) -> Trace:
    """Return requests that go down a tree, each node of which has up to three children."""
    rng = random.Random(seed)
    builder = TraceBuilder(name="random", block_tokens=4)
    for at in range(num_requests):
        path, node = [], 0
        for _ in range(rng.randrange(8)):
            node = 3 * node + rng.choice((1, 1, 1, 2, 3))
            path.append(node)
        builder.add(time_s=at, num_tokens=4 * len(path), ids=path)
    return builder.build()


def belady_by_block(trace: Trace, num_blocks: int) -> int:
    """Belady as it is told: of the blocks without a child the farthest used goes, one by one."""
    paths = [
        trace.ids[start:end].tolist()
        for start, end in zip(trace.starts[:-1], trace.starts[1:], strict=True)
    ]
    parents = trace.parents.tolist()
    cached: set[int] = set()
    hits = 0
    for now, path in enumerate(paths):
        hits += sum(block in cached for block in path)
        cached.update(path)
        while len(cached) > num_blocks:
            leaves = cached - {parents[block] for block in cached}
            cached.remove(max(leaves, key=lambda leaf: next_use(paths, now, leaf)))
    return hits


def next_use(paths: list[list[int]], now: int, block: int) -> tuple[int, int, int]:
    """Return when a block is used next and how deep it is; the block, so that there is no tie."""
    for later in range(now + 1, len(paths)):
        if block in paths[later]:
            return later, paths[later].index(block), block
    return len(paths), block, block


def optimum(trace: Trace, num_blocks: int) -> int:
    """Return the most hits of single blocks, by looking at every choice there is."""
    best = {frozenset[int](): 0}
    for block in trace.ids.tolist():
        after: dict[frozenset[int], int] = {}
        for cached, before in best.items():
            hits = before + (block in cached)
            both = cached | {block}
            kept = [both] if len(both) <= num_blocks else [both - {one} for one in both]
            for one in kept:
                after[one] = max(after.get(one, 0), hits)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(20))
def test_belady_is_that_of_single_blocks_leaf_first(seed: int) -> None:
    trace = random_trace(seed)
    for num_blocks in (1, 2, 3, 5, 8, 13, 40):
        assert belady(trace, num_blocks).hit_blocks == belady_by_block(trace, num_blocks)


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_of_what_to_keep_has_more_hits_than_belady(seed: int) -> None:
    trace = random_trace(seed, num_requests=12)
    for num_blocks in (1, 2, 3):
        assert belady(trace, num_blocks).hit_blocks == optimum(trace, num_blocks)


@pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.name.partition(".")[0])
def test_lru_is_never_above_belady_nor_belady_above_the_infinite_cache(path: Path) -> None:
    trace = excerpt(path)
    sizes = (100, 300, 1000, 3000)
    most = [belady(trace, num_blocks).hit_blocks for num_blocks in sizes]
    lru = [sum(lru_hits(trace, num_blocks)) for num_blocks in sizes]
    assert most == sorted(most)
    assert all(ours < best for ours, best in zip(lru, most, strict=True))
    assert most[-1] <= infinite(trace).hit_blocks


@pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.name.partition(".")[0])
def test_a_cache_that_holds_everything_is_as_good_as_an_infinite_one(path: Path) -> None:
    trace = excerpt(path)
    never_full, bound = belady(trace, trace.num_unique), infinite(trace)
    assert (never_full.hit_blocks, never_full.hit_tokens) == (bound.hit_blocks, bound.hit_tokens)
    assert bound.hit_blocks == trace.num_refs - trace.num_unique
    assert sum(lru_hits(trace, trace.num_unique)) == bound.hit_blocks


def test_ratios_are_those_of_blocks_and_of_tokens() -> None:
    builder = TraceBuilder(name="made", block_tokens=10)
    builder.add(time_s=0, num_tokens=15, ids=[1, 2])
    builder.add(time_s=1, num_tokens=15, ids=[1, 2])
    builder.add(time_s=2, num_tokens=10, ids=[1])
    bound = belady(builder.build(), 1)
    assert bound.hit_ratio == 2 / 5
    assert bound.token_hit_ratio == 20 / 40


def test_a_trace_without_a_block_has_no_hits() -> None:
    trace = TraceBuilder(name="made", block_tokens=4).build()
    assert infinite(trace).hit_ratio == belady(trace, 5).hit_ratio == 0
    assert infinite(trace).token_hit_ratio == 0


def test_the_picture_starts_at_0_and_names_both_bounds() -> None:
    plan = Plan(policies=["double"], host_blocks=[100, 1000])
    found = compare(excerpt(CONVERSATION), plan, simulate)

    (axes,) = make_figure(found).axes

    assert axes.get_ylim()[0] == 0
    assert [line.get_label() for line in axes.get_lines()] == [
        *("lru", "double", "Belady", "infinite cache")
    ]


def test_a_trace_that_fits_into_the_sample_is_drawn_exactly() -> None:
    seen: list[tuple[str, int, int]] = []
    (found,) = check_curves(
        excerpt(SYNTHETIC),
        [200, 800, 1600],
        policies=["gittins"],
        nvme_blocks=300,
        admissions=["likely"],
        seed=1,
        progress=lambda *step: seen.append(step),
    )
    assert found.rate == 1
    assert found.mean_error < 1e-5
    assert 0 < found.memory_bytes < 64 * 2**20
    assert found.note_us < 50
    assert [done for _, done, _ in seen] == [0, 1, 2, 3, 4]
    console = Console(width=120)
    with console.capture() as said:
        print_curves(console, [found])
    assert "Mean error 0.00 points" in said.get()
    assert json.loads(curves_to_json([found]))["checks"][0]["mean_error"] < 1e-5


def test_a_trace_that_is_too_short_is_refused() -> None:
    builder = TraceBuilder(name="short", block_tokens=4)
    builder.add(time_s=0, num_tokens=8, ids=[1, 2])
    with pytest.raises(ConfigError, match="too short"):
        check_curve(builder.build(), [10], policy="lru")
