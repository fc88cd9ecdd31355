"""TensorRT-LLM 1.1 and 1.2 as a connector sees them: one pool, flat block ids, collectives of MPI.

Source: `pyexecutor/kv_cache_connector.py` of that line. No salt in the reports, no attention data
parallelism, no way to wait for the start, nobody is told of a cancelled request.
"""

import pickle
from enum import Enum
from types import SimpleNamespace
from typing import Any

from tests.trtllm.llm_request import BoundRequest
from tests.trtllm.stand_ins.classes_1_2 import (
    KvCacheConnectorConfig,
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    RequestData,
    SchedulerOutput,
)

__all__ = [
    "KvCacheConnectorConfig",
    "KvCacheConnectorScheduler",
    "KvCacheConnectorWorker",
    "RequestData",
    "SchedulerOutput",
]

VERSION = "1.2.1"
MODULE = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
HAS_GROUPS = False
RESOLVES_LATE = False
SALT_FIELD = "cache_salt_id"

BOUND = (
    "request_id",
    "prompt_len",
    "orig_prompt_len",
    "max_new_tokens",
    "state",
    "context_current_position",
    "context_chunk_size",
    "is_generation_only_request",
    "is_dummy_request",
    "get_tokens",
    "prompt_embedding_table",
    "prompt_vocab_size",
    "multimodal_embedding",
    "multimodal_hashes",
    "multimodal_positions",
    "multimodal_lengths",
    "mrope_rotary_cos_sin",
    "mrope_position_deltas",
    "position_ids",
    "lora_task_id",
    "lora_weights",
    "lora_config",
    "cache_salt_id",
)
"""Attributes that the bindings have, but for figures, sampling and the states of transfers.

Source: `GenericLlmRequest` in cpp/tensorrt_llm/nanobind/batch_manager/bindings.cpp of
NVIDIA/TensorRT-LLM at cc8cd5af, and pybind's of the same time. The first builds of 1.1 (0159d905)
lack `cache_salt_id`, and have no salts. Prompts' extra ids, language adapters and an encoder's
features go into the constructor and cannot be read.
"""

REQUEST_FIELDS = {
    **dict.fromkeys(BOUND[BOUND.index("prompt_embedding_table") :]),
    "is_dummy_request": False,
    "is_generation_only_request": False,
    "py_lora_path": None,
    "py_multimodal_data": None,
}
"""More attributes of Python's subclass, which sets `py_lora_path` and `py_multimodal_data` always.

Source: `LlmRequest.__init__` in pyexecutor/llm_request.py.
"""


class Policy(Enum):
    GUARANTEED_NO_EVICT = 1


def llm_args(*, num_ranks: int, rank: int, cache: dict[str, Any], **changes: Any) -> Any:
    """Return what both halves of a connector are constructed with, on that rank."""
    mapping = SimpleNamespace(rank=rank, tp_size=num_ranks)
    fields = {
        "model": "not-on-this-machine",
        "revision": None,
        "dtype": "auto",
        "load_format": "AUTO",
        "checkpoint_format": None,
        "checkpoint_loader": None,
        "force_dynamic_quantization": False,
        "max_seq_len": None,
        "gpus_per_node": 8,
        "tensor_parallel_size": num_ranks,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "enable_attention_dp": False,
        "max_beam_width": 1,
        "disable_overlap_scheduler": False,
        "attn_backend": "TRTLLM",
        "orchestrator_type": None,
        "speculative_config": None,
        "decoding_config": None,
        "cache_transceiver_config": None,
        "sparse_attention_config": None,
        "lora_config": None,
        "quant_config": None,
        "ray_worker_extension_cls": None,
        "torch_compile_config": None,
        "scheduler_config": SimpleNamespace(
            capacity_scheduler_policy=Policy.GUARANTEED_NO_EVICT,
        ),
        "parallel_config": SimpleNamespace(to_mapping=lambda: mapping),
        "kv_cache_config": SimpleNamespace(
            **{
                "enable_block_reuse": True,
                "enable_partial_reuse": False,
                "host_cache_size": None,
                "max_attention_window": None,
                "sink_token_length": None,
                "dtype": "auto",
                **cache,
            }
        ),
    }
    return SimpleNamespace(**fields | changes)


class Transfers:
    """Requests that are being saved or loaded beside the passes."""

    def __init__(self) -> None:
        self.saving: dict[int, Any] = {}
        self.loading: dict[int, Any] = {}

    def take_all(self, other: "Transfers") -> None:
        self.saving |= other.saving
        self.loading |= other.loading
        other.saving, other.loading = {}, {}

    def extract(self, saving: Any, loading: Any) -> "Transfers":
        """Take out the named requests. One that is not here is a KeyError, and the engine's end."""
        taken = Transfers()
        taken.saving = {one: self.saving.pop(one) for one in saving}
        taken.loading = {one: self.loading.pop(one) for one in loading}
        return taken


class Manager:
    """Between executor and connector; the ranks of one engine in one object.

    The answers of rank 0 are pickled for the others, as MPI's broadcast does it.
    """

    is_attention_dp = False
    bound = BOUND
    draft_len = 0
    counts_drafts = False
    """Whether reports of generating requests count the drafted tokens."""

    def __init__(self, workers: list[Any], scheduler: Any) -> None:
        self.workers = workers
        self.scheduler = scheduler
        self.new = [Transfers() for _ in workers]
        self.pending = [Transfers() for _ in workers]
        self.finished_here = [Transfers() for _ in workers]
        self.loaded: dict[int, Any] = {}
        self.seen: dict[int, tuple[int, list[int]]] = {}
        self.external_loads: dict[int, int] = {}
        self.output: Any = None
        self.sent: list[tuple[int, Any]] = []

    def get_num_new_matched_tokens(self, original: Any, num_computed_tokens: int) -> int:
        """Ask and commit in one, as C++ does for the first cache manager: with a copy."""
        request = BoundRequest(original, self.bound)
        if request.is_generation_only_request:
            raise RuntimeError("no connector for requests that only generate")
        count, is_async = self._ask(request, num_computed_tokens)
        self._commit(request, count, is_async)
        return count

    def should_add_sequence(self, request: Any) -> bool:
        return request.request_id not in self.loaded

    def update_state_after_alloc(self, request: Any, groups: list[list[int]]) -> None:
        self.scheduler.update_state_after_alloc(request, list(groups[0]))

    def build_scheduler_output(self, context: list[Any], generation: list[Any], cache: Any) -> None:
        self.output = self.new_output()
        for request in context:
            if request.request_id in self.new[0].loading:
                continue
            is_new = request.request_id not in self.seen
            data = self.report(request, cache)
            data.computed_position -= self.external_loads.get(request.request_id, 0)
            (self.output.new_requests if is_new else self.output.cached_requests).append(data)
        self.output.cached_requests += [self.report(request, cache) for request in generation]
        self.external_loads = {}

    def new_output(self) -> Any:
        return SchedulerOutput()

    def report(self, request: Any, cache: Any) -> Any:
        return RequestData(*self.deltas(request, cache))

    def deltas(self, request: Any, cache: Any) -> tuple[Any, ...]:
        tokens, pages = request.get_tokens(0), cache.pages_of(request)[0]
        num_tokens, (num_pages,) = self.seen.get(request.request_id, (0, [0]))
        # The record of an id only grows, also if a later request of that id is shorter.
        self.seen[request.request_id] = (max(num_tokens, len(tokens)), [max(num_pages, len(pages))])
        return (
            request.request_id,
            tokens[num_tokens:],
            pages[num_pages:],
            *self.span(request, tokens),
        )

    def span(self, request: Any, tokens: list[int]) -> tuple[int, int]:
        request.was_reported = True
        if request.state == "CONTEXT_INIT":
            left = request.prompt_len - request.context_current_position
            return request.context_current_position, min(left, request.context_chunk_size)
        return len(tokens) - 1, 1 + self.draft_len * self.counts_drafts

    def begin_pass(self, context: list[Any]) -> list[Any]:
        """Plan, bind and load; return the context requests that take part."""
        left = self.park(context)
        self.handle_metadata()
        self.start_load()
        return left

    def park(self, context: list[Any]) -> list[Any]:
        for request in context:
            if request.request_id in self.new[0].loading:
                request.state = "DISAGG_GENERATION_TRANS_IN_PROGRESS"
                for new in self.new:  # the original takes the place of its copy
                    new.loading[request.request_id] = request
        return [one for one in context if one.request_id not in self.new[0].loading]

    def handle_metadata(self) -> None:
        metadata = self.scheduler.build_connector_meta(self.output)
        self.output = None
        packed = pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL)
        self.sent.append((len(packed), metadata))
        for rank, worker in enumerate(self.workers):
            received = pickle.loads(packed) if rank else metadata  # noqa: S301 - as MPI does
            worker.bind_connector_meta(received)

    def start_load(self) -> None:
        for worker in self.workers:
            worker.start_load_kv(None)

    def request_finished(self, request: Any, groups: list[list[int]]) -> bool:
        self.loaded.pop(request.request_id, None)
        is_saving = self.tell_finished(request, groups)
        if is_saving:
            for new in self.new:
                new.saving[request.request_id] = request
            request.state = "DISAGG_CONTEXT_TRANS_IN_PROGRESS"
        return is_saving

    def tell_finished(self, request: Any, groups: list[list[int]]) -> bool:
        return self.scheduler.request_finished(request, list(groups[0]))

    def get_finished(self) -> list[Any]:
        """Return the requests that every rank has saved; those loaded become schedulable."""
        for rank, worker in enumerate(self.workers):
            new, pending = self.new[rank], self.pending[rank]
            saving, loading = list(new.saving), list(new.loading)
            pending.take_all(new)
            self.finished_here[rank].take_all(
                pending.extract(*worker.get_finished(saving, loading))
            )
        saved = set.intersection(*(set(one.saving) for one in self.finished_here))
        loaded = set.intersection(*(set(one.loading) for one in self.finished_here))
        everywhere = [one.extract(saved, loaded) for one in self.finished_here]
        for request_id, request in everywhere[0].loading.items():
            request.state = "CONTEXT_INIT"
            self.loaded[request_id] = request
        return list(everywhere[0].saving.values())

    def forget(self, request: Any) -> None:
        """Nothing: this version keeps what it knows of ended requests, for ever."""

    def _ask(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        if is_async and not count:
            raise RuntimeError("nothing can be loaded later")
        return count, is_async

    def _commit(self, request: Any, count: int, is_async: bool) -> None:
        if is_async:
            for new in self.new:
                new.loading[request.request_id] = request
        self.external_loads[request.request_id] = count
