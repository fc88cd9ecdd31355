"""Saves behind the forward pass: one thread that copies blocks to the arena and commits them.

What crosses threads: `Job`s, through a bounded queue.

Why a READY block is never wrong. A job's rows are either a copy of the engine's blocks, which
nobody else writes, or they are lent: the engine's own pool, in host memory. Lent rows are the
engine's again when `fence` returns, and the worker calls it before the engine can free or write a
block: at the end of `wait_for_save`, since nobody tells a connector of a cancelled request. The
thread copies a piece of a job into slots that are reserved, so that no reader sees them, and asks
`_was_read_in_time` afterwards. It and the end of `fence` exclude each other by `_guard`:

- either the thread comes first. Then `fence` has not returned, every byte of the piece was read
  while it was still the engine's computed block, and the piece may be committed;
- or `fence` gave up first, and has marked the job. Then the piece may hold foreign bytes; its
  slots are given back, and nothing more of the job is committed.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvray.block import BlockKey
from kvray.connector.plan import SavePlan
from kvray.errors import KVRayError
from kvray.node import NodeLink
from kvray.store import Arena, Reservation
from kvray.store.tables import Array

_log = logging.getLogger("kvray.connector")

_RESERVE_WAIT_S = 0.05
_STALL_S = 0.25
"""Longest that the engine's thread waits for one piece; then the rest of the pass is not saved."""
_PIECE_BYTES = 32 * 2**20
_COPIES_BYTES_MAX = 2 * 2**30
_CAUSES_MAX = 32

_AWAY = "the tier is not there"
_BUSY = "the arena stayed locked"
_FULL = "all else in the arena is leased, or the block before them is not there"
_MANY = "too many saves wait"
_SLOW = "the copy took too long"
_ENDED = "the connector was shut down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request's blocks of one pass."""

    plan: SavePlan
    rows: Array
    """Bytes to read from, [n, block_bytes]."""
    block_ids: Array
    """Rows of `rows`, one a key of the plan."""
    is_lent: bool = True
    """Whether `rows` are the engine's, and to be read before the fence; else they are a copy."""


class Saver:
    """Saves of one rank; `submit`, `fence` and `close` are the engine's threads'."""

    def __init__(self, link: NodeLink, *, part: int, saves_max: int, totals: Counter[str]) -> None:
        """Save part `part` through `link`; at most `saves_max` jobs may wait."""
        self._link = link
        self._part = part
        self._saves_max = saves_max
        self._totals = totals
        self._jobs: deque[Job] = deque()
        self._reading: Job | None = None
        self._abandoned = False
        self._pieces_read = 0
        self._guard = threading.Condition()
        self._closing = False
        self._said: set[str] = set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvray-saver", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have `job` saved; dropped if too many wait already."""
        if self._forked:
            return
        with self._guard:
            why = _ENDED if self._closing else _MANY if self._is_full(job) else None
            if why is not None:
                self._drop(len(job.plan.keys), why)
                return
            self._jobs.append(job)
            self._guard.notify_all()

    def fence(self) -> None:
        """Return when nothing that was submitted is read any more, or will be committed if it is.

        Waits as long as the thread gets on.
        """
        if self._forked:
            return
        with self._guard:
            while self._jobs or self._reading is not None:
                gets_on = partial(self._gets_on, self._pieces_read)
                if not self._guard.wait_for(gets_on, _STALL_S):
                    self._abandoned = self._reading is not None
                    self._drop_waiting(_SLOW)
                    return

    def close(self, timeout_s: float) -> None:
        """Save what waits, for at most `timeout_s`, and end the thread. Twice is fine."""
        if self._forked:
            return
        with self._guard:
            self._closing = True
            self._guard.notify_all()
        self._thread.join(timeout_s)

    @property
    def _forked(self) -> bool:
        """Whether this is a child's copy: its thread is not here, and its lock may never open."""
        return os.getpid() != self._pid

    def _is_full(self, job: Job) -> bool:
        if len(self._jobs) >= self._saves_max:
            return True
        waiting = sum(each.rows.nbytes for each in self._jobs if not each.is_lent)
        return not job.is_lent and waiting > 0 and waiting + job.rows.nbytes > _COPIES_BYTES_MAX

    def _gets_on(self, pieces_read: int) -> bool:
        return self._pieces_read != pieces_read or (not self._jobs and self._reading is None)

    def _run(self) -> None:
        while True:
            with self._guard:
                self._guard.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._reading = self._jobs.popleft()
                self._abandoned = False
            self._save(job)
            with self._guard:
                self._reading = None
                self._guard.notify_all()

    def _save(self, job: Job) -> None:
        """Save a job piece by piece, so that a long one is neither all nor nothing."""
        keys, step = job.plan.keys, max(1, _PIECE_BYTES // job.rows.shape[1])
        done = 0
        try:
            while done < len(keys):
                stop = min(done + step, len(keys))
                why = self._save_piece(job, done, stop)
                if why is not None:
                    self._drop(len(keys) - stop, why)
                    return
                done = stop
        except Exception as error:  # noqa: BLE001 - a defect must not end the thread; it is logged
            self._drop(len(keys) - done, str(error) or repr(error))
            if not isinstance(error, KVRayError):
                _log.exception("kvray: a defect while saving; the engine goes on")

    def _save_piece(self, job: Job, start: int, stop: int) -> str | None:
        """Save the blocks from `start` to `stop`; return why nothing after them can be saved."""
        arena, keys = self._link.arena, job.plan.keys[start:stop]
        if arena is None:
            self._drop(len(keys), _AWAY)
            return _AWAY
        reservation = self._reserve(arena, job, keys, start)
        if reservation is None:
            self._drop(len(keys), _BUSY)
            with self._guard:
                self._drop_waiting(_BUSY)  # each of them would hold the engine up as long again
            return _BUSY
        try:
            rows = job.block_ids[start:stop][reservation.rows]
            checksums = arena.write(reservation, job.rows, rows)
        except BaseException:
            self._settle(arena, lambda: arena.abort(reservation))
            raise
        if not self._was_read_in_time(is_last=stop == len(job.plan.keys)):
            self._drop(len(reservation.slots) + reservation.dropped, _SLOW)
            self._settle(arena, lambda: arena.abort(reservation))
            return _SLOW
        self._totals["existing_blocks"] += reservation.existing
        if len(reservation.slots) and self._settle(
            arena, lambda: arena.commit(reservation, checksums)
        ):
            self._totals["stored_blocks"] += len(reservation.slots)
        self._drop(reservation.dropped, _FULL)
        return _FULL if reservation.dropped else None

    def _reserve(
        self, arena: Arena, job: Job, keys: tuple[BlockKey, ...], start: int
    ) -> Reservation | None:
        return arena.reserve(
            keys,
            parent=job.plan.keys[start - 1] if start else job.plan.parent,
            depth=job.plan.depth + start,
            part=self._part,
            block_bytes=job.rows.shape[1],
            wait_s=_RESERVE_WAIT_S,
        )

    def _was_read_in_time(self, *, is_last: bool) -> bool:
        """Note that a piece was read; False if `fence` had given the job up. See the module."""
        with self._guard:
            self._pieces_read += 1
            if is_last:
                self._reading = None
            self._guard.notify_all()
            return not self._abandoned

    def _settle(self, arena: Arena, action: Callable[[], bool]) -> bool:
        """Commit or abort until the arena takes it or is retired."""
        while not action():
            if arena.retired:
                return False
            time.sleep(0.001)
        return True

    def _drop_waiting(self, why: str) -> None:
        waiting = sum(len(job.plan.keys) for job in self._jobs)
        self._jobs.clear()
        self._drop(waiting, why)

    def _drop(self, num_blocks: int, why: str) -> None:
        """Count blocks that are not saved; say each cause once."""
        with self._guard:
            self._totals["dropped_blocks"] += num_blocks
            if num_blocks and why not in self._said and len(self._said) < _CAUSES_MAX:
                self._said.add(why)
                _log.warning(
                    "kvray: %d blocks were not saved, nor will be what follows them in their"
                    " prompts: %s (said once)",
                    num_blocks,
                    why,
                )
