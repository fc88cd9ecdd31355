"""The executor's loop: TensorRT-LLM's order of calls, with and without the overlap scheduler.

Drafts of a request's next tokens are looked up in its own tokens.

Source: `PyExecutor._executor_loop` and `_executor_loop_overlap` of 1.2.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from kvray.errors import KVRayError
from kvray.reference.cache_manager import KVCacheManager
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.engine_options import EngineOptions
from kvray.reference.intake import Intake
from kvray.reference.model import BlockModel
from kvray.reference.model_engine import ModelEngine
from kvray.reference.request import LlmRequest, LlmRequestState, ScheduledRequests

NGRAM_SIZES = (3, 2)
"""How many last tokens are looked up: the longer match first."""
_IDLE_POLL_S = 0.001
_JOIN_TIMEOUT_S = 60.0


def find_drafts(tokens: Sequence[int], *, max_draft_len: int) -> list[int]:
    """Return tokens that may follow `tokens`: `max_draft_len` of them, or none without a match.

    The latest earlier occurrence of the last tokens says how they go on. Where it runs into the
    end of `tokens`, the drafts repeat themselves, as in a loop.

    Source: NGram of TensorRT-LLM, which also pads its drafts to `max_draft_len`.
    """
    for size in NGRAM_SIZES:
        for distance in range(1, len(tokens) - size + 1):
            start = len(tokens) - size - distance
            if tokens[start : start + size] == tokens[-size:]:
                continued = list(tokens)
                for _ in range(max_draft_len):
                    continued.append(continued[-distance])
                return continued[len(tokens) :]
    return []


class Executor:
    """Runs requests to their end, on a thread of its own or on that of `run`.

    Requests, pool and connector belong to the executor's thread; others reach it through the
    intake. An error of the connector outside a forward pass ends the engine, as in TensorRT-LLM.
    Inside a pass it fails all active requests. Where the ranks share the model, it ends the engine
    there too, because the other ranks wait in the middle of the same pass.

    The runtime `main` adds three habits of TensorRT-LLM's main line. It polls for saves also when
    it is idle. It frees a cancelled request only when its load has ended. It starts loads in every
    iteration, so that a worker may be asked twice for one metadata.
    """

    def __init__(
        self,
        model_engine: ModelEngine,
        cache: KVCacheManager,
        intake: Intake,
        options: EngineOptions,
        connector: KvCacheConnectorManager | None,
        load_model: Callable[[str], BlockModel] | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self._model_engine = model_engine
        self._cache = cache
        self._intake = intake
        self._options = options
        self._connector = connector
        self._follows_main = options.runtime == "main"
        self._load_model = load_model
        self._new_model: str | None = None
        """The checkpoint whose weights come once all active requests have ended, see `Orders`."""
        self._waiting: list[LlmRequest] = []  # behind new weights
        self.active: list[LlmRequest] = []
        """What was submitted and has not ended, in order of arrival."""
        self._cancelled: set[int] = set()
        self._is_dummy_due = False
        # With overlap: the last pass, whose tokens are sampled but not in their requests yet.
        self._previous: tuple[ScheduledRequests, dict[int, int]] | None = None
        self._thread = threading.Thread(target=self.run, name="kvray-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait until the loop has ended, once its intake is stopped; KVRayError if it does not."""
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise KVRayError(
                f"The executor did not stop within {_JOIN_TIMEOUT_S:.0f} s; a call into the "
                "connector hangs."
            )

    def run(self) -> None:
        """Serve until the intake says stop or something fails, which `failure` then keeps."""
        # torch keeps the number of threads per calling thread.
        torch.set_num_threads(self._options.num_threads)
        try:
            while self._fetch():
                self.iterate()
        except BaseException as error:  # noqa: BLE001 (the thread's end: every cause is kept)
            self.failure = error
        self._intake.close(self.failure)

    def _fetch(self) -> bool:
        """Take new requests; an idle engine stays here until there is work or it must stop."""
        while True:
            has_work = bool(self.active) or self._previous is not None or self._awaits_saves()
            if self._new_model is not None and not has_work:
                self._update_weights(self._new_model)
                self.active, self._waiting = self._waiting, []
                continue
            orders = self._intake.take(has_work=has_work)
            (self.active if self._new_model is None else self._waiting).extend(orders.submitted)
            if orders.model is not None:
                self._new_model = orders.model
            self._cancelled |= orders.cancelled
            self._is_dummy_due = orders.is_dummy_due
            if orders.is_stop:
                return False
            if has_work or self.active or orders.is_dummy_due:
                return True

    def _update_weights(self, model: str) -> None:
        """Source: `WorkerExtension.update_weights`, which is called when nothing is active."""
        self._new_model, failure = None, None
        try:
            if model:
                assert self._load_model is not None, "who asks has said how to load them"
                self._model_engine.model = self._load_model(model)
            self._cache.reset_reuse_state()
        except KVRayError as error:
            failure = error  # the engine goes on with the weights that it has
        self._intake.updated(failure)

    def iterate(self) -> None:
        """Do one iteration over the active requests; an error of the connector leaves it."""
        batch, done = self._begin_batch(), self._previous
        sampled = None
        if batch.batch_size:
            sampled = self._forward(batch, {} if done is None else done[1])
            if sampled is None:
                done = None  # the error has failed its requests too
        self._previous = None if sampled is None else (batch, sampled)
        if sampled is not None and not self._options.overlap:
            batch.count_computed()
            done, self._previous = self._previous, None
        if done is not None:
            _add_tokens(*done)
            self._finish_in_connector(done[0].all_requests())
        if self._previous is not None:
            batch.count_computed()
            batch.foresee_ends()
        if done is not None:
            self._handle_cancelled()
            self._handle_responses()
            self._cache.update_resources(done[0])
        elif sampled is None:
            self._pause()
        if self._connector is not None:
            for request in self._connector.get_finished():
                self._cache.unpin(request)

    def _begin_batch(self) -> ScheduledRequests:
        batch = schedule(
            self.active,
            self._cache,
            max_batch_size=self._options.max_batch_size,
            chunk_tokens=self._options.pass_chunk_tokens,
        )
        if most := self._options.max_draft_len:
            for request in batch.generation_requests:
                request.py_draft_tokens = find_drafts(request.get_tokens(0), max_draft_len=most)
        if self._is_dummy_due and (dummy := self._cache.add_padding_request()) is not None:
            batch.generation_requests.append(dummy)
        if batch.batch_size:
            self._cache.prepare_resources(batch)
            if self._connector is not None:
                self._connector.handle_metadata()
                self._connector.worker.start_load_kv(self._model_engine.stream)
        elif self._connector is not None and self._follows_main:
            self._connector.worker.start_load_kv(self._model_engine.stream)
        return batch

    def _forward(self, batch: ScheduledRequests, pending: dict[int, int]) -> dict[int, int] | None:
        """Return the sampled tokens; None after a dummy, or an error that failed all requests."""
        try:
            sampled = self._model_engine.forward(batch, pending)
            if self._connector is not None:
                self._connector.worker.wait_for_save(self._model_engine.stream)
        except Exception as error:  # TensorRT-LLM survives any error of a pass
            if self._options.is_split:
                raise
            self._handle_error(error)
            return None
        finally:
            for request in batch.generation_requests:
                if request.is_dummy:
                    self._cache.free_resources(request)
        return None if self._is_dummy_due else sampled

    def _finish_in_connector(self, requests: Iterable[LlmRequest]) -> None:
        """Announce ended requests that hold blocks; pin the blocks that a save still reads."""
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
        cancelled = self._cancelled
        self._cancelled = cancelled & {request.request_id for request in self._waiting}
        for request in self.active:
            if request.request_id in cancelled and not request.is_finished:
                request.finish_by_reason("cancelled")

    def _handle_responses(self) -> None:
        ended = [request for request in self.active if request.is_finished]
        self.active = [request for request in self.active if not request.is_finished]
        self._intake.progress(self.active)
        self._terminate(ended)

    def _handle_error(self, error: Exception) -> None:
        failed, self.active, self._previous = self.active, [], None
        for request in failed:
            request.finish_by_reason("error")
        self._terminate(failed, error)

    def _terminate(self, ended: list[LlmRequest], error: Exception | None = None) -> None:
        for request in ended:
            self._cache.free_resources(request)
            if self._connector is not None:
                self._connector.forget(request)
        for request in ended:
            failure = None
            if error is not None:
                failure = KVRayError(f"A forward pass failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
            self._intake.end(request, failure)

    def _pause(self) -> None:
        """Without a pass let cancelled requests go and sleep; TensorRT-LLM 1.2 spins instead."""
        self._handle_cancelled()
        self._handle_responses()
        if self.active or self._awaits_saves():
            self._intake.pause(_IDLE_POLL_S)

    def _awaits_saves(self) -> bool:
        return self._follows_main and self._connector is not None and self._connector.is_saving


def schedule(
    active: Sequence[LlmRequest],
    cache: KVCacheManager,
    *,
    max_batch_size: int,
    chunk_tokens: int | None,
) -> ScheduledRequests:
    """Choose the requests of the next pass in order of arrival.

    `chunk_tokens` is the longest piece of a prompt, a multiple of a block; None: whole prompts.

    Source: TensorRT-LLM's GUARANTEED_NO_EVICT: a request starts only when the blocks of its
    prompt and longest answer are free beside what the started ones may still ask for.
    """
    batch = ScheduledRequests()
    promised = sum(
        cache.get_needed_beyond_held(request) for request in active if request.is_admitted
    )
    available = cache.get_num_free_blocks() - promised
    for request in active:
        if batch.batch_size == max_batch_size:
            break
        if request.state is LlmRequestState.GENERATION_IN_PROGRESS:
            batch.generation_requests.append(request)
        elif request.state is LlmRequestState.CONTEXT_INIT:
            if not request.is_admitted:
                needed = cache.get_needed_resource_to_completion(request)
                if needed > available:
                    break
                available -= needed
                request.is_admitted = True
            remaining = request.context_remaining_length
            request.context_chunk_size = min(chunk_tokens or remaining, remaining)
            batch.context_requests.append(request)
    return batch


def _add_tokens(batch: ScheduledRequests, sampled: dict[int, int]) -> None:
    """Append what the pass sampled to each request that has not ended meanwhile."""
    now = time.monotonic()
    for request in batch.all_requests():
        token = sampled.get(request.request_id)
        if token is None or request.is_finished:
            continue
        if not request.generated_tokens:
            request.first_token_at = now
        request.add_sampled(token)
