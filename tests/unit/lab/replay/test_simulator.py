"""Policies in virtual time, beside each other, LRU in plain Python and the bounds; their pictures.

A shard's curve is drawn beside full replays.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.errors import ConfigError
from kvray.lab.replay import Comparison, Outcome, Plan, Trace, belady, compare, infinite
from kvray.lab.replay.report import report_curves, report_policies
from kvray.lab.replay.simulator import ADMISSIONS, POLICIES, check_curve, check_curves, simulate
from kvray.store import policy as policies
from kvray.store.arena.tables import Array
from kvray.store.policy import Everything
from kvray.store.replay import Replay
from tests.unit.lab.replay.excerpts import (
    CONVERSATION,
    SESSIONS,
    SYNTHETIC,
    excerpt,
    lru_hits,
    made,
    random_trace,
)

EXCERPTS = (CONVERSATION, SYNTHETIC, SESSIONS)
SIZES = (100, 1000, 3000)

each_excerpt = pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.name.split(".")[0])
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_admission = pytest.mark.parametrize("admission", ADMISSIONS)


def compared(policies: Sequence[str], host_blocks: Sequence[int], **disk: Any) -> Comparison:
    plan = Plan(policies=policies, host_blocks=host_blocks, **disk)
    return compare(excerpt(SYNTHETIC), plan)


def names(found: Comparison) -> list[tuple[int, str, str | None]]:
    return [(one.host_blocks, one.policy, one.admission) for one in found.outcomes]


def test_lru_is_replayed_at_each_size_whether_it_is_asked_for_or_not():
    runs = [(size, name, None) for size in (300, 1000) for name in ("lru", "gittins")]
    assert names(compared(["gittins"], [300, 1000])) == runs


def test_with_a_disk_lru_that_writes_everything_is_the_baseline():
    found = compared(["lru"], [300], nvme_blocks=1000, admissions=["twice"])
    assert names(found) == [(300, "lru", "all"), (300, "lru", "twice")]
    everything, twice = found.outcomes
    assert everything.write_share == 1
    assert twice.write_share == twice.nvme_written_blocks / everything.nvme_written_blocks < 1


def test_gain_is_0_for_lru_and_1_for_belady_and_none_where_that_finds_no_more_than_lru():
    found = compared(["gittins"], [300, 1_000_000])
    lru, ours, *_, last = found.outcomes
    most, least = belady(excerpt(SYNTHETIC), 300).hit_blocks, sum(lru_hits(excerpt(SYNTHETIC), 300))
    assert lru.gain == 0
    assert ours.gain == (ours.hit_blocks - least) / (most - least) > 0
    assert last.gain is None
    assert found.mean_gains()["gittins", None] == ours.gain


def test_the_mean_gain_is_that_of_one_policy_and_admission():
    disk = {"nvme_blocks": 300, "admissions": ["all", "twice"]}
    found = compared(["lru", "gittins"], [100, 300], **disk)
    gains = [one.gain for one in found.outcomes if one.title == "gittins + twice"]
    assert found.mean_gains()["gittins", "twice"] == pytest.approx(sum(gains) / len(gains))
    assert found.mean_gains()["lru", "all"] == 0


def test_with_a_disk_belady_has_one_tier_as_large_as_both():
    found = compared([], [300], nvme_blocks=700, admissions=["all"])
    assert found.belady[300] == belady(excerpt(SYNTHETIC), 1000)


def test_progress_counts_all_runs():
    seen: list[tuple[str, int, int]] = []
    plan = Plan(policies=["gittins"], host_blocks=[100, 300])
    compare(excerpt(CONVERSATION), plan, progress=lambda *step: seen.append(step))
    assert [step[1:] for step in seen] == [(done, 6) for done in range(6)]
    assert (seen[0][0], seen[-1][0]) == ("Belady, 100 blocks", "gittins, 300 blocks")


NOTHING = Outcome(policy="lru", host_blocks=0, refs=0, prompt_tokens=0, hit_blocks=0, hit_tokens=0)


def test_an_outcome_has_its_ratios_also_where_there_is_nothing():
    some = {"refs": 100, "hit_blocks": 25, "prompt_tokens": 1000, "hit_tokens": 200}
    found = replace(NOTHING, **some, nvme_hit_blocks=10, nvme_written_blocks=30, seconds=0.5)
    assert (found.hit_ratio, found.token_hit_ratio) == (0.25, 0.2)
    assert (found.written_per_hit, found.refs_per_s) == (3.0, 200.0)
    assert (NOTHING.hit_ratio, NOTHING.token_hit_ratio, NOTHING.refs_per_s) == (0, 0, 0)
    assert NOTHING.written_per_hit is None


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
def test_belady_is_that_of_single_blocks_leaf_first(seed):
    trace = random_trace(seed)
    for num_blocks in (1, 2, 3, 5, 8, 13, 40):
        assert belady(trace, num_blocks).hit_blocks == belady_by_block(trace, num_blocks)


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_of_what_to_keep_has_more_hits_than_belady(seed):
    trace = random_trace(seed, num_requests=12)
    for num_blocks in (1, 2, 3):
        assert belady(trace, num_blocks).hit_blocks == optimum(trace, num_blocks)


def test_json_has_every_policy_and_size_beside_the_bounds():
    runs, trace = compared(["gittins"], [100, 300]), excerpt(SYNTHETIC)
    found = report_policies(runs, concurrent=1, seed=0).facts
    assert (found["trace"], found["requests"], found["refs"]) == ("synthetic", 400, 10346)
    assert found["nvme_blocks"] == 0
    by_run = {(one["host_blocks"], one["policy"]): one for one in found["results"]}
    assert set(by_run) == {(size, name) for size in (100, 300) for name in ("lru", "gittins")}
    assert by_run[300, "lru"]["hit_blocks"] == sum(lru_hits(trace, 300))
    assert by_run[300, "lru"]["refs_per_s"] == runs.outcomes[2].refs_per_s
    assert by_run[300, "lru"]["gain"] == 0 < by_run[300, "gittins"]["gain"]
    assert by_run[300, "lru"]["written_per_hit"] is by_run[300, "lru"]["write_share"] is None
    assert found["infinite"]["hit_blocks"] == trace.num_refs - trace.num_unique
    assert json.loads(json.dumps(found)) == found


def test_the_table_has_a_line_for_each_run_and_bound(capsys):
    found = compared(["gittins"], [1000], nvme_blocks=500, admissions=["twice"])
    report_policies(found, concurrent=1, seed=0).show(as_json=False)
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    percents = [
        word
        for ratio in (found.belady[1000].hit_ratio, found.belady[1000].token_hit_ratio)
        for word in (f"{100 * ratio:.1f}", "%")
    ]
    assert ["Belady", *percents] in lines
    assert any(line[:3] == ["gittins", "+", "twice"] for line in lines)
    assert any(line[:2] == ["∞", "infinite"] for line in lines)
    gain = found.mean_gains()["gittins", "twice"]
    mean = f"Mean gain of gittins + twice over all sizes: {gain:+.3f}"
    for words in ("400 requests", "of LRU's", mean):
        assert words in text


def test_the_picture_starts_at_0_and_names_both_bounds():
    found = compared(["gittins"], [100, 1000])
    (axes,) = report_policies(found, concurrent=1, seed=0).figure().axes

    assert axes.get_ylim()[0] == 0
    assert [line.get_label() for line in axes.get_lines()] == [
        *("lru", "gittins", "Belady", "infinite cache")
    ]


def test_a_trace_that_fits_into_the_sample_is_drawn_exactly():
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


def test_a_trace_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match="too short"):
        check_curve(made((0, [1, 2])), [10], policy="lru")


@cache
def on_host(path: Path, policy: str, num_blocks: int) -> Outcome:
    """Return what one tier finds of an excerpt; several tests look at it."""
    return simulate(excerpt(path), policy=policy, host_blocks=num_blocks)


# -- beside LRU, Belady and the infinite cache --------------------------------------------------


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


@each_policy
@each_admission
def test_two_tiers_do_not_beat_belady_with_one_as_large_as_both(policy, admission):
    trace = excerpt(SYNTHETIC)
    found = simulate(trace, policy=policy, host_blocks=300, nvme_blocks=1200, admission=admission)
    assert 0 < found.hit_blocks <= belady(trace, 1500).hit_blocks


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


# -- two tiers ----------------------------------------------------------------------------------


def test_a_tier_larger_than_the_trace_costs_no_more_than_the_trace():
    trace = excerpt(CONVERSATION)
    much, more = (
        simulate(trace, policy="lru", host_blocks=count, nvme_blocks=10**17)
        for count in (10**5, 10**17)
    )
    assert much.hit_blocks == more.hit_blocks > 0


@each_policy
@each_admission
def test_an_outcome_is_the_sum_of_its_requests_and_the_same_each_time(policy, admission):
    trace = random_trace(5, num_requests=250)
    found = simulate(trace, policy=policy, host_blocks=48, nvme_blocks=90, admission=admission)
    replay = Replay(trace, policy, 48, nvme_blocks=90, admission=admission)
    list(replay.run())
    hits = replay.host_hits + replay.disk_hits
    assert found.host_hit_blocks == replay.host_hits.sum()
    assert found.nvme_hit_blocks == replay.disk_hits.sum()
    assert found.hit_blocks == hits.sum()
    assert found.hit_tokens == trace.hit_tokens(hits)
    assert found.nvme_written_blocks == replay.num_written
    assert found.refs == trace.num_refs
    assert found.seconds > 0
    assert (found.policy, found.admission) == (policy, admission)
    assert (found.host_blocks, found.nvme_blocks) == (48, 90)


@each_excerpt
@each_policy
def test_a_disk_that_takes_nothing_is_none(path, policy, monkeypatch):
    class Nothing(Everything):
        def admits(self, slots: Array, names: Array, *, now: float) -> Array:
            return np.zeros(len(slots), dtype=bool)

    monkeypatch.setitem(policies.ADMISSIONS, "nothing", Nothing)
    useless = simulate(
        excerpt(path), policy=policy, host_blocks=1000, nvme_blocks=900, admission="nothing"
    )
    assert (useless.nvme_written_blocks, useless.nvme_hit_blocks) == (0, 0)
    assert useless.hit_blocks == on_host(path, policy, 1000).hit_blocks


def test_a_disk_that_is_never_full_has_each_block_written_once():
    trace = random_trace(1, num_requests=250)
    found = simulate(
        trace, policy="lru", host_blocks=48, nvme_blocks=trace.num_unique, admission="all"
    )
    assert found.hit_blocks == infinite(trace).hit_blocks
    assert trace.num_unique - 48 <= found.nvme_written_blocks <= trace.num_unique


# -- the run ------------------------------------------------------------------------------------


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
