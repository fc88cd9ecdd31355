"""Policies in virtual time, beside each other, LRU in plain Python and the bounds; their pictures.

A shard's curve is drawn beside full replays.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvray.errors import ConfigError
from kvray.lab.replay import Comparison, Outcome, Plan, Trace, belady, compare, infinite
from kvray.lab.replay.report import report_curves, report_policies
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES, check_curve, check_curves, simulate
from kvray.store.replay import Replay
from tests.unit.lab.replay.excerpts import (
    CONVERSATION,
    SESSIONS,
    SYNTHETIC,
    excerpt,
    lru_hits,
    made,
    paths,
    random_trace,
)

EXCERPTS = (CONVERSATION, SYNTHETIC, SESSIONS)
SIZES = (100, 1000, 3000)

each_excerpt = pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.name.split(".")[0])
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_admission = pytest.mark.parametrize("admission", ADMISSIONS)


def compared(policies: Sequence[str], host_blocks: Sequence[int], **disk: Any) -> Comparison:
    """Return runs of an excerpt, all of which were counted on their way."""
    plan, seen = Plan(policies=policies, host_blocks=host_blocks, **disk), list[tuple[int, int]]()
    found = compare(
        excerpt(SYNTHETIC), plan, progress=lambda _, done, total: seen.append((done, total))
    )
    num_runs = len(host_blocks) + len(found.outcomes)
    assert seen == [(done, num_runs) for done in range(num_runs)]
    return found


def names(found: Comparison) -> list[tuple[int, str, str | None]]:
    return [(one.host_blocks, one.policy, one.admission) for one in found.outcomes]


def test_lru_is_replayed_at_each_size_whether_it_is_asked_for_or_not():
    runs = [(size, name, None) for size in (300, 1000) for name in ("lru", "gittins")]
    assert names(compared(["gittins"], [300, 1000])) == runs


def test_with_a_disk_lru_that_writes_everything_is_the_baseline_and_belady_has_one_tier():
    found = compared(["lru"], [100, 300], nvme_blocks=1000, admissions=["twice"])
    runs = [(size, "lru", name) for size in (100, 300) for name in ("all", "twice")]
    assert names(found) == runs
    small, everything, twice = found.outcomes[1:]
    assert everything.write_share == 1
    assert twice.write_share == twice.nvme_written_blocks / everything.nvme_written_blocks < 1
    assert found.belady[300] == belady(excerpt(SYNTHETIC), 1300)
    mean = pytest.approx((small.gain + twice.gain) / 2)
    assert found.mean_gains() == {("lru", "all"): 0, ("lru", "twice"): mean}


def test_gain_is_0_for_lru_and_1_for_belady_and_none_where_that_finds_no_more_than_lru():
    found = compared(["gittins"], [300, 1_000_000])
    lru, ours, *_, last = found.outcomes
    most, least = belady(excerpt(SYNTHETIC), 300).hit_blocks, sum(lru_hits(excerpt(SYNTHETIC), 300))
    assert lru.gain == 0
    assert ours.gain == (ours.hit_blocks - least) / (most - least) > 0
    assert last.gain is None
    assert found.mean_gains()["gittins", None] == ours.gain


def belady_by_block(trace: Trace, num_blocks: int) -> int:
    """Belady as it is told: of the blocks without a child the farthest used goes, one by one."""
    requests, parents = paths(trace), trace.parents.tolist()
    cached: set[int] = set()
    hits = 0
    for now, path in enumerate(requests):
        hits += sum(block in cached for block in path)
        cached.update(path)
        while len(cached) > num_blocks:
            leaves = cached - {parents[block] for block in cached}
            cached.remove(max(leaves, key=lambda leaf: next_use(requests, now, leaf)))
    return hits


def next_use(requests: list[list[int]], now: int, block: int) -> tuple[int, int, int]:
    """Return when a block is used next and how deep it is; the block, so that there is no tie."""
    for later in range(now + 1, len(requests)):
        if block in requests[later]:
            return later, requests[later].index(block), block
    return len(requests), block, block


@pytest.mark.parametrize("seed", range(20))
def test_belady_is_that_of_single_blocks_leaf_first(seed):
    trace = random_trace(seed)
    for num_blocks in (1, 2, 3, 5, 8, 13, 40):
        assert belady(trace, num_blocks).hit_blocks == belady_by_block(trace, num_blocks)


def test_json_table_and_picture_have_every_run_beside_the_bounds(capsys):
    runs, trace = compared(["gittins"], [100, 300]), excerpt(SYNTHETIC)
    report = report_policies(runs, concurrent=1, seed=0)
    found = report.facts
    assert (found["trace"], found["requests"], found["refs"]) == ("synthetic", 400, 10346)
    assert [(one["host_blocks"], one["policy"]) for one in found["results"]] == [
        (size, name) for size in (100, 300) for name in ("lru", "gittins")
    ]
    lru, ours = found["results"][2:]
    assert lru["hit_blocks"] == sum(lru_hits(trace, 300))
    assert lru["refs_per_s"] == trace.num_refs / runs.outcomes[2].seconds
    assert lru["gain"] == 0 < ours["gain"]
    assert lru["written_per_hit"] is lru["write_share"] is None
    assert found["infinite"]["hit_blocks"] == trace.num_refs - trace.num_unique
    assert json.loads(json.dumps(found)) == found
    (axes,) = report.figure().axes
    assert axes.get_ylim()[0] == 0
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels == ["lru", "gittins", "Belady", "infinite cache"]
    with_disk = compared(["gittins"], [1000], nvme_blocks=500, admissions=["twice"])
    report_policies(with_disk, concurrent=1, seed=0).show(as_json=False)
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    best = with_disk.belady[1000]
    assert f"Belady {100 * best.hit_ratio:.1f} % {100 * best.token_hit_ratio:.1f} %" in lines
    for start in ("gittins + twice", "∞ infinite"):
        assert any(line.startswith(start) for line in lines)
    gain = with_disk.mean_gains()["gittins", "twice"]
    mean = f"Mean gain of gittins + twice over all sizes: {gain:+.3f}"
    for words in ("400 requests", "of LRU's", mean):
        assert words in text


def test_a_trace_that_fits_into_the_sample_is_drawn_exactly_and_one_too_short_is_refused():
    seen: list[tuple[str, int, int]] = []
    tiers = {"host_blocks": [200, 800, 1600], "nvme_blocks": 300, "admissions": ["likely"]}
    (found,) = check_curves(
        excerpt(SYNTHETIC),
        Plan(policies=["gittins"], **tiers),
        seed=1,
        progress=lambda *step: seen.append(step),
    )
    assert found.rate == 1
    assert found.mean_error < 1e-5
    assert [done for _, done, _ in seen] == [0, 1, 2, 3, 4]
    report = report_curves([found])
    assert str(report.parts[1]).startswith("Mean error 0.00 points")
    assert json.loads(json.dumps(report.facts))["checks"][0]["mean_error"] < 1e-5
    with pytest.raises(ConfigError, match="too short"):
        check_curve(made((0, [1, 2])), [10], policy="lru")


@cache
def on_host(path: Path, policy: str, num_blocks: int) -> Outcome:
    return simulate(excerpt(path), policy=policy, host_blocks=num_blocks)


@each_excerpt
@pytest.mark.parametrize("nvme_blocks", [0, 500])
def test_lru_finds_in_memory_what_lru_finds_of_every_request(path, nvme_blocks):
    trace = excerpt(path)
    for num_blocks in SIZES:
        replay = Replay(trace, "lru", num_blocks, nvme_blocks=nvme_blocks)
        list(replay.run())
        assert replay.host_hits.tolist() == lru_hits(trace, num_blocks)


@each_excerpt
@each_policy
def test_no_policy_beats_belady_nor_belady_the_infinite_cache(path, policy):
    trace = excerpt(path)
    most = [belady(trace, num_blocks).hit_blocks for num_blocks in SIZES]
    assert most == sorted(most)
    assert most[-1] <= infinite(trace).hit_blocks
    for num_blocks, bound in zip(SIZES, most, strict=True):
        assert 0 < on_host(path, policy, num_blocks).hit_blocks <= bound


@each_excerpt
@each_policy
def test_a_tier_that_is_never_full_is_as_good_as_an_infinite_one(path, policy):
    trace = excerpt(path)
    num_blocks, bound = trace.num_unique, infinite(trace)
    for found in (
        belady(trace, num_blocks),
        simulate(trace, policy=policy, host_blocks=num_blocks),
    ):
        assert (found.hit_blocks, found.hit_tokens) == (bound.hit_blocks, bound.hit_tokens)
    assert bound.hit_blocks == trace.num_refs - num_blocks == sum(lru_hits(trace, num_blocks))


@each_excerpt
def test_gittins_is_hardly_anywhere_below_lru(path):
    for num_blocks in SIZES:
        lru, ours = (on_host(path, policy, num_blocks) for policy in ("lru", "gittins"))
        assert ours.hit_ratio >= lru.hit_ratio - 0.003, num_blocks


@each_policy
@each_admission
def test_two_tiers_find_what_their_requests_do_which_is_no_more_than_belady_in_one(
    policy, admission
):
    trace = excerpt(SYNTHETIC)
    found = simulate(trace, policy=policy, host_blocks=300, nvme_blocks=1200, admission=admission)
    replay = Replay(trace, policy, 300, nvme_blocks=1200, admission=admission)
    list(replay.run())
    hits = replay.host_hits + replay.disk_hits
    assert found.host_hit_blocks == replay.host_hits.sum()
    assert found.nvme_hit_blocks == replay.disk_hits.sum()
    assert 0 < found.hit_blocks == hits.sum() <= belady(trace, 1500).hit_blocks
    assert found.hit_tokens == trace.hit_tokens(hits)
    assert found.hit_ratio == hits.sum() / trace.num_refs
    assert found.token_hit_ratio == found.hit_tokens / trace.prompt_tokens
    assert found.nvme_written_blocks == replay.num_written
    assert found.written_per_hit == replay.num_written / replay.disk_hits.sum()
    assert (found.refs, found.policy, found.admission) == (trace.num_refs, policy, admission)
    assert (found.host_blocks, found.nvme_blocks) == (300, 1200)


def test_a_tier_larger_than_the_trace_costs_no_more_than_the_trace():
    trace = excerpt(CONVERSATION)
    much, more = (
        simulate(trace, policy="lru", host_blocks=count, nvme_blocks=10**17)
        for count in (10**5, 10**17)
    )
    assert much.hit_blocks == more.hit_blocks > 0


def test_a_disk_that_is_never_full_has_each_block_written_once():
    trace = random_trace(1, num_requests=250)
    found = simulate(
        trace, policy="lru", host_blocks=48, nvme_blocks=trace.num_unique, admission="all"
    )
    assert found.hit_blocks == infinite(trace).hit_blocks
    assert trace.num_unique - 48 <= found.nvme_written_blocks <= trace.num_unique


@each_policy
@pytest.mark.parametrize(
    ("requests", "found"),
    [([], (0, 0)), ([(at, ids) for at in range(4) for ids in ([], [1, 2])], (6, 8))],
    ids=["no request", "no block"],
)
def test_what_has_no_request_or_no_block_is_replayed(policy, requests, found):
    trace = made(*requests)
    outcome = simulate(trace, policy=policy, host_blocks=20, nvme_blocks=20, admission="all")
    assert (outcome.hit_blocks, outcome.refs) == found
    ratio = found[0] / max(1, found[1])
    assert infinite(trace).hit_ratio == belady(trace, 5).hit_ratio == ratio


@each_policy
def test_prompts_longer_than_a_tier_are_kept_from_their_head_on(policy):
    prompts = (range(100), range(1000, 1100))
    trace = made(*((at, prompts[at % 2]) for at in range(12)))
    found = simulate(trace, policy=policy, host_blocks=30, nvme_blocks=50, admission="all")
    assert found.nvme_written_blocks > 0
    assert 0 < found.hit_blocks <= 10 * 80
