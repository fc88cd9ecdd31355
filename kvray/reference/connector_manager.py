"""Between executor and connector: TensorRT-LLM's `KvCacheConnectorManager` as a connector sees it.

Behaviour, states and errors follow versions 1.1 to 1.3, without loads beside the passes, which
kvray has none of. Salts, which a 1.2 connector can see of 1.3, are the same in both.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

from kvray.connector.base import RequestData, SchedulerOutput
from kvray.errors import KVRayError
from kvray.reference.ranks import Ranks
from kvray.reference.request import LlmRequest, LlmRequestState, ScheduledRequests

T = TypeVar("T")


class KvCacheConnectorManager:
    """Calls the connector for the executor and the cache manager.

    Each rank has a manager. Only the leader has a scheduler, and its answers are broadcast. A save
    has ended when every rank's worker says so. Without `ranks` a rank decides by itself;
    `attention_dp_rank` is its number under attention data parallelism.
    """

    data_class: type[Any] = RequestData
    output_class: type[Any] = SchedulerOutput

    def __init__(
        self,
        worker: Any,
        scheduler: Any | None,
        *,
        ranks: Ranks | None = None,
        attention_dp_rank: int | None = None,
    ) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self._ranks: Ranks = ranks or Ranks()
        self._attention_dp_rank = attention_dp_rank
        self._saving: dict[int, LlmRequest] = {}
        """Requests whose blocks are saved beside the forward passes."""
        self._unheard: list[int] = []
        """Those of them that `get_finished` has not handed to the worker yet."""
        self._saved: set[int] = set()
        """Those that the worker has returned here, and not every rank's has."""
        self._scheduler_output: Any = None
        self._reported: dict[int, list[int]] = {}
        """How many tokens and blocks of each request have been reported."""
        self._external_loads: dict[int, int] = {}

    @property
    def is_saving(self) -> bool:
        """Whether a save has not ended on every rank; the same on all of them."""
        return bool(self._saving)

    def get_num_new_matched_tokens(self, request: LlmRequest, num_computed_tokens: int) -> int:
        """Ask the leader how many tokens follow; KVRayError: it wants to load them later."""
        num_tokens: int
        num_tokens, is_async = self._on_leader(
            lambda scheduler: scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        )
        if is_async:
            raise KVRayError("The reference engine has no loads beside its passes.")
        self.commit(request, num_tokens)
        return num_tokens

    def commit(self, request: LlmRequest, num_tokens: int) -> None:
        """Note how many of the offered tokens the coming pass starts behind."""
        self._external_loads[request.request_id] = num_tokens
        request.py_num_connector_matched_tokens = num_tokens

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Tell the leader the blocks of a request that just got them."""
        if self.scheduler is not None:
            self.scheduler.update_state_after_alloc(request, block_ids)

    def build_scheduler_output(
        self, batch: ScheduledRequests, block_ids_of: Callable[[LlmRequest], list[int]]
    ) -> None:
        """Collect the coming pass without an idle owner's dummy."""
        output = _make(self.output_class, attention_dp_rank=self._attention_dp_rank)
        for request in batch.context_requests:
            is_new = request.request_id not in self._reported
            data = self._report(request, block_ids_of(request))
            data.computed_position -= self._external_loads.get(request.request_id, 0)
            (output.new_requests if is_new else output.cached_requests).append(data)
        output.cached_requests.extend(
            self._report(request, block_ids_of(request))
            for request in batch.generation_requests
            if not request.is_dummy
        )
        self._external_loads = {}
        self._scheduler_output = output

    def handle_metadata(self) -> None:
        """Build the metadata of the pass, if there is one, and bind the worker to it."""
        output = self._scheduler_output
        if output is None:
            return
        metadata = self._on_leader(lambda scheduler: scheduler.build_connector_meta(output))
        self._scheduler_output = None
        self.worker.bind_connector_meta(metadata)

    def request_finished(self, request: LlmRequest, block_ids: list[int]) -> bool:
        """Return whether a save still reads the blocks of the finished request."""
        is_saving: bool = self._on_leader(
            lambda scheduler: scheduler.request_finished(request, block_ids)
        )
        if is_saving:
            self._saving[request.request_id] = request
            self._unheard.append(request.request_id)
            request.state = LlmRequestState.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        return is_saving

    def get_finished(self) -> list[LlmRequest]:
        """Hand new ids to the worker and take back ended ones; return the requests now saved.

        A KeyError says that the worker named an id that it was not given, or named it twice.
        """
        handed, self._unheard = self._unheard, []
        saved, _ = self.worker.get_finished(handed, [])
        for request_id in saved:
            if request_id not in self._saving or request_id in self._saved:
                raise KeyError(request_id)  # as upstream
            self._saved.add(request_id)
        everywhere = set.intersection(*self._ranks.allgather(self._saved))
        self._saved -= everywhere
        return [self._saving.pop(one) for one in sorted(everywhere)]  # in one order on all ranks

    def forget(self, request: LlmRequest) -> None:
        self._reported.pop(request.request_id, None)

    def _on_leader(self, call: Callable[[Any], T]) -> T:
        value = None if self.scheduler is None else call(self.scheduler)
        return cast("T", self._ranks.broadcast(value))

    def _report(self, request: LlmRequest, block_ids: list[Any]) -> Any:
        tokens = request.get_tokens(0)
        new_tokens, new_block_ids = self._take_new(request, tokens, block_ids)
        if request.state is LlmRequestState.CONTEXT_INIT:
            position = request.context_current_position
            num_scheduled = min(request.context_remaining_length, request.context_chunk_size)
        else:
            position, num_scheduled = len(tokens) - 1, 1 + len(request.py_draft_tokens)
        return _make(
            self.data_class,
            request_id=request.request_id,
            new_tokens=new_tokens,
            new_block_ids=new_block_ids,
            computed_position=position,
            num_scheduled_tokens=num_scheduled,
            priorities=None,
            cache_salt_id=request.cache_salt_id,
            cache_salt=request.cache_salt,
            block_hashes=[],
        )

    def _take_new(self, request: LlmRequest, *lists: list[Any]) -> list[list[Any]]:
        """Return what each list has beyond its longest report.

        As upstream, each place is reported once: not again when a rewind has freed the block there
        and another one has replaced it.
        """
        counts = self._reported.get(request.request_id, [0] * len(lists))
        self._reported[request.request_id] = list(map(max, counts, map(len, lists)))
        return [one[count:] for one, count in zip(lists, counts, strict=True)]


def _make(kind: type[T], **values: object) -> T:
    """Build a record of the connector's with the fields that this version of it has."""
    known = {field.name for field in dataclasses.fields(cast("Any", kind))}
    return kind(**{name: value for name, value in values.items() if name in known})
