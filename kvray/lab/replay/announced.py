"""The content of tiers as a lookup's index knows it: announced, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import default_rng  # here, so that no replay pays for its import

from kvray.index import Index
from kvray.lab.replay.tier import NOWHERE, Tier
from kvray.store.arena.tables import Array


class Announced:
    """The index of a lookup, to which each tier announces its blocks as a shard would."""

    def __init__(self, tiers: Sequence[Tier], num_blocks: int) -> None:
        self._index = Index()
        self._tiers = tiers
        self._known = np.zeros((len(tiers), num_blocks), dtype=bool)
        # As uniform as sha256's.
        self._keys = default_rng(0).integers(0, 2**64, size=(num_blocks, 4), dtype=np.uint64)

    def announce(self, asked_next: Array) -> None:
        """Tell the index what came and left; it must find of the blocks what the tiers have."""
        for at, tier in enumerate(self._tiers):
            is_here = tier.slots != NOWHERE
            has_changed = is_here != self._known[at]
            removed, added = self._keys[has_changed & ~is_here], self._keys[has_changed & is_here]
            self._index.remove(str(at), removed.tobytes(), [0] * len(removed))
            self._index.add(str(at), added.tobytes(), [0] * len(added))
            self._known[at] = is_here
        assert len(self._index) == np.count_nonzero(self._known.any(axis=0)), "nothing is forgotten"
        blocks = np.unique(asked_next)
        found = np.zeros((len(self._tiers), len(blocks)), dtype=bool)
        start = 0
        for run in self._index.locate(self._keys[blocks].tobytes()):
            found[:, start : run.stop] = [[str(at) in run.holders] for at in range(len(found))]
            start = run.stop
        assert (found == self._known[:, blocks]).all(), "the index says so too"
