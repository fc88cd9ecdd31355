"""Parked requests: the engine schedules others while the blocks of these are made ready.

Nothing of the engine's memory is written meanwhile. What is made ready is the node's copy: each
rank checks its own blocks in a thread of its own. Should one prove wrong, the engine is told to go
on all the same, as nothing else can be told to it, and stopped before it can read the block.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from kvray.connector.engine import Engine
from kvray.connector.meta import ParkPlan
from kvray.errors import CorruptBlock, KVRayError

_VERDICTS_MAX = 8192
"""Kept for requests that may never come back; blocks of a forgotten one are checked once more."""


class Parking:
    """One rank's parked requests.

    What crosses threads: `_verdicts`, in which the thread notes what became of a request and from
    which the executor's thread takes it, each by one operation on a dictionary.
    """

    def __init__(self, engine: Engine) -> None:
        """Start with none, and without a thread."""
        self._engine = engine
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: set[int] = set()
        self._waiting: set[int] = set()
        self._verdicts: dict[int, KVRayError | None] = {}

    def begin(self, plan: ParkPlan) -> None:
        """Begin to make the blocks of a request ready."""
        if not self._engine.verifies_loads:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvray-parking")
        for request_id in list(islice(self._verdicts, max(0, len(self._verdicts) - _VERDICTS_MAX))):
            del self._verdicts[request_id]
        self._verdicts.pop(plan.request_id, None)
        self._under_way.add(plan.request_id)
        self._thread.submit(self._verify, plan)

    def finished(self, started: list[int]) -> list[int]:
        """Return the requests that may go on, each once after it was among `started`."""
        self._waiting.update(started)
        if not self._waiting:
            return []
        self._under_way.difference_update(list(self._verdicts))
        ready = [one for one in self._waiting if one not in self._under_way]
        self._waiting.difference_update(ready)
        for request_id in ready:
            if request_id in self._engine.told:
                self._engine.told[request_id] = True
        return ready

    def is_checked(self, request_id: int) -> bool:
        """Whether the request was parked and its blocks are sound.

        Raises:
            CorruptBlock, LeaseExpired: they are not, or could not be read.
        """
        if request_id not in self._verdicts:
            return False
        error = self._verdicts.pop(request_id)
        if error is not None:
            raise error
        return True

    def close(self) -> None:
        """End the thread; what it has begun is finished. Twice is fine."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _verify(self, plan: ParkPlan) -> None:
        error: KVRayError | None = None
        try:
            arena_id, lease = plan.leased.of(self._engine.part_rank)
            arena = self._engine.link.arena_named(arena_id)
            if arena is None:
                error = CorruptBlock(f"Arena {arena_id} went away while a request was parked.")
            elif not arena.sound(lease, slice(None)).all():
                error = CorruptBlock(
                    f"A block promised to request {plan.request_id} proved corrupt while it was"
                    " parked; set connector.load: sync to have blocks checked before."
                )
        except KVRayError as raised:
            error = raised
        self._verdicts[plan.request_id] = error
