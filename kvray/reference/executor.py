"""The executor's loop: TensorRT-LLM's order of calls, with and without the overlap scheduler.

Source: `PyExecutor._executor_loop` and `_executor_loop_overlap` of 1.2.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvray.errors import KVRayError
from kvray.reference.cache_manager import KVCacheManager
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.intake import Intake
from kvray.reference.model_engine import ModelEngine
from kvray.reference.progress import add_tokens, count_computed, foresee_ends
from kvray.reference.request import LlmRequest
from kvray.reference.scheduler import ScheduledRequests, schedule

_PARKED_POLL_S = 0.001
_JOIN_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Previous:
    """A pass whose tokens are sampled but not yet part of their requests."""

    batch: ScheduledRequests
    sampled: dict[int, int]


class Executor:
    """Runs requests to their end, on a thread of its own or on that of `run`.

    Requests, pool and connector belong to the executor's thread; others reach it through the
    intake. Whatever the connector raises outside a forward pass ends the engine, as it does in
    TensorRT-LLM; inside one it fails all active requests, unless the other ranks wait in the
    middle of the same pass (`is_pass_shared`): then it ends the engine too.

    With `follows_main` it does what TensorRT-LLM's main line does otherwise than 1.2: it polls for
    saves also when it is idle, frees a cancelled request only when its load has ended, and starts
    loads in every iteration, so that a worker may be asked twice for one metadata.
    """

    def __init__(
        self,
        model_engine: ModelEngine,
        cache: KVCacheManager,
        intake: Intake,
        *,
        connector: KvCacheConnectorManager | None = None,
        overlap: bool = False,
        max_batch_size: int = 8,
        chunk_tokens: int | None = None,
        num_threads: int = 2,
        is_pass_shared: bool = False,
        follows_main: bool = False,
    ) -> None:
        self.failure: BaseException | None = None
        self.failure_traceback = ""
        self._model_engine = model_engine
        self._cache = cache
        self._intake = intake
        self._connector = connector
        self._overlap = overlap
        self._max_batch_size = max_batch_size
        self._chunk_tokens = chunk_tokens
        self._num_threads = num_threads
        self._is_pass_shared = is_pass_shared
        self._follows_main = follows_main
        self._active: list[LlmRequest] = []
        self._cancelled: set[int] = set()
        self._is_dummy_due = False
        self._previous: _Previous | None = None
        self._thread = threading.Thread(target=self.run, name="kvray-executor", daemon=True)

    def start(self) -> None:
        """Begin to serve on a thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the loop has ended; its intake was told to stop. Twice is fine.

        Raises:
            KVRayError: it does not end.
        """
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                raise KVRayError(
                    f"The executor did not stop within {_JOIN_TIMEOUT_S:.0f} s; a call into the "
                    "connector hangs."
                )

    def run(self) -> None:
        """Serve until the intake says stop, or something fails: then `failure` says what."""
        # torch keeps the number of threads per calling thread.
        torch.set_num_threads(self._num_threads)
        try:
            while self._fetch():
                if self._overlap:
                    self._iterate_overlap()
                else:
                    self._iterate()
        except BaseException as error:  # noqa: BLE001 (the thread's end: every cause is kept)
            self.failure = error
            self.failure_traceback = traceback.format_exc()
        self._intake.close(self.closed_error)

    def closed_error(self) -> KVRayError:
        """Return what those are told who come too late."""
        if self.failure is None:
            return KVRayError("The reference engine is closed.")
        error = KVRayError(
            f"The reference engine is dead: {type(self.failure).__name__}: {self.failure}"
        )
        error.__cause__ = self.failure
        return error

    def _fetch(self) -> bool:
        """Take in what is new; an idle engine stays here until there is work or it must stop."""
        while True:
            has_work = bool(self._active) or self._previous is not None or self._awaits_saves()
            orders = self._intake.take(has_work=has_work)
            self._active.extend(orders.submitted)
            self._cancelled |= orders.cancelled
            self._is_dummy_due = orders.is_dummy_due
            if orders.is_stop:
                return False
            if has_work or orders.submitted or orders.is_dummy_due:
                return True

    def _iterate(self) -> None:
        batch = self._begin_batch()
        sampled = self._forward(batch, {}) if batch.batch_size else None
        if sampled is not None:
            count_computed(batch)
            add_tokens(sampled, batch.all_requests(), now=time.monotonic())
            self._finish_in_connector(batch.all_requests())
            self._handle_cancelled()
            self._handle_responses()
            self._cache.update_resources(batch)
        else:
            self._pause()
        self._poll_connector()

    def _iterate_overlap(self) -> None:
        batch, previous = self._begin_batch(), self._previous
        sampled = None
        if batch.batch_size:
            sampled = self._forward(batch, {} if previous is None else previous.sampled)
            if sampled is None:
                previous = None  # the error has failed its requests too
        if previous is not None:
            add_tokens(previous.sampled, previous.batch.all_requests(), now=time.monotonic())
            self._finish_in_connector(previous.batch.all_requests())
        if sampled is not None:
            count_computed(batch)
            foresee_ends(batch, num_pending=1)
        if previous is not None:
            self._handle_cancelled()
            self._handle_responses()
            self._cache.update_resources(previous.batch)
        elif sampled is None:
            self._pause()
        self._previous = None if sampled is None else _Previous(batch, sampled)
        self._poll_connector()

    def _begin_batch(self) -> ScheduledRequests:
        batch = schedule(
            self._active,
            self._cache,
            max_batch_size=self._max_batch_size,
            chunk_tokens=self._chunk_tokens,
        )
        if self._is_dummy_due and (dummy := self._cache.add_padding_request()) is not None:
            batch.generation_requests.append(dummy)
        if batch.batch_size:
            self._cache.prepare_resources(batch)
            if self._connector is not None:
                self._connector.take_scheduled_requests_pending_load(batch)
                self._connector.handle_metadata()
                self._connector.worker.start_load_kv(None)
        elif self._connector is not None and self._follows_main:
            self._connector.worker.start_load_kv(None)
        return batch

    def _forward(self, batch: ScheduledRequests, pending: dict[int, int]) -> dict[int, int] | None:
        """Return the sampled tokens; None after a dummy, or an error that failed all requests."""
        try:
            sampled = self._model_engine.forward(batch, pending)
            if self._connector is not None:
                self._connector.worker.wait_for_save(None)
        except Exception as error:  # TensorRT-LLM survives any error of a pass
            if self._is_pass_shared:
                raise
            self._handle_error(error)
            return None
        finally:
            for request in batch.generation_requests:
                if request.is_dummy:
                    self._cache.free_resources(request)
        return None if self._is_dummy_due else sampled

    def _finish_in_connector(self, requests: Iterable[LlmRequest]) -> None:
        """Announce ended requests that still hold blocks; pin those that a save still reads."""
        if self._connector is None:
            return
        for request in requests:
            if not request.is_finished:
                continue
            try:
                block_ids = self._cache.get_cache_indices(request)
            except KVRayError:
                continue  # ended in the pass before and freed since
            if self._connector.request_finished(request, block_ids):
                self._cache.store_blocks_for_reuse(request, pin=True)

    def _handle_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, set()
        for request in self._active:
            if request.request_id in cancelled and not request.is_finished:
                if self._follows_main and request.is_parked:
                    self._cancelled.add(request.request_id)
                else:
                    request.finish_by_reason("cancelled")

    def _handle_responses(self) -> None:
        ended = [request for request in self._active if request.is_finished]
        self._active = [request for request in self._active if not request.is_finished]
        self._intake.progress(self._active)
        for request in ended:
            self._terminate(request)
        for request in ended:
            self._intake.resolve(request)

    def _handle_error(self, error: Exception) -> None:
        message = f"A forward pass failed: {type(error).__name__}: {error}"
        failed, self._active, self._previous = self._active, [], None
        for request in failed:
            request.finish_by_reason("error")
            self._terminate(request)
        for request in failed:
            failure = KVRayError(message)
            failure.__cause__ = error
            self._intake.fail(request, failure)

    def _terminate(self, request: LlmRequest) -> None:
        self._cache.free_resources(request)
        if self._connector is not None:
            self._connector.forget(request)

    def _pause(self) -> None:
        """Without a pass: let cancelled requests go and leave the processor to others for a moment.

        TensorRT-LLM 1.2 does neither: it spins, and cancels only after a pass.
        """
        self._handle_cancelled()
        self._handle_responses()
        if self._active or self._awaits_saves():
            self._intake.pause(_PARKED_POLL_S)

    def _awaits_saves(self) -> bool:
        return self._follows_main and self._connector is not None and self._connector.is_saving

    def _poll_connector(self) -> None:
        if self._connector is not None:
            for request in self._connector.get_finished():
                self._cache.unpin(request)
