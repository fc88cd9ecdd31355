"""The NVMe tier of a replay, below a host tier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvray.lab.replay.level import NOWHERE, Level, names_of
from kvray.lab.replay.trace import Trace
from kvray.store.arena.tables import Array
from kvray.store.policy import Admission


class Disk:
    """A demoted block stays on disk when it is promoted, so it is not written twice."""

    def __init__(
        self,
        trace: Trace,
        host: Level,
        num_blocks: int,
        admission: Admission,
        keys: Array,
        *,
        settle: Callable[[float], None],
    ) -> None:
        """Lie below `host`, and take those blocks that leave it and that `admission` admits."""
        policy = host.tier.policy.beside(num_blocks)
        self.level = Level(trace, policy, num_blocks, keys, settle=settle, is_below=True)
        self.num_written = 0
        self.needed: Array = np.empty(0, dtype=np.int64)
        """Blocks that stay in any case: those that are to be promoted."""
        self._host = host
        self._admission = admission
        self._names = names_of(keys)
        self._ids, self._depths = trace.ids, trace.depths()
        self._first_places = trace.first_places()
        self._written: list[Array] = []
        """Blocks that were written since the tables followed."""
        host.leaving = self._demote

    def follow(self) -> None:
        """Let the tables follow; the host's tables still have the blocks that left it since."""
        self.level.follow()
        if self._written:
            blocks = np.concatenate(self._written)
            self._written.clear()
            self.level.store(blocks)
            self.used(blocks)

    def promoted(self, blocks: Array) -> None:
        """Hand the host's policy what the disk's knows of blocks that are in both tables now."""
        here, there = self._slots(blocks)
        self._host.tier.policy.copied(there, self.level.tier.policy, here)

    def used(self, blocks: Array) -> None:
        """Hand the disk's policy what the host's knows of blocks that were used."""
        here, there = self._slots(blocks)
        self.level.tier.policy.copied(here, self._host.tier.policy, there)

    def _slots(self, blocks: Array) -> tuple[Array, Array]:
        """Return the slots of those of `blocks` that are in both tiers: here, and in the host."""
        here, there = self.level.slots.take(blocks), self._host.slots.take(blocks)
        both = (here != NOWHERE) & (there != NOWHERE)
        return here[both], there[both]

    def _demote(self, going: Array, now: float) -> None:
        """Take the admitted ones of blocks that leave the host tier, with all their ancestors."""
        new = going[~self.level.is_here.take(going)]
        if not len(new):
            return
        slots = self._host.slots.take(new)
        admitted = new[self._admission.admits(slots, self._names.take(new), now=now)]
        # Children leave before their parents: the first one mostly brings its whole prompt.
        for block in admitted.tolist():
            if not self.level.is_here[block]:
                first = self._first_places[block]
                self._write(self._ids[first - self._depths[block] : first + 1], now)

    def _write(self, path: Array, now: float) -> None:
        """Write the missing blocks of a path from the root."""
        level = self.level
        num_here = int(level.is_here.take(path).argmin())
        before, missing = path[:num_here], path[num_here:]
        level.use(path)
        short = len(missing) - level.num_free
        if short > 0:
            level.make_room(short, protect=np.concatenate((before, self.needed)), now=now)
        missing = missing[: level.num_free]
        level.enter(missing)
        self._written.append(missing)
        self.num_written += len(missing)
