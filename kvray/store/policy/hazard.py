"""When blocks are used again: rates learned by class and age, and what a block is worth by them.

A class is a combination of factors, such as the turn of its conversation and the length of its
prompt. From what was used again at which age, and what was not, a rate of return is estimated for
every class and age; from the rates follows the Gittins index: the best ratio, over all spans that
a block may still be kept, of the hits expected to the time for which it would take up its place.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NUM_AGES = 18
_FIRST_S = 4.0
_EDGES = np.concatenate(([0.0], _FIRST_S * 2.0 ** np.arange(NUM_AGES - 1)))
"""Where the ages begin, seconds: each but the first is twice as long as the one before."""
_WIDTHS = np.diff(np.append(_EDGES, 2 * _EDGES[-1]))

_FACTOR_PRIOR = 1.0
_CLASS_PRIOR = 4.0
"""Returns that are taken for seen, at the rate of what a class or a factor is a part of, before
its own are believed."""
_SWEEPS = 4


def age_of(seconds: Array) -> Array:
    """Return the age, from 0 to NUM_AGES - 1, of what was used so many seconds ago."""
    return np.searchsorted(_EDGES, seconds, side="right") - 1


def worth_at(worth: Array, classes: Array, seconds: Array) -> Array:
    """Return what `worth` says of blocks of `classes` that were used so many seconds ago."""
    place = np.log2(np.maximum(seconds, _FIRST_S / 2) * (2 / _FIRST_S))
    place = np.minimum(place, NUM_AGES - 1.001)
    age = place.astype(np.int64)
    share = place - age
    cells = classes * NUM_AGES + age
    flat = worth.reshape(-1)
    found: Array = flat.take(cells) * (1 - share) + flat.take(cells + 1) * share
    return found


def worth(classes: Array, seconds: Array, has_returned: Array, *, factors: Sequence[int]) -> Array:
    """Return the Gittins index of every class at every age, f8 of shape [num_classes, NUM_AGES].

    Args:
        classes: of each observation, its class.
        seconds: until it returned, or for how long it has been waited for.
        has_returned: whether it did.
        factors: how many values each factor has; their product is the number of classes, the
            last factor changes fastest.
    """
    num_classes = int(np.prod(factors))
    cells = classes * NUM_AGES + age_of(seconds)
    shape = num_classes, NUM_AGES
    ended = np.bincount(cells, minlength=num_classes * NUM_AGES).reshape(shape)
    returned = np.bincount(cells[has_returned], minlength=num_classes * NUM_AGES).reshape(shape)
    # Who was given up on at an age was there for half of it.
    at_risk = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - 0.5 * (ended - returned)
    return _gittins(_rates(_smooth(returned), _smooth(at_risk), factors))


def _smooth(counts: Array) -> Array:
    """Return counts that each age shares with its neighbours: few are seen of most classes."""
    padded = np.pad(counts, ((0, 0), (1, 1)), mode="edge")
    smooth: Array = 0.25 * padded[:, :-2] + 0.5 * padded[:, 1:-1] + 0.25 * padded[:, 2:]
    return smooth


def _rates(returned: Array, at_risk: Array, factors: Sequence[int]) -> Array:
    """Return the probability of a return at each age, f8 of shape [num_classes, NUM_AGES].

    Poisson rates: one of the age, times one multiplier for each factor (iterative proportional
    scaling), times one for the class, as far as its own returns speak for that.
    """
    base = (returned.sum(axis=0) + 0.02) / (at_risk.sum(axis=0) + 1.0)
    expected = (at_risk * base).sum(axis=1).reshape(factors)
    seen = returned.sum(axis=1).reshape(factors)
    multiplier = np.ones(factors)
    for _ in range(_SWEEPS):
        for axis in range(len(factors)):
            others = tuple(one for one in range(len(factors)) if one != axis)
            want = seen.sum(axis=others, keepdims=True) + _FACTOR_PRIOR
            multiplier *= want / (
                (expected * multiplier).sum(axis=others, keepdims=True) + _FACTOR_PRIOR
            )
    rates = np.minimum(multiplier.reshape(-1, 1) * base, 1.0)
    own = (returned.sum(axis=1) + _CLASS_PRIOR) / ((at_risk * rates).sum(axis=1) + _CLASS_PRIOR)
    rates = np.minimum(rates * own[:, None], 1.0)
    return np.minimum((returned + _CLASS_PRIOR * rates) / (at_risk + _CLASS_PRIOR), 1.0)


def _gittins(rates: Array) -> Array:
    best = np.zeros_like(rates)
    for age in range(NUM_AGES):
        rate = rates[:, age:]
        stays = np.cumprod(1.0 - rate, axis=1)
        reaches = np.concatenate((np.ones((len(rates), 1)), stays[:, :-1]), axis=1)
        hits = np.cumsum(reaches * rate, axis=1)
        place = np.cumsum(reaches * (1.0 - rate / 2) * _WIDTHS[age:], axis=1)
        best[:, age] = (hits / place).max(axis=1)
    return best
