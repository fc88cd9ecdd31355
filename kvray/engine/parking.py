"""Parked requests: the engine schedules others while the blocks of these are made ready.

Nobody writes the engine's memory meanwhile: each rank checks the node's copy of its own blocks, in
a thread of its own. If a block proves wrong, a runtime that takes failed loads back is told so. Any
other runtime is told that the request may go on, and is stopped before it can read the block.
"""

import threading
import time
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue

from kvray.engine.meta import ParkPlan
from kvray.engine.shared_state import SharedState
from kvray.errors import CorruptBlock, KVRayError
from kvray.store import Lease

_CHECKS_MAX = 8192
"""Checks kept for requests that may never return; a forgotten one is checked once more."""

_CLOSE_S = 5.0


@dataclass(slots=True, kw_only=True)
class _Check:
    """A request's blocks, and what the thread that looks at them found.

    The thread writes, `has_ended` last; the executor's thread reads checks that have ended. If the
    thread has died, all its checks have ended.
    """

    request_id: int
    place: tuple[str, Lease]  # its arena, and this rank's lease there
    thread: threading.Thread
    is_sound: bool = False
    error: KVRayError | None = None
    has_ended: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether the thread will still answer."""
        return not self.has_ended and self.thread.is_alive()


class Parking:
    """One rank's parked requests; used by the engine's executor thread.

    What crosses threads: `_queue`, and each `_Check` in it.
    """

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[_Check | None] = SimpleQueue()
        self._checks: dict[int, _Check] = {}
        self._waiting: set[int] = set()
        self._failed: set[int] = set()

    def begin(self, plan: ParkPlan) -> None:
        """Begin to check a request's blocks; if that fails, they are checked when loaded."""
        self._forget(plan.request_id)
        if not self._shared.verifies_loads:
            return
        for request_id in list(islice(self._checks, max(0, len(self._checks) - _CHECKS_MAX))):
            self._forget(request_id)
        with self._shared.boundary.around("the check of a parked request"):
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._work, name="kvray-parking", daemon=True)
                thread.start()
                self._thread = thread
            place = plan.leased.of(self._shared.args.part_rank)
            check = _Check(request_id=plan.request_id, place=place, thread=self._thread)
            self._checks[plan.request_id] = check
            self._queue.put(check)

    def finished(self, started: list[int]) -> list[int]:
        """Return the requests that may go on, each once after it was among `started`."""
        self._waiting.update(started)
        if not self._waiting:
            return []
        now, ready = time.monotonic(), []
        for request_id in self._waiting:
            promise = self._shared.parked.get(request_id)
            if promise is not None:
                promise.heard_at = now
            check = self._checks.get(request_id)
            if check is None or not check.is_pending:
                ready.append(request_id)
                if check is not None and check.error is not None:
                    self._failed.add(request_id)
        self._waiting.difference_update(ready)
        return ready

    def take_failed(self) -> set[int]:
        """Return the requests that were reported as ready and must be computed, each once.

        The runtime asks about them again; ranks that share a request could not do that alone.
        """
        if not self._failed or self._shared.args.num_parts_ranks > 1:
            return set()
        failed = set(self._failed)
        for request_id in failed:
            self._forget(request_id)
        return failed

    def is_checked(self, request_id: int, place: tuple[str, Lease]) -> bool:
        """Whether the request was parked with the lease at `place`, and its blocks are sound.

        CorruptBlock, LeaseExpired: they are not, or could not be read.
        """
        check = self._checks.get(request_id)
        self._forget(request_id)
        if check is None or check.place != place:
            return False
        if check.error is not None:
            raise check.error
        return check.is_sound

    def close(self) -> None:
        """End the thread after its present check. Twice is fine."""
        for check in self._checks.values():
            check.has_ended = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_S)
            self._thread = None

    def _forget(self, request_id: int) -> None:
        self._checks.pop(request_id, None)
        self._failed.discard(request_id)

    def _work(self) -> None:
        """Check parked requests, one after the other; an exception is an answer, too."""
        while (check := self._queue.get()) is not None:
            try:
                if not check.has_ended:
                    self._verify(check)
            except KVRayError as error:
                check.error = error
            except BaseException as error:  # noqa: BLE001 - others wait for this thread
                self._shared.boundary.stop("the check of a parked request", error)
            finally:
                check.has_ended = True

    def _verify(self, check: _Check) -> None:
        arena_id, lease = check.place
        arena = self._shared.link.arena_named(arena_id)
        if arena is None:
            raise CorruptBlock(f"Arena {arena_id} went away while a request was parked.")
        if not arena.sound(lease, slice(None)).all():
            raise CorruptBlock(
                f"A block promised to request {check.request_id} proved corrupt while it was"
                " parked; set connector.load: sync to have blocks checked before."
            )
        check.is_sound = True
