"""Which replica gets a request: costs and choices over plain data, without Ray, clock or I/O.

A router feeds it with lookups and measured rates, and keeps a `Load` and a `PoolGuess` of each
replica.
"""

from kvray.routing.choice import Choice, Ranked, Reason, choose
from kvray.routing.cost import Bring, Candidate, Cost, Link, Rates, Stretch, predict
from kvray.routing.load import Load
from kvray.routing.pool_guess import PoolGuess

__all__ = [
    "Bring",
    "Candidate",
    "Choice",
    "Cost",
    "Link",
    "Load",
    "PoolGuess",
    "Ranked",
    "Rates",
    "Reason",
    "Stretch",
    "choose",
    "predict",
]
