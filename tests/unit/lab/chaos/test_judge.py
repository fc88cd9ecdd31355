from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvray.lab.chaos.judge import (
    Results,
    Strike,
    has_passed,
    hit_tokens_ratio,
    kinds_table,
    recoveries,
    report,
    stall_p99_ms,
)
from kvray.lab.chaos.servers import Served
from tests.unit.lab.demo.test_demo import make_output


def served(
    began: float, hits: int, *, replica: str = "one", place: int = 0, wrong_tokens: int = 0
) -> Served:
    return Served(
        replica=replica,
        place=place,
        began=began,
        ended=began + 1.0,
        outputs=[make_output(prompt_tokens=100, hit_tokens=hits)],
        wrong_tokens=wrong_tokens,
    )


def strike(began: float, ended: float, **changes: Any) -> Strike:
    return Strike(
        **{"kind": "kill_shard", "began": began, "ended": ended, "in_flight": 12} | changes
    )


CALM = [served(at, 80) for at in range(10)]
CALM_RESULTS = Results(served=CALM)


def test_ratio_is_of_hits_per_token() -> None:
    assert hit_tokens_ratio([served(0, 40)], CALM) == pytest.approx(0.5)


def test_hits_are_back_with_the_first_good_batch_that_began_after_the_end() -> None:
    under_fire = [served(0, 80), served(1, 0), served(2, 10), served(3, 60), served(4, 80)]
    assert recoveries([strike(0.5, 1.5)], under_fire, CALM) == [2.5]


def test_a_batch_of_new_documents_is_no_sign_of_a_loss_nor_of_its_end() -> None:
    calm = [served(0, 0, place=0), served(1, 80, place=1)]
    under_fire = [served(1, 0, place=0), served(2, 70, place=1)]
    assert recoveries([strike(0.5, 0.5)], under_fire, calm) == [2.5]
    assert np.isnan(recoveries([strike(0.5, 0.5)], under_fire[:1], calm)).all()


def test_hits_that_never_came_back_count_until_the_end() -> None:
    under_fire = [served(at, 10) for at in range(20)]
    assert recoveries([strike(0.5, 1.5)], under_fire, CALM) == [18.5]
    found = report(Results(served=under_fire, strikes=[strike(0.5, 1.5)]), CALM_RESULTS)
    assert found["recovery_s_last"] == pytest.approx(18.5)


def test_the_slowest_replica_decides() -> None:
    both = [served(1, 80), served(2, 80), served(1, 0, replica="two"), served(5, 80, replica="two")]
    assert recoveries([strike(0.5, 0.5)], both, CALM) == [5.5]


def test_a_fault_that_was_not_over_when_the_next_struck_is_not_counted() -> None:
    under_fire = [served(at, 0) for at in range(5)] + [served(5, 80)]
    first, last = recoveries([strike(0.5, 1.0), strike(2.0, 3.0)], under_fire, CALM)
    assert np.isnan(first)
    assert last == 3.0


def test_what_did_not_strike_is_told_and_not_counted() -> None:
    strikes = [strike(1, 1), strike(2, 2, kind="truncate", skipped="No mover")]
    found = report(Results(served=CALM[:5], strikes=strikes), CALM_RESULTS)
    assert found["faults_injected"] == 1
    assert found["faults"] == {"kill_shard": 1}
    assert found["by_kind"]["truncate"] == {
        "struck": 0,
        "skipped": {"No mover": 1},
        "in_flight_min": None,
        "recovery_s_max": None,
    }
    assert kinds_table(found).row_count == 2


@pytest.mark.parametrize(
    "name", ["engine_deaths", "hung_requests", "failed_requests", "unsettled_nodes"]
)
def test_a_loss_that_was_not_injected_fails_the_run(name: str) -> None:
    assert has_passed(report(Results(), CALM_RESULTS))
    assert not has_passed(report(Results(losses=Counter({name: 1})), CALM_RESULTS))


def test_an_injected_death_does_not_fail_the_run() -> None:
    losses = Counter(injected_deaths=2, injected_requests=24)
    found = report(Results(losses=losses), CALM_RESULTS)
    assert has_passed(found)
    assert found["requests_lost_to_injected_deaths"] == 24


def test_a_wrong_token_fails_the_run() -> None:
    wrong = Results(served=[served(0, 80, wrong_tokens=1)])
    assert not has_passed(report(wrong, CALM_RESULTS))


def test_answers_on_nodes_that_joined_are_judged_and_kept_apart() -> None:
    found = report(Results(served=CALM, joined=[served(0, 20, wrong_tokens=1)]), CALM_RESULTS)
    assert found["wrong_tokens"] == 1
    assert found["requests"] == len(CALM) + 1
    assert found["hit_tokens_ratio"] == 1.0
    assert found["joined"] == {"requests": 1, "hit_share": 0.2}


def test_stalls_do_not_count_the_wait_for_a_core() -> None:
    calls = [[0.0, 0.0, 0.010, 0.008]] * 99 + [[1.0, 0.0, 0.003, 0.0]]
    assert stall_p99_ms(np.array(calls)) == pytest.approx(3.0)
    assert stall_p99_ms(np.empty((0, 4))) == 0.0
