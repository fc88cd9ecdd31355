import pytest

from kvray.lab.replay import Comparison, Outcome, Plan, belady, compare
from tests.unit.cli.replay_stand_in import simulate
from tests.unit.lab.replay.excerpts import CONVERSATION, SYNTHETIC, excerpt
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
