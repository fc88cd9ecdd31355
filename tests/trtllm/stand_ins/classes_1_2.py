"""The classes of TensorRT-LLM 1.1 and 1.2 that a connector implements or is given.

Source: `pyexecutor/kv_cache_connector.py` of that line.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata = None
        super().__init__()

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Any:
        return None

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor): ...

    @abstractmethod
    def start_load_kv(self, stream): ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx, stream): ...

    @abstractmethod
    def save_kv_layer(self, layer_idx, stream): ...

    @abstractmethod
    def wait_for_save(self, stream): ...

    @abstractmethod
    def get_finished(self, finished_gen_req_ids, started_loading_req_ids): ...


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    @abstractmethod
    def request_finished(self, request, cache_block_ids): ...

    @abstractmethod
    def update_state_after_alloc(self, request, block_ids): ...


class KvCacheConnectorConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str
