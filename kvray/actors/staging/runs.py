"""Joins runs of blocks with equal holders; pure."""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from kvray.actors.staging.plan import Mask
from kvray.index import Run


def runs_of(holder: str, masks: Mapping[int, Mask]) -> list[Run]:
    """Return the runs of the blocks that one holder has.

    The `masks` by part, all of equal length, say which of the prefix's blocks those are.
    """
    length = max((len(mask) for mask in masks.values()), default=0)
    if not any(mask.any() for mask in masks.values()):
        return []
    changes = [np.flatnonzero(np.diff(mask)) + 1 for mask in masks.values()]
    stops = np.unique(np.concatenate([*changes, [length]])).astype(int).tolist()
    runs: list[Run] = []
    for stop in stops:
        parts = sum(1 << part for part, mask in masks.items() if mask[stop - 1])
        runs.append(Run(stop=stop, holders={holder: parts} if parts else {}))
    return runs


def merged(one: Sequence[Run], other: Sequence[Run]) -> list[Run]:
    """Return the runs with the holders of both."""
    if not one or not other:
        return [*one, *other]
    stops = sorted({run.stop for run in (*one, *other)})
    return [
        Run(stop=stop, holders={**_holders(one, stop), **_holders(other, stop)}) for stop in stops
    ]


def _holders(runs: Sequence[Run], stop: int) -> Mapping[str, int]:
    at = bisect.bisect_left(runs, stop, key=lambda run: run.stop)
    return runs[at].holders if at < len(runs) else {}
