"""What answers come to: times, reuse, load on replicas, and ratios of endpoints."""

import json

import pytest

from kvray.lab.bench.serving.load import Answer, Due
from kvray.lab.bench.serving.report import (
    Round,
    Section,
    ServingReport,
    over_rounds,
    percentile,
    ratios,
    round_figures,
)

REQUESTS = [Due(at_s=float(at), tokens=[1] * 100) for at in range(4)]


def answer(
    first_token_s: float, *, replica: str = "a", cached: int = 50, text: str = "x"
) -> Answer:
    return Answer(
        text=text,
        replica=replica,
        first_token_s=first_token_s,
        whole_s=first_token_s + 1,
        cached_tokens=cached,
    )


FAILED = Answer(error="gone")
FAST = [answer(0.1), answer(0.2, replica="b"), answer(0.3), answer(1.0, cached=0)]
SLOW = [answer(2.0), answer(0.4, text="y"), answer(0.6), FAILED]


def one_round(fast: list[Answer] = FAST, slow: list[Answer] = SLOW) -> Round:
    return Round(requests=REQUESTS, reusable=[0, 64, 64, 64], answers={"fast": fast, "slow": slow})


def figures(one: Round, *, num_replicas: int = 0) -> dict[str, dict[str, float]]:
    return round_figures(one, in_time_s=0.5, num_replicas=num_replicas)


def test_times_are_those_of_whole_answers() -> None:
    found = figures(one_round())
    assert found["fast"]["first_token_p50_s"] == 0.2
    assert found["fast"]["first_token_p90_s"] == 1.0
    assert found["fast"]["requests_per_s"] == pytest.approx(4 / 5)
    assert found["fast"]["in_time_per_s"] == pytest.approx(3 / 5)
    assert found["slow"]["first_token_p90_s"] == 2.0
    assert found["slow"]["requests_per_s"] == pytest.approx(3 / 3.6)
    assert (found["fast"]["failed"], found["slow"]["failed"]) == (0, 1)


def test_reuse_stands_beside_that_of_an_infinite_cache() -> None:
    found = figures(one_round())
    assert found["fast"]["cached_share"] == 150 / 400
    assert found["fast"]["reusable_share"] == 192 / 400
    assert found["fast"]["reuse"] == 150 / 192
    assert found["slow"]["reuse"] == 150 / 128, "of a failed answer nothing counts"


def test_reuse_is_missing_where_an_endpoint_does_not_tell() -> None:
    silent = [Answer(text="x", first_token_s=0.1, whole_s=0.2)] * 4
    found = figures(one_round(slow=silent))["slow"]
    assert not {"cached_share", "reuse", "most_requests"} & found.keys()
    assert found["failed"] == 0


def test_load_is_the_most_loaded_replica_over_the_mean() -> None:
    found = figures(one_round())["fast"]
    assert found["most_requests"] == 3 * 2 / 4
    assert found["most_computed"] == pytest.approx(200 * 2 / 250)
    assert figures(one_round(), num_replicas=3)["fast"]["most_requests"] == 3 * 3 / 4


def test_texts_are_compared_with_the_first_endpoints() -> None:
    found = figures(one_round())
    assert (found["fast"]["other_text"], found["slow"]["other_text"]) == (0, 1)


def test_an_endpoint_of_which_all_fail_has_no_times() -> None:
    found = figures(one_round(slow=[FAILED] * 4))["slow"]
    assert found["requests_per_s"] == 0
    assert "first_token_p90_s" not in found


def test_rounds_come_to_their_median_and_failures_to_their_sum() -> None:
    found = over_rounds([figures(one_round()) for _ in range(3)])
    assert found["slow"]["failed"] == 3
    assert found["slow"]["first_token_p90_s"] == 2.0


def test_ratios_are_medians_of_the_rounds_own() -> None:
    rounds = [
        {"a": {"first_token_p90_s": 1.0}, "b": {"first_token_p90_s": seconds}}
        for seconds in (1.0, 3.0, 8.0)
    ]
    assert ratios(rounds) == {"b": {"first_token_p90_s": 3.0}}
    more = [{"a": {"requests_per_s": 4.0}, "b": {"requests_per_s": 2.0}}]
    assert ratios(more) == {"b": {"requests_per_s": 2.0}}


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([3.0, 1.0, 2.0], percent) for percent in (50, 90, 1)] == [2.0, 3.0, 1.0]


def report(name: str = "one-prefix") -> ServingReport:
    section = Section.of(name, [one_round()] * 2, in_time_s=0.5, num_replicas=3)
    return ServingReport(sections=[section], facts={"rate": 1.0})


def test_json_has_every_figure_by_name() -> None:
    found = json.loads(report().to_json())
    assert found["serving_one_prefix_first_token_p90_s_fast"] == 1.0
    assert found["serving_one_prefix_first_token_p90_s_ratio_slow"] == 2.0
    assert found["serving_one_prefix_failed_slow"] == 2
    assert found["rate"] == 1.0
    assert len(found["workloads"][0]["rounds"]) == 2


def test_table_names_endpoints_and_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    report().show()
    shown = capsys.readouterr().out
    assert "fast" in shown
    assert "2.00x" in shown
    assert "slow: gone" in shown
