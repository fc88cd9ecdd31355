"""Estimates when blocks are used again, by class and age, and what a block is worth by that.

A class is a combination of factors, such as the turn of its conversation and the length of its
prompt. A rate of return is estimated for every class and age, from what was used again at which
age, and what was not. The rates give the chance that a block returns at all, and its Gittins index:
over all spans for which it may still be kept, the best ratio of expected hits to the time that it
takes up its place.
"""

from collections.abc import Sequence

import numpy as np

from kvray.store.arena.layout import Array

NUM_AGES = 18
_FIRST_S = 4.0
_EDGES = np.concatenate(([0.0], _FIRST_S * 2.0 ** np.arange(NUM_AGES - 1)))
"""Where the ages begin, seconds: from a moment to days, each twice as long as the one before."""
_WIDTHS = np.diff(np.append(_EDGES, 2 * _EDGES[-1]))

_FACTOR_PRIOR = 1.0
_CLASS_PRIOR = 4.0
"""Assumed returns, at the rate that all others suggest: they outweigh the first few real ones of a
factor's value or of a class."""
_SWEEPS = 4


def rates_of(
    classes: Array, seconds: Array, has_returned: Array, *, factors: Sequence[int]
) -> Array:
    """Return the probability of a return in each class at each age, f8 [num_classes, NUM_AGES].

    Args:
        classes: the class of each observation.
        seconds: until it returned, or for how long it has been waited for.
        has_returned: whether it did.
        factors: how many values each factor has; their product is the number of classes, and the
            last factor changes fastest.
    """
    num_classes = int(np.prod(factors))
    cells = classes * NUM_AGES + np.searchsorted(_EDGES, seconds, side="right") - 1
    ended, returned = (
        np.bincount(some, minlength=num_classes * NUM_AGES).reshape(num_classes, NUM_AGES)
        for some in (cells, cells[has_returned])
    )
    # An observation that ended without a return at an age counts for half of that age.
    at_risk = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - 0.5 * (ended - returned)
    return _fit(_smooth(returned), _smooth(at_risk), factors)


def worth_of(rates: Array) -> Array:
    """Return the Gittins index, hits a second, of each class at the beginning of each age."""
    best = np.zeros_like(rates)
    for age in range(NUM_AGES):
        rate = rates[:, age:]
        stays = np.cumprod(1.0 - rate, axis=1)
        reaches = np.concatenate((np.ones((len(rates), 1)), stays[:, :-1]), axis=1)
        hits = np.cumsum(reaches * rate, axis=1)
        place = np.cumsum(reaches * (1.0 - rate / 2) * _WIDTHS[age:], axis=1)
        best[:, age] = (hits / place).max(axis=1)
    return best


def chance_of(rates: Array) -> Array:
    """Return the probability of a return at all, of each class from the beginning of each age."""
    chance: Array = 1.0 - np.cumprod((1.0 - rates)[:, ::-1], axis=1)[:, ::-1]
    return chance


def at(table: Array, classes: Array, seconds: Array) -> Array:
    """Return the values of a table [classes, ages] for blocks used so many `seconds` ago."""
    place = np.log2(np.maximum(seconds, _FIRST_S / 2) * (2 / _FIRST_S))
    place = np.minimum(place, NUM_AGES - 1.001)
    age = place.astype(np.int64)
    share = place - age
    cells = classes * NUM_AGES + age
    flat = table.reshape(-1)
    found: Array = flat.take(cells) * (1 - share) + flat.take(cells + 1) * share
    return found


def _smooth(counts: Array) -> Array:
    """Return counts that each age shares with its neighbours: most classes have few."""
    padded = np.pad(counts, ((0, 0), (1, 1)), mode="edge")
    smooth: Array = 0.25 * padded[:, :-2] + 0.5 * padded[:, 1:-1] + 0.25 * padded[:, 2:]
    return smooth


def _fit(returned: Array, at_risk: Array, factors: Sequence[int]) -> Array:
    """Return rates: one of the age, times multipliers of each factor's value and of the class.

    Iterative proportional scaling, which fits Poisson rates, finds the factors' multipliers.
    """
    base = (returned.sum(axis=0) + 0.02) / (at_risk.sum(axis=0) + 1.0)
    expected = (at_risk * base).sum(axis=1).reshape(factors)
    seen = returned.sum(axis=1).reshape(factors)
    multiplier = np.ones(factors)
    for _ in range(_SWEEPS):
        for axis in range(len(factors)):
            others = tuple(one for one in range(len(factors)) if one != axis)
            have = (expected * multiplier).sum(axis=others, keepdims=True) + _FACTOR_PRIOR
            multiplier *= (seen.sum(axis=others, keepdims=True) + _FACTOR_PRIOR) / have
    rates = np.minimum(multiplier.reshape(-1, 1) * base, 1.0)
    own = (returned.sum(axis=1) + _CLASS_PRIOR) / ((at_risk * rates).sum(axis=1) + _CLASS_PRIOR)
    rates = np.minimum(rates * own[:, None], 1.0)
    fitted: Array = np.minimum((returned + _CLASS_PRIOR * rates) / (at_risk + _CLASS_PRIOR), 1.0)
    return fitted
