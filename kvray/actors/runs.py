"""Who has which blocks of a prefix, in runs of equal holders; pure."""

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from kvray.actors.staging import Mask, Run


def runs_of(holder: str, masks: Mapping[int, Mask]) -> list[Run]:
    """Return the runs of what one holder has.

    Args:
        holder: its name.
        masks: part -> which blocks of the prefix it has; of equal lengths.
    """
    length = max((len(mask) for mask in masks.values()), default=0)
    if not any(mask.any() for mask in masks.values()):
        return []
    changes = [np.flatnonzero(np.diff(mask)) + 1 for mask in masks.values()]
    stops = np.unique(np.concatenate([*changes, [length]])).astype(int).tolist()
    runs: list[Run] = []
    for stop in stops:
        parts = sum(1 << part for part, mask in masks.items() if mask[stop - 1])
        runs.append((stop, {holder: parts} if parts else {}))
    return runs


def merged(one: Sequence[Run], other: Sequence[Run]) -> list[Run]:
    """Return the runs of what the holders in both have."""
    if not one or not other:
        return [*one, *other]
    stops = sorted({stop for stop, _ in (*one, *other)})
    return [(stop, {**_holders(one, stop), **_holders(other, stop)}) for stop in stops]


def _holders(runs: Sequence[Run], stop: int) -> Mapping[str, int]:
    """Return who has the block before `stop`."""
    at = bisect.bisect_left(runs, stop, key=lambda run: run[0])
    return runs[at][1] if at < len(runs) else {}
