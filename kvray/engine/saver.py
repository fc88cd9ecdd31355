"""Saves behind the forward pass: one thread that copies blocks to the arena and commits them.

What crosses threads: `Job`s, through a bounded queue, and what is left to do when copies end.

Each piece of a job is first *begun*: slots are reserved, so that no reader sees them, and their
copy is made (host) or enqueued on the device. It is *finished* when the copy has ended: summed and
committed, which is left to the link's thread if the arena is busy. What waits to be begun comes
first.

Why a READY block is never wrong. A job's pages are the engine's, which may give them to others
once `fence` has returned: on the host by then they were read, on a device whatever writes them
later waits for the copies that were enqueued. The thread begins a piece and asks
`_was_begun_in_time` afterwards. It and the end of `fence` exclude each other by `_guard`:

- either the thread comes first. Then `fence` has not returned, and the piece may be committed;
- or `fence` gave up first, and has marked the job. Then the piece may hold foreign bytes; its
  slots are given back when its copy has ended, and nothing more of the job is committed.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvray.engine.cache_layout import Part
from kvray.engine.device.gpu import Pool
from kvray.engine.device.pool import Ticket
from kvray.engine.shared_state import SharedState
from kvray.identity.block import BlockKey
from kvray.store import Arena, Reservation
from kvray.store.arena.layout import DEFAULT_PRIORITY
from kvray.store.arena.tables import Array
from kvray.trace.reasons import DropReason

_log = logging.getLogger("kvray.connector")

_LOCK_WAIT_S = 0.05
_STALL_S = 0.25
"""Longest that the engine's thread waits for one piece; then the rest of the pass is not saved."""
_PIECE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Blocks of one request, one part of each, that lie in a row in its prompt."""

    request_id: int
    pool: Pool  # where the pages are; not kept longer than the job
    part: Part
    keys: Sequence[BlockKey]
    parent: BlockKey | None  # key of the block before the first
    depth: int  # place of the first block in its prompt
    pages: Array  # one a key
    priorities: bytes = b""
    """Retention priority of each, one byte; empty if all have the default."""
    counts_for: int = 0  # the namespace's number in an arena, or the tenant's
    mark: Any = None  # when they can be read, as `Pool.mark` returned it


class Saver:
    """Saves of one rank; `submit`, `fence` and `close` are the engine's threads'."""

    def __init__(self, shared: SharedState) -> None:
        self._link = shared.link
        self._saves_max = shared.config.connector.saves_max
        self._totals, self._drop = shared.figures.totals, shared.figures.drop
        self._boundary = shared.boundary
        self._reads = shared.pending_reads
        self._jobs: deque[Job] = deque()
        self._unfinished: deque[Callable[[], None]] = deque()
        self._beginning: Job | None = None
        self._abandoned = False
        self._progress = 0
        self._guard = threading.Condition()
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="kvray-saver", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have `job` saved; dropped if too many wait already."""
        if self._forked:
            return
        with self._guard:
            if self._closing or len(self._jobs) >= self._saves_max:
                why = DropReason.SHUT_DOWN if self._closing else DropReason.TOO_MANY
                self._drop(len(job.keys), why)
                return
            self._reads.begin(job.request_id)
            self._jobs.append(job)
            self._guard.notify_all()

    def fence(self) -> None:
        """Return when all that was submitted has begun, or will not be committed."""
        if self._forked:
            return
        with self._guard:
            while self._jobs or self._beginning is not None:
                if not self._wait_for_progress():
                    self._abandoned = self._beginning is not None
                    self._drop_waiting(DropReason.TOO_SLOW)
                    return

    def close(self, timeout_s: float) -> None:
        """Save what waits, for at most `timeout_s`, log what is lost, and end the thread."""
        if self._forked:
            return
        with self._guard:
            self._closing = True
            self._guard.notify_all()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return
        with self._guard:
            waiting = sum(len(job.keys) for job in self._jobs)
            begun = len(self._unfinished) + 1  # that which the thread is at
            self._drop_waiting(DropReason.SHUT_DOWN)
        _log.warning(
            "kvray: the engine ends before its saves: %d blocks are not saved, and %d saves that"
            " were begun may not be",
            waiting,
            begun,
        )

    @property
    def _forked(self) -> bool:
        """Whether this is a child's copy: its thread is not here, and its lock may never open."""
        return os.getpid() != self._pid

    def _wait_for_progress(self) -> bool:
        """Wait for the thread's next step; False if there is none in time."""
        progress = self._progress
        return self._guard.wait_for(lambda: self._progress != progress, _STALL_S)

    def _run(self) -> None:
        while True:
            job = finish = None
            with self._guard:
                self._guard.wait_for(lambda: self._jobs or self._unfinished or self._closing)
                if self._jobs:
                    job = self._beginning = self._jobs.popleft()
                    self._abandoned = False
                elif self._unfinished:
                    finish = self._unfinished.popleft()
                else:
                    return
            if job is not None:
                self._begin(job)
            elif finish is not None:
                finish()
            with self._guard:
                self._beginning = None
                self._progress += 1
                self._guard.notify_all()

    def _begin(self, job: Job) -> None:
        """Begin a job piece by piece, so that a long one is neither all nor nothing."""
        step = max(1, _PIECE_BYTES // job.part.block_bytes)
        done, count, why = 0, len(job.keys), None
        with self._boundary.around("a save"):
            while done < count and why is None:
                stop = min(done + step, count)
                why, done = self._begin_piece(job, done, stop), stop
        self._drop(count - done, why or DropReason.ERROR)
        with self._guard:
            # Behind its pieces: a request is read until the last of them has ended.
            self._unfinished.append(partial(self._reads.end, job.request_id))

    def _begin_piece(self, job: Job, start: int, stop: int) -> DropReason | None:
        """Begin the blocks from `start` to `stop`; return why nothing after them can be saved."""
        arena, keys = self._link.arena, job.keys[start:stop]
        if arena is None:
            self._drop(len(keys), DropReason.STORE_DOWN)
            return DropReason.STORE_DOWN
        reservation = self._reserve(arena, job, keys, start)
        if reservation is None:
            why = DropReason.STORE_DOWN if arena.retired else DropReason.ARENA_BUSY
            self._drop(len(keys), why)
            with self._guard:
                self._drop_waiting(why)  # each of them would hold the engine up as long again
            return why
        self._totals["existing_blocks"] += reservation.existing
        if len(reservation.slots):
            pages = job.pages[start:stop][reservation.rows]
            try:
                ticket = job.pool.save(arena, job.part, pages, reservation.slots, job.mark)
            except BaseException:
                self._abort(arena, reservation)
                raise
            if not self._was_begun_in_time(is_last=stop == len(job.keys)):
                self._drop(len(reservation.slots) + reservation.dropped, DropReason.TOO_SLOW)
                self._finish_later(ticket, partial(self._abort, arena, reservation))
                return DropReason.TOO_SLOW
            commit = partial(self._commit, arena, reservation, ticket)
            self._finish_later(ticket, commit, num_blocks=len(reservation.slots))
        self._drop(reservation.dropped, DropReason.NO_ROOM)
        return DropReason.NO_ROOM if reservation.dropped else None

    def _reserve(
        self, arena: Arena, job: Job, keys: Sequence[BlockKey], start: int
    ) -> Reservation | None:
        priorities = job.priorities[start : start + len(keys)]
        return arena.reserve(
            keys,
            parent=job.keys[start - 1] if start else job.parent,
            depth=job.depth + start,
            part=job.part.index,
            block_bytes=job.part.block_bytes,
            namespace=job.counts_for,
            priority=np.frombuffer(priorities, np.uint8) if priorities else DEFAULT_PRIORITY,
            # Blocks behind a window are gone, and nobody asks for them.
            needs_parent=job.part.window_blocks is None,
            wait_s=_LOCK_WAIT_S,
        )

    def _was_begun_in_time(self, *, is_last: bool) -> bool:
        """Note that a piece was begun; False if `fence` had given the job up. See the module."""
        with self._guard:
            self._progress += 1
            if is_last:
                self._beginning = None
            self._guard.notify_all()
            return not self._abandoned

    def _finish_later(
        self, ticket: Ticket, action: Callable[[], object], *, num_blocks: int = 0
    ) -> None:
        """Do `action` behind the copies of `ticket`; if it fails, `num_blocks` more are lost."""
        if ticket.sums is not None:
            action()
        else:
            self._unfinished.append(partial(self._finish_save, ticket, action, num_blocks))

    def _finish_save(self, ticket: Ticket, action: Callable[[], object], num_blocks: int) -> None:
        with self._boundary.around("a save"):
            ticket.wait()
            action()
            return
        self._drop(num_blocks, DropReason.ERROR)

    def _commit(self, arena: Arena, reservation: Reservation, ticket: Ticket) -> None:
        sums = ticket.sums if ticket.sums is not None else arena.sums(reservation)
        self._settle(arena, lambda held: held.commit(reservation, sums, wait_s=_LOCK_WAIT_S))
        self._totals["stored_blocks"] += len(reservation.slots)

    def _abort(self, arena: Arena, reservation: Reservation) -> None:
        self._settle(arena, lambda held: held.abort(reservation, wait_s=_LOCK_WAIT_S))

    def _settle(self, arena: Arena, action: Callable[[Arena], bool]) -> None:
        """Act now, or from the link's thread if the arena is busy: this one has more to do."""
        if not action(arena):
            self._link.defer(arena, action)

    def _drop_waiting(self, why: DropReason) -> None:
        for job in self._jobs:
            self._reads.end(job.request_id)
            self._drop(len(job.keys), why)
        self._jobs.clear()
