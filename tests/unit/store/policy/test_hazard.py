"""Rates of return, and what blocks are worth by them."""

from itertools import product

import numpy as np
import pytest

from kvray.store.arena.tables import Array
from kvray.store.policy import hazard
from kvray.store.policy.hazard import NUM_AGES

EDGES = [0.0, *(4.0 * 2.0**age for age in range(NUM_AGES))]
"""Where the ages begin, and where the last one ends."""


def lives(
    rates: Array, classes: Array, *, waited: tuple[int, int], seed: int = 0
) -> tuple[Array, Array]:
    """Return after how many seconds each came back, or for how long it was waited for.

    Args:
        rates: chance of a return in each class at each age.
        classes: of each life.
        waited: the ages in which lives end that have not come back, from and below.
        seed: of everything that is left to chance.
    """
    rng = np.random.default_rng(seed)
    returns = rng.random((len(classes), NUM_AGES)) < rates[classes]
    age = np.where(returns.any(axis=1), returns.argmax(axis=1), NUM_AGES)
    last = rng.integers(*waited, len(classes))
    has_returned = age < last
    edges = np.array(EDGES)
    age = np.minimum(age, last)
    return rng.uniform(edges[age], edges[age + 1]), has_returned


def learn(
    classes: Array, seconds: Array, has_returned: Array, *, factors: tuple[int, ...]
) -> Array:
    return hazard.rates_of(classes, seconds, has_returned, factors=factors)


def test_known_rates_are_found_again() -> None:
    factors = (3, 2, 2)
    of_age = 0.02 + 0.1 * np.exp(-0.5 * ((np.arange(NUM_AGES) - 6) / 3) ** 2)
    of_class = np.array([a * b * c for a, b, c in product((0.3, 1, 3), (1, 1), (0.5, 1))])
    true = of_class[:, None] * of_age
    classes = np.random.default_rng(1).integers(0, 12, 200_000)
    seconds, has_returned = lives(true, classes, waited=(8, 18))
    found = learn(classes, seconds, has_returned, factors=factors)
    # Neighbouring ages are taken together, so a peak is found a little flatter. Later on hardly
    # any of the class with the highest rates is left.
    assert found[:, 1:11] == pytest.approx(true[:, 1:11], rel=0.25)
    means = found[:, 1:11].mean(axis=1)
    assert means == pytest.approx(true[:, 1:11].mean(axis=1), rel=0.1)


def test_a_constant_rate_is_found_exactly_enough() -> None:
    true = np.full((1, NUM_AGES), 0.1)
    seconds, has_returned = lives(true, np.zeros(50_000, dtype=int), waited=(17, 18))
    found = learn(np.zeros(50_000, dtype=int), seconds, has_returned, factors=(1,))
    assert found[:, :12] == pytest.approx(true[:, :12], rel=0.1)


def test_a_class_of_which_nothing_is_known_has_the_rates_of_its_factors() -> None:
    true = np.repeat([[0.05], [0.2], [0.05], [0.2]], NUM_AGES, axis=1)
    classes = np.repeat([0, 1, 2], 20_000)  # of (row, column) (1, 1) there is none
    seconds, has_returned = lives(true, classes, waited=(17, 18))
    found = learn(classes, seconds, has_returned, factors=(1, 2, 2))
    assert found[3, 2] == pytest.approx(0.2, rel=0.15)


def test_one_return_is_not_believed() -> None:
    true = np.full((2, NUM_AGES), 0.01)
    classes = np.append(np.zeros(10_000, dtype=int), 1)
    seconds, has_returned = lives(true, classes, waited=(17, 18))
    seconds[-1], has_returned[-1] = 6.0, True
    found = learn(classes, seconds, has_returned, factors=(1, 2))
    assert found[0, 1] < found[1, 1] < 0.3


def test_without_an_observation_there_are_rates_all_the_same() -> None:
    none = np.zeros(0)
    found = learn(none.astype(int), none, none.astype(bool), factors=(2, 3, 2))
    assert found.shape == (12, NUM_AGES)
    assert (found > 0).all()
    assert (found < 0.1).all()


def test_rates_are_probabilities_whatever_was_seen() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 10, 1000):
        classes = rng.integers(0, 12, count)
        seconds = rng.exponential(10.0 ** rng.integers(0, 7, count))
        seconds[: count // 5] = 0.0
        found = learn(classes, seconds, rng.random(count) < 0.9, factors=(2, 3, 2))
        assert ((found >= 0) & (found <= 1)).all()
        assert np.isfinite(hazard.worth_of(found)).all()


def test_ages_share_with_their_neighbours() -> None:
    classes, seconds = np.zeros(10_000, dtype=int), np.full(10_000, 100.0)
    has_returned = np.arange(10_000) < 5000
    found = learn(classes, seconds, has_returned, factors=(1,))[0]
    age = int(np.searchsorted(EDGES, 100.0)) - 1
    assert found[age] > found[age - 1] > 10 * found[age - 2]
    assert found[age + 1] > 10 * found[age - 2]


def best_ratio(rates: list[float], age: int) -> float:
    """Try every span from `age` on: hits expected over seconds in the tier."""
    best, stays, hits, place = 0.0, 1.0, 0.0, 0.0
    for at in range(age, NUM_AGES):
        hits += stays * rates[at]
        # Who returns in an age does so in its middle.
        place += stays * (1 - rates[at] + rates[at] / 2) * (EDGES[at + 1] - EDGES[at])
        stays *= 1 - rates[at]
        best = max(best, hits / place)
    return best


def test_worth_is_the_best_ratio_over_all_spans() -> None:
    rates = np.random.default_rng(0).random((30, NUM_AGES)) ** 4
    worth = hazard.worth_of(rates)
    expected = [[best_ratio(one, age) for age in range(NUM_AGES)] for one in rates.tolist()]
    assert worth == pytest.approx(np.array(expected))


def test_who_always_returns_is_worth_more_than_who_never_does() -> None:
    always, never = np.full(NUM_AGES, 0.9), np.full(NUM_AGES, 0.0)
    worth = hazard.worth_of(np.stack([always, never]))
    assert (worth[0] > 0).all()
    assert (worth[1] == 0).all()


def test_who_is_about_to_return_is_worth_more_than_who_just_was_here() -> None:
    rates = np.zeros((1, NUM_AGES))
    rates[0, 8] = 0.9
    worth = hazard.worth_of(rates)[0]
    assert (np.diff(worth[:9]) > 0).all()
    assert (worth[9:] == 0).all()


def test_chance_is_that_of_any_return_from_there_on() -> None:
    rates = np.random.default_rng(1).random((4, NUM_AGES)) * 0.2
    chance = hazard.chance_of(rates)
    for one, age in product(range(4), range(NUM_AGES)):
        stays = 1.0
        for rate in rates[one, age:].tolist():
            stays *= 1 - rate
        assert chance[one, age] == pytest.approx(1 - stays)


def test_a_table_is_read_between_its_ages() -> None:
    table = np.arange(2.0 * NUM_AGES).reshape(2, NUM_AGES) ** 2
    ones = np.ones(3, dtype=int)
    assert hazard.at(table, ones, np.array(EDGES[1:4])) == pytest.approx(table[1, 1:4])
    between = hazard.at(table, ones[:1], np.array([EDGES[3] * 2**0.5]))
    assert between == pytest.approx(table[1, 3:5].mean())


def test_before_the_first_and_after_the_last_age_a_table_goes_on_as_it_ends() -> None:
    table = np.arange(1.0 * NUM_AGES)[None]
    found = hazard.at(table, np.zeros(4, dtype=int), np.array([0.0, 1.0, 1e7, 1e12]))
    assert found == pytest.approx([0, 0, NUM_AGES - 1, NUM_AGES - 1], abs=0.01)
