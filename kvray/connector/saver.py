"""Saves behind the forward pass: one thread that copies blocks to the arena and commits them.

What crosses threads: `Job`s, through a bounded queue. The thread reads the pool only between
`submit` and the end of `fence`: the engine calls `fence` before it writes the pool again, and a
job that has not been read by then is abandoned. `_guard` makes "abandon" and "keep what was read"
exclude each other, so a block is never committed with bytes read after the fence.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvray.connector.plan import SavePlan
from kvray.errors import KVRayError
from kvray.node import NodeLink
from kvray.store import Arena, Reservation
from kvray.store.tables import Array

_log = logging.getLogger("kvray.connector")

_RESERVE_WAIT_S = 0.05
_FENCE_S = 0.25
"""Longest hold of the engine's thread for the reads of the pass before; then saves are lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request's blocks of one pass."""

    plan: SavePlan
    rows: Array
    """Bytes to read from, [n, block_bytes]."""
    block_ids: Array
    """Rows of `rows`, one a key of the plan."""


class Saver:
    """Saves of one rank; `submit`, `fence` and `is_reading` are the engine's thread's."""

    def __init__(self, link: NodeLink, *, part: int, saves_max: int, totals: Counter[str]) -> None:
        """Save part `part` through `link`; at most `saves_max` jobs may wait."""
        self._link = link
        self._part = part
        self._saves_max = saves_max
        self._totals = totals
        self._jobs: deque[Job] = deque()
        self._reading: Job | None = None
        self._abandoned = False
        self._guard = threading.Condition()
        self._closing = False
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="kvray-saver", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have `job` saved; dropped if too many wait already."""
        with self._guard:
            if len(self._jobs) >= self._saves_max or self._closing:
                self._drop(len(job.plan.keys), "too many saves wait")
                return
            self._jobs.append(job)
            self._guard.notify_all()

    def fence(self) -> None:
        """Return when no block of an earlier pass is or will be read any more."""
        with self._guard:
            if not self._guard.wait_for(self._is_quiet, _FENCE_S):
                waiting = sum(len(job.plan.keys) for job in self._jobs)
                self._jobs.clear()
                self._abandoned = self._reading is not None
                self._drop(waiting, "the copy took too long")

    def is_reading(self, request_id: int) -> bool:
        """Whether blocks of a request are, or are about to be, read."""
        with self._guard:
            reading = [*self._jobs, *([self._reading] if self._reading else [])]
            return any(job.plan.request_id == request_id for job in reading)

    def close(self, timeout_s: float) -> None:
        """Save what waits, for at most `timeout_s`, and end the thread. Twice is fine."""
        with self._guard:
            self._closing = True
            self._guard.notify_all()
        self._thread.join(timeout_s)

    def _is_quiet(self) -> bool:
        return not self._jobs and self._reading is None

    def _run(self) -> None:
        while True:
            with self._guard:
                self._guard.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                self._reading, self._abandoned = self._jobs.popleft(), False
            try:
                self._save(self._reading)
            except KVRayError as error:
                self._drop(len(self._reading.plan.keys), str(error))
            finally:
                self._read_ended()

    def _save(self, job: Job) -> None:
        arena = self._link.arena
        reservation = None if arena is None else self._reserve(arena, job)
        if arena is None or reservation is None:
            self._drop(len(job.plan.keys), "the tier was not there or stayed busy")
            return
        self._totals["existing_blocks"] += reservation.existing
        if reservation.dropped:
            self._drop(
                reservation.dropped, "the arena is full of leased blocks, or the parent left"
            )
        if not len(reservation.slots):
            return
        checksums = arena.write(reservation, job.rows, job.block_ids[reservation.rows])
        if self._read_ended():
            self._drop(len(reservation.slots), "the copy took too long")
            self._settle(arena, lambda: arena.abort(reservation))
        elif self._settle(arena, lambda: arena.commit(reservation, checksums)):
            self._totals["stored_blocks"] += len(reservation.slots)

    def _reserve(self, arena: Arena, job: Job) -> Reservation | None:
        plan = job.plan
        return arena.reserve(
            plan.keys,
            parent=plan.parent,
            depth=plan.depth,
            part=self._part,
            block_bytes=job.rows.shape[1],
            wait_s=_RESERVE_WAIT_S,
        )

    def _read_ended(self) -> bool:
        """Note that the current job reads no more; True if it had been abandoned before."""
        with self._guard:
            self._reading = None
            self._guard.notify_all()
            return self._abandoned

    def _settle(self, arena: Arena, action: Callable[[], bool]) -> bool:
        """Commit or abort until the arena takes it or is retired."""
        while not action():
            if arena.retired:
                return False
            time.sleep(0.001)
        return True

    def _drop(self, num_blocks: int, why: str) -> None:
        self._totals["dropped_blocks"] += num_blocks
        if num_blocks and not self._warned:
            self._warned = True
            _log.warning("kvray: %d blocks were not saved: %s (said once)", num_blocks, why)
