"""Which replica gets a request: costs and choices over plain data, without Ray, clock or I/O.

A router feeds it with what shards say of a prompt. `Standings` has the load of each replica and
what its pool has, `Decisions` follows each request to its first token.
"""

from kvray.routing.choice import Choice, Ranked, Reason, choose
from kvray.routing.cost import Bring, Candidate, Cost, Link, Rates, Stretch, predict
from kvray.routing.decisions import Decisions
from kvray.routing.load import Load
from kvray.routing.lru import Lru
from kvray.routing.outcomes import Outcomes
from kvray.routing.prefill_speed import PREFILL_STAT, SLOWDOWN_STAT, PrefillSpeed
from kvray.routing.standings import Place, PoolMatch, Standings
from kvray.routing.survey import Profile, Survey, read_profile, survey_of

__all__ = [
    "PREFILL_STAT",
    "SLOWDOWN_STAT",
    "Bring",
    "Candidate",
    "Choice",
    "Cost",
    "Decisions",
    "Link",
    "Load",
    "Lru",
    "Outcomes",
    "Place",
    "PoolMatch",
    "PrefillSpeed",
    "Profile",
    "Ranked",
    "Rates",
    "Reason",
    "Standings",
    "Stretch",
    "Survey",
    "choose",
    "predict",
    "read_profile",
    "survey_of",
]
