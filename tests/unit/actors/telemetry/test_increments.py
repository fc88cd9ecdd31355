"""What has grown is given once: after restarts of who counts, and of who gives."""

from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.telemetry.figures import Increments


def test_what_has_grown_is_given_once() -> None:
    increments: Increments[str] = Increments()

    assert increments.take("rank", {"hits": 5}) == {"hits": 5}
    assert increments.take("rank", {"hits": 5}) == {"hits": 0}
    assert increments.take("rank", {"hits": 7, "misses": 1}) == {"hits": 2, "misses": 1}


def test_what_somebody_else_has_given_is_not_given_again() -> None:
    increments: Increments[str] = Increments()

    assert increments.take("arena", {"stored": 900}, counted_before=True) == {"stored": 0}
    assert increments.take("arena", {"stored": 902}, counted_before=True) == {"stored": 2}


def test_a_new_life_counts_from_zero() -> None:
    increments: Increments[str] = Increments()
    increments.take("rank", {"hits": 5}, life=0)

    assert increments.take("rank", {"hits": 6}, life=1) == {"hits": 6}


def test_a_total_that_falls_gives_nothing_until_it_is_higher_than_ever() -> None:
    increments: Increments[str] = Increments()
    increments.take("rank", {"not_stored": 10})

    assert increments.take("rank", {"not_stored": 4}) == {"not_stored": 0}
    assert increments.take("rank", {"not_stored": 10}) == {"not_stored": 0}
    assert increments.take("rank", {"not_stored": 11}) == {"not_stored": 1}


def test_sources_do_not_meet_and_those_that_are_gone_are_forgotten() -> None:
    increments: Increments[str] = Increments()
    increments.take("a", {"hits": 5})
    assert increments.take("b", {"hits": 3}) == {"hits": 3}

    increments.retain({"a"})

    assert increments.take("a", {"hits": 5}) == {"hits": 0}
    assert increments.take("b", {"hits": 3}) == {"hits": 3}


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("xy"), st.integers(0, 50)), max_size=8),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_over_any_lives_the_increments_add_up_to_what_was_counted(
    lives: list[list[tuple[str, int]]], counted_before: bool
) -> None:
    increments: Increments[str] = Increments()
    given_, counted = {"x": 0.0, "y": 0.0}, {"x": 0, "y": 0}
    is_first_look = True
    for life, steps in enumerate(lives):
        totals = {"x": 0, "y": 0}
        for name, by in steps:
            totals[name] += by
            grown = increments.take("rank", totals, life=life, counted_before=counted_before)
            assert all(value >= 0 for value in grown.values())
            if is_first_look and counted_before:
                before = dict(totals)
                is_first_look = False
                given_ = {key: float(value) for key, value in before.items()}
            else:
                given_ = {key: given_[key] + grown[key] for key in given_}
        counted = {key: counted[key] + totals[key] for key in counted} if steps else counted
    assert given_ == counted
