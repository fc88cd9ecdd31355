"""Follows the shards of a tier for one partition of the lookup: it asks each what has changed."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from typing import Any

from kvray.actors.lookup.delta import Delta
from kvray.actors.lookup.lookup import Lookup
from kvray.actors.names import SUPERVISOR_NAME
from kvray.errors import KVRayError

_log = logging.getLogger("kvray.lookup")

Ask = Callable[..., Awaitable[Any]]
"""Calls a method of a named actor: (actor, method, *args, timeout_s); raises KVRayError."""

TURNS = 32
"""Shards that list all their blocks at once: while some make their next pieces, the lookup works on
those of others. Without turns a restarted lookup would get all of them at the same time."""
PIECE_MAX = 40_000
"""Blocks of one reply to a shard with a turn."""
NEWS_MAX = 2_900
"""Changes of one reply to any other: below 100 KiB Ray sends it without its object store."""
_TURN_S = 5.0
"""A turn ends when a poll is unanswered for so long."""
_PATIENCE_S = 60.0
"""A reply that has not come by then is lost. Until then a frozen shard gets no second call."""
_STEP_S = 0.007
"""How long a step of the index takes; a query waits for half of it at the median."""
_STEP_KEYS_MIN = 64
_YIELD_S = 0.0005
_CALL_S = 5.0
_NAMES_PER_S = 1000
"""Names of shards that the supervisor is asked for in a second, by each partition."""


class Followers:
    """One task for each shard, with at most one call under way.

    All tasks run in one event loop, and they alone change the lookup. Queries read it in another
    thread: whoever uses the lookup holds the lock, for one step or one query at a time. While a
    query waits for the lock the loop pauses after each step: else it would often take the lock
    again before the other thread runs.
    """

    def __init__(
        self,
        lookup: Lookup,
        ask: Ask,
        *,
        partition: int = 0,
        looked: Callable[[], None] = lambda: None,
        look_s: float = 1.0,
        retry_s: float = 0.5,
    ) -> None:
        """`looked` is called with the lock after each look at the shards that there are."""
        self.lookup = lookup
        self._ask = ask
        self._partition = partition
        self._looked = looked
        self._look_s, self._retry_s = look_s, retry_s
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._step = asyncio.Lock()  # one step in each round of the loop, and then the next shard's
        self._turns = asyncio.Semaphore(TURNS)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._named: set[str] = set()
        self._random = Random(partition)

    @contextlib.contextmanager
    def query(self) -> Iterator[Lookup]:
        """Give the lookup to another thread than the loop's; only one such thread asks."""
        self._num_waiting += 1
        with self._lock:
            self._num_waiting -= 1
            yield self.lookup

    def name(self, shard: str) -> None:
        """Note a shard that nobody polls; from any thread.

        Without the lock: a health check waits for this call. A shard that is noted as the others
        are taken is lost, and names itself again.
        """
        self._named.add(shard)

    async def run(self) -> None:
        """Follow the shards that the supervisor knows, until cancelled.

        While it does not answer, follow those that are known, and those that name themselves.
        """
        try:
            while True:
                named, self._named = self._named, set()
                try:
                    known = set(await self._ask(SUPERVISOR_NAME, "shard_names", timeout_s=_CALL_S))
                except KVRayError:
                    known = self._tasks.keys() | named
                self._follow_all(known)
                with self._lock:
                    self._looked()
                await asyncio.sleep(max(self._look_s, len(self._tasks) / _NAMES_PER_S))
        finally:
            # Emptied first: a task whose wait ends as it is cancelled ends by this.
            tasks, self._tasks = self._tasks, {}
            for task in tasks.values():
                task.cancel()

    def _follow_all(self, shards: set[str]) -> None:
        for shard in self._tasks.keys() - shards:
            self._tasks.pop(shard).cancel()
        with self._lock:
            self.lookup.keep(shards)
        for shard in shards - self._tasks.keys():
            self._tasks[shard] = asyncio.create_task(self._follow(shard))

    async def _follow(self, shard: str) -> None:
        """Ask a shard again and again, first for a greeting; what fails is asked again later."""
        is_behind, has_turn = True, False
        try:
            while shard in self._tasks:
                began = self.lookup.clock()
                step_keys = self.lookup.step_keys
                piece_keys = step_keys * min(5, PIECE_MAX // step_keys)  # whole steps
                most = piece_keys if has_turn else 0 if is_behind else NEWS_MAX
                with self._lock:
                    poll = self.lookup.poll(shard, self._partition, most)
                call = asyncio.ensure_future(self._ask(shard, "delta", poll, timeout_s=_PATIENCE_S))
                wait_s = self._retry_s
                try:
                    if has_turn and not (await asyncio.wait([call], timeout=_TURN_S))[0]:
                        has_turn = self._give_back()
                    delta = await call
                    await self._take(shard, delta)
                    is_behind, wait_s = delta.more, 0.0
                except KVRayError as error:
                    _log.debug("%s does not say what it has: %s", shard, error)
                except Exception:  # noqa: BLE001 - one shard's absurd reply ends no other's task
                    _log.exception("%s said what makes no sense", shard)
                finally:
                    call.cancel()
                if has_turn and (wait_s or not is_behind):
                    has_turn = self._give_back()
                if wait_s or not is_behind:
                    due = began + self.lookup.pace_s * self._random.uniform(0.75, 1.25)
                    await asyncio.sleep(max(wait_s, due - self.lookup.clock()))
                elif not has_turn:
                    has_turn = await self._wait_for_turn()
        finally:
            if has_turn:
                self._give_back()

    async def _wait_for_turn(self) -> bool:
        """Return whether there is one; a shard that waits is greeted now and then."""
        try:
            await asyncio.wait_for(self._turns.acquire(), 1.0 + 4 * self.lookup.pace_s)
        except asyncio.TimeoutError:
            return False
        return True

    def _give_back(self) -> bool:
        self._turns.release()
        return False

    async def _take(self, shard: str, delta: Delta) -> None:
        steps = self.lookup.take(shard, delta)
        while True:
            async with self._step:
                began = self.lookup.clock()
                with self._lock:
                    num_keys = next(steps, None)
                if num_keys is None:
                    return
                self._fit(num_keys, self.lookup.clock() - began)
                await asyncio.sleep(_YIELD_S if self._num_waiting else 0)

    def _fit(self, num_keys: int, took_s: float) -> None:
        """Have the next steps be as large as the index takes in a moment."""
        step_keys = self.lookup.step_keys
        if took_s > _STEP_S or num_keys >= step_keys:  # what a small step takes says little
            fitting = min(int(num_keys * _STEP_S / max(took_s, _STEP_S / 2)), PIECE_MAX)
            self.lookup.step_keys = max(_STEP_KEYS_MIN, fitting)
