"""The NVMe tier of a replay, below a host tier: what it takes, gives back, and lets go."""

from __future__ import annotations

import numpy as np

from kvray.replay.tier import Tier
from kvray.store.demotion import paths_to
from kvray.store.policy import Admission
from kvray.store.tables import Array

_NOWHERE = -1


class Disk:
    """What is demoted to it stays when it is promoted; so it is not written twice."""

    def __init__(self, num_blocks: int, host: Tier, admission: Admission) -> None:
        """Lie below `host`, and take what `admission` admits."""
        self.num_written = 0
        self.tier = Tier(num_blocks, host.policy.beside(num_blocks))
        self._host = host
        self._admission = admission
        # Slot of either tier -> the other tier's slot of the same block.
        self._below = np.full(host.num_blocks, _NOWHERE, dtype=np.int64)
        self._above = np.full(num_blocks, _NOWHERE, dtype=np.int64)

    def find(self, keys: Array) -> Array:
        """Return the slots of the longest run of leading `keys`."""
        return self.tier.find(keys) if len(keys) else np.empty(0, dtype=np.int64)

    def promoted(self, slots: Array, copies: Array) -> None:
        """Note that the blocks in `slots` are in the host tier's slots `copies` from now on."""
        self._host.policy.copied(copies, self.tier.policy, slots)
        self._below[copies], self._above[slots] = slots, copies

    def used(self, copies: Array) -> None:
        """Note that blocks of the host tier were used: those that are here are as good."""
        copies = copies[self._below[copies] != _NOWHERE]
        slots = self._below[copies]
        self.tier.policy.copied(slots, self._host.policy, copies)
        self.tier.touch(slots)

    def stored(self, copies: Array) -> None:
        """Note that the host tier's slots `copies` have blocks that are not known to be here."""
        self._below[copies] = _NOWHERE

    def demote(self, victims: Array, *, now: float) -> None:
        """Take what is admitted of blocks that are to leave the host tier."""
        tables = self._host.tables
        new = victims[self._below[victims] == _NOWHERE]
        names = tables.slot_key[new, 0].view(np.int64)
        admitted = new[self._admission.admits(new, names, now=now)]
        for path in paths_to(tables, admitted, lambda some: self._below[some] != _NOWHERE):
            self._write(path, now)
        left = victims[self._below[victims] != _NOWHERE]
        self._above[self._below[left]] = _NOWHERE
        self._below[victims] = _NOWHERE

    def _write(self, path: Array, now: float) -> None:
        """Write a path of the host tier's blocks, if the block before it is still here."""
        tables = self._host.tables
        before, keys = int(tables.slot_parent[path[0]]), tables.slot_key[path]
        protect = self.tier.find_any(keys)
        protect = protect[protect >= 0]
        parent = None
        if before >= 0:
            if self._below[before] == _NOWHERE:
                return
            parent = tables.slot_key[before : before + 1]
            protect = np.append(protect, self._below[before])
        victims = self.tier.victims(len(keys), protect=protect, now=now)
        above = self._above[victims]
        self._below[above[above != _NOWHERE]] = _NOWHERE
        self._above[victims] = _NOWHERE
        self.tier.evict(victims)
        made = self.tier.store(keys, parent=parent, depth=int(tables.slot_depth[path[0]]))
        self.num_written += len(made.slots)
        slots = self.tier.find_any(keys)
        path, slots = path[slots >= 0], slots[slots >= 0]
        self.tier.policy.copied(slots, self._host.policy, path)
        self._below[path], self._above[slots] = slots, path
