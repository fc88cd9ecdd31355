"""Policies: which blocks of a tier go first, and which are worth a place in the next one."""

from collections.abc import Callable

from kvray.store.policy.admission import Admission, Everything, Likely, Twice
from kvray.store.policy.gittins import Gittins
from kvray.store.policy.policy import LRU, Policy, Use

__all__ = [
    "ADMISSIONS",
    "LRU",
    "POLICIES",
    "Admission",
    "Everything",
    "Gittins",
    "Likely",
    "Policy",
    "Twice",
    "Use",
]

POLICIES: dict[str, Callable[[int], Policy]] = {"lru": LRU, "gittins": Gittins}
"""By name; each is made of a number of slots."""

ADMISSIONS: dict[str, Callable[[int, Policy], Admission]] = {
    "all": Everything,
    "twice": Twice,
    "likely": Likely,
}
"""By name; each is made of the host tier's number of slots, and its policy."""
