"""TensorRT-LLM's abstract connector classes: its own where it is installed, else the same.

Source: `tensorrt_llm._torch.pyexecutor.kv_cache_connector` up to 1.2 and
`tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector` after it. The classes below have
the union of the methods that those versions call, so one connector serves all of them.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

UPSTREAM_MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


@dataclass
class RequestData:
    """What one pass has that is new about one request.

    `new_tokens` and `new_block_ids` are append-deltas over the request's whole life, the first with
    all of it. `computed_position` is where the pass begins, without the tokens that the connector
    matched for this very pass; `num_scheduled_tokens` is how far it goes.
    """

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """The requests of one pass: those reported for the first time, and all others."""

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


class KvCacheConnectorScheduler(ABC):
    """The leader's half: decides what is loaded. On rank 0, or with attention DP on every rank."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """Return the metadata that every worker is bound to for this pass; it must pickle."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens after `num_computed_tokens` can be loaded, and whether later.

        The engine computes at least one token of the prompt itself. (0, True) is an error.
        """

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Return whether blocks of the finished request are still being read by a save."""

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """As `request_finished`, for caches with layer groups. Called by main only."""
        return self.request_finished(request, cache_block_ids_by_layer_group[0])

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Take note of all the blocks of a request that was just given them."""

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """As `update_state_after_alloc`, for caches with layer groups. Called by main only."""
        self.update_state_after_alloc(request, block_ids_by_layer_group[0])

    def wait_for_initialization(self) -> None:
        """Return when the connector is ready to be asked. Called by 1.3 and later."""
        return


class KvCacheConnectorWorker(ABC):
    """Every rank's half: moves the bytes."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object | None = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        """Keep what the scheduler built for the coming pass."""
        self._metadata = metadata

    def get_connector_meta(self) -> object | None:
        """Return the metadata of the pass, or None before the first one."""
        return self._metadata

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        """Return a callable that the engine runs after every forward pass, warm-up included."""
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        """Take the pool, shaped [num_blocks, num_layers, kv_factor, block_size]."""

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Take a cache with layer groups, described as `KvCacheLayout`. Called by main only."""
        self.register_kv_caches(layout.as_single_pool_tensor())

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None:
        """Begin to load what the bound metadata names."""

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Return when the layer's loaded bytes are in place; called before the layer runs."""

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Begin to save the layer's new bytes; called after the layer ran."""

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None:
        """Return when all that must be saved before the next pass is saved."""

    @abstractmethod
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the ids whose asynchronous saving, and loading, has ended; each once."""


def find_upstream(modules: Sequence[str] = UPSTREAM_MODULES) -> ModuleType | None:
    """Return TensorRT-LLM's connector module, or None where there is no TensorRT-LLM.

    An ImportError of one that is there is not hidden: our own classes would give an engine that
    rejects the connector without a reason.
    """
    for path in modules:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise
    return None


def asks_every_rank() -> bool:
    """Whether the runtime asks every rank's connector under attention data parallelism."""
    halves = (KvCacheConnectorScheduler, KvCacheConnectorWorker)
    return all(hasattr(half, "supports_attention_dp") for half in halves)


if not TYPE_CHECKING:
    _upstream = find_upstream()
    if _upstream is not None:
        KvCacheConnectorScheduler = _upstream.KvCacheConnectorScheduler
        KvCacheConnectorWorker = _upstream.KvCacheConnectorWorker
        RequestData = _upstream.RequestData
        SchedulerOutput = _upstream.SchedulerOutput
