"""What stands between the reference engine's connector manager and the connector, and times it."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvray.connector.base import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    SchedulerOutput,
)
from kvray.store import Arena, PartRead

T = TypeVar("T")


class Stopwatch:
    """Seconds by name since the last `take`."""

    def __init__(self) -> None:
        """Start with nothing timed."""
        self._seconds: dict[str, float] = defaultdict(float)

    def time(self, name: str, call: Callable[[], T]) -> T:
        """Return what `call` returns, and add what it takes to `name`."""
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to `name`."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Return what was timed, and start anew."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


class Copies:
    """Seconds that this process has copied from the arena into pages, by any rank."""

    def __init__(self, arena: Arena) -> None:
        """Time the copies from `arena`, from now to its end."""
        self.seconds = 0.0
        self._read_slots = arena.read_slots
        vars(arena)["read_slots"] = self._timed

    def _timed(self, reads: Sequence[PartRead]) -> None:
        began = time.perf_counter()
        self._read_slots(reads)
        self.seconds += time.perf_counter() - began


class TimedScheduler(KvCacheConnectorScheduler):
    """The leader's half with a stopwatch: `match`, `alloc`, `plan` and `finish`."""

    def __init__(self, inner: KvCacheConnectorScheduler, watch: Stopwatch) -> None:
        """Pass every call on to `inner`."""
        self._inner = inner
        self._watch = watch
        self.meta: object = None
        """What it built last."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See the base class."""
        return self._watch.time(
            "match", lambda: self._inner.get_num_new_matched_tokens(request, num_computed_tokens)
        )

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """See the base class."""
        self._watch.time("alloc", lambda: self._inner.update_state_after_alloc(request, block_ids))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """See the base class."""
        self.meta = self._watch.time(
            "plan", lambda: self._inner.build_connector_meta(scheduler_output)
        )
        return self.meta

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """See the base class."""
        return self._watch.time(
            "finish", lambda: self._inner.request_finished(request, cache_block_ids)
        )


class TimedWorkers(KvCacheConnectorWorker):
    """The workers of all ranks, one after the other in this process; that of rank 0 is timed."""

    def __init__(
        self, inner: Sequence[KvCacheConnectorWorker], watch: Stopwatch, copies: Copies
    ) -> None:
        """Pass every call on to each of `inner`, in the order of their ranks."""
        self._leader, *self._others = inner
        self._watch = watch
        self._copies = copies

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Nothing: each rank has registered a pool of its own."""

    def bind_connector_meta(self, metadata: object) -> None:
        """See the base class."""
        for worker in (self._leader, *self._others):
            worker.bind_connector_meta(metadata)

    def start_load_kv(self, stream: Any) -> None:
        """See the base class; what copies take is not in `load`."""
        copied_s = self._copies.seconds
        self._watch.time("load", lambda: self._leader.start_load_kv(stream))
        self._watch.add("load", copied_s - self._copies.seconds)
        for worker in self._others:
            worker.start_load_kv(stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """See the base class."""
        for worker in (self._leader, *self._others):
            worker.wait_for_layer_load(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """See the base class."""
        for worker in (self._leader, *self._others):
            worker.save_kv_layer(layer_idx, stream)

    def wait_for_save(self, stream: Any) -> None:
        """See the base class."""
        for worker in (self._leader, *self._others):
            worker.wait_for_save(stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return what rank 0 says: no load of the bench is parked, no save outlives its pass."""
        for worker in self._others:
            worker.get_finished(list(finished_gen_req_ids), list(started_loading_req_ids))
        return self._leader.get_finished(finished_gen_req_ids, started_loading_req_ids)


class Collections:
    """Seconds that Python's garbage collector took, one entry a collection."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self.seconds: list[float] = []
        self._began = 0.0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._began)
