"""Which replica gets a request: costs and choices over plain data, without Ray, clock or I/O.

A router feeds it with what shards say of a prompt. `ReplicaLoads` has the load of each replica and
what its pool has, `Decisions` follows each request to its first token.
"""

from kvray.routing.choice import Choice, Ranked, Reason, choose
from kvray.routing.cost import (
    PREFILL_STAT,
    SLOWDOWN_STAT,
    Bring,
    Candidate,
    Cost,
    Link,
    PrefillSpeed,
    Rates,
    Stretch,
    predict,
)
from kvray.routing.decisions import Decisions, Outcomes
from kvray.routing.loads import Load, Lru, Place, PoolMatch, ReplicaLoads
from kvray.routing.survey import Profile, Survey, survey_of

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
    "ReplicaLoads",
    "Stretch",
    "Survey",
    "choose",
    "predict",
    "survey_of",
]
