"""The predicted time to a first token, part by part."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.routing import Bring, Link, Stretch, predict
from tests.unit.routing.fleet_parts import RATES, candidate

NODES = ("a", "b", "c")
HOLDERS = st.dictionaries(
    st.sampled_from(NODES), st.sampled_from(["host", "disk"]), min_size=1, max_size=3
)
STRETCHES = st.lists(
    st.builds(Stretch, num_tokens=st.integers(1, 500), holders=HOLDERS), max_size=6
)


def test_a_prompt_that_nobody_has_is_computed() -> None:
    found = predict(candidate(queue_s=2.0), 500, [])
    assert (found.pool_tokens, found.brings, found.computed_tokens) == (0, (), 500)
    assert (found.queue_s, found.compute_s, found.first_token_s) == (2.0, 0.5, 2.5)


def test_what_the_pool_has_costs_nothing() -> None:
    found = predict(candidate(pool_tokens=400), 500, [])
    assert (found.pool_tokens, found.work_s) == (400, pytest.approx(0.1))


def test_the_last_token_is_computed_in_any_case() -> None:
    found = predict(candidate(pool_tokens=500), 500, [])
    assert (found.pool_tokens, found.computed_tokens) == (499, 1)
    found = predict(candidate(), 500, [Stretch(num_tokens=500, holders={"a": "host"})])
    assert (found.tokens_from("host"), found.computed_tokens) == (499, 1)


@pytest.mark.parametrize(
    ("holders", "source", "seconds"),
    [
        ({"a": "host", "b": "host"}, "host", 0.01),
        ({"b": "host"}, "remote", 0.045),
        ({"a": "disk"}, "disk", 0.06),
        ({"a": "disk", "b": "host"}, "remote", 0.045),
        ({"b": "disk"}, "remote", 0.095),
    ],
)
def test_each_stretch_comes_from_its_fastest_source(
    holders: dict[str, str], source: str, seconds: float
) -> None:
    found = predict(candidate(), 200, [Stretch(num_tokens=100, holders=holders)])  # type: ignore[arg-type]
    assert found.brings == (
        Bring(source=source, num_tokens=100, seconds=pytest.approx(seconds)),  # type: ignore[arg-type]
    )
    assert found.work_s == pytest.approx(seconds + 0.1)


def test_a_link_that_was_measured_by_itself_counts_for_its_node() -> None:
    rates = replace(RATES, peers={"b": Link(bytes_per_s=1e9)})
    stretches = [Stretch(num_tokens=100, holders={"b": "host", "c": "host"})]
    found = predict(candidate(rates=rates), 200, stretches)
    assert found.bring_s == pytest.approx(1e-5 + 0.01)


def test_what_is_slower_to_bring_than_to_compute_is_computed() -> None:
    rates = replace(RATES, remote=Link(bytes_per_s=1e4))
    stretches = [
        Stretch(num_tokens=100, holders={"a": "host"}),
        Stretch(num_tokens=100, holders={"b": "host"}),
    ]
    found = predict(candidate(rates=rates), 300, stretches)
    assert [bring.source for bring in found.brings] == ["host"]
    assert found.computed_tokens == 200


def test_a_slow_stretch_is_brought_if_what_follows_is_worth_it() -> None:
    stretches = [
        Stretch(num_tokens=10, holders={"b": "host"}),
        Stretch(num_tokens=400, holders={"a": "host"}),
    ]
    found = predict(candidate(), 500, stretches)
    assert [bring.source for bring in found.brings] == ["remote", "host"]


def test_a_prompt_without_tokens_costs_nothing() -> None:
    assert predict(candidate(), 0, []).first_token_s == 0


@given(st.integers(1, 2000), st.integers(0, 2000), STRETCHES)
def test_every_token_is_somewhere_and_bringing_never_costs_more_than_computing(
    num_tokens: int, pool_tokens: int, stretches: list[Stretch]
) -> None:
    found = predict(candidate(pool_tokens=pool_tokens, queue_s=1.0), num_tokens, stretches)
    brought = sum(bring.num_tokens for bring in found.brings)
    assert found.pool_tokens + brought + found.computed_tokens == num_tokens
    assert found.computed_tokens >= 1
    assert found.first_token_s == pytest.approx(1.0 + found.bring_s + found.compute_s)
    assert found.bring_s <= brought / 1000 + 1e-9
    alone = predict(candidate(pool_tokens=pool_tokens), num_tokens, [])
    assert found.work_s <= alone.work_s + 1e-9
