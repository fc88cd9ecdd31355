"""A branch of TensorRT-LLM that asks early and resolves the offer later, if ever.

Source: the page on the connector of that branch. An offer that is not taken is handed back by
`cancel_load`, a request whose blocks were taken away is announced by `request_reset`. The layout
tells what is the same on all ranks, but not of which type its elements are.
"""

from dataclasses import dataclass
from typing import Any

from tests.trtllm.stand_ins import main_line

VERSION = "1.5.0.dev0"
MODULE = main_line.MODULE
HAS_GROUPS = True
RESOLVES_LATE = True
SALT_FIELD = "cache_salt"

BOUND = (*main_line.BOUND, "multimodal_item_runs")
REQUEST_FIELDS = main_line.REQUEST_FIELDS | {
    "py_connector_prefix_end": None,
    "multimodal_item_runs": None,
}

RequestData = main_line.RequestData
SchedulerOutput = main_line.SchedulerOutput
KvCacheBufferRef = main_line.KvCacheBufferRef
KvCacheRegion = main_line.KvCacheRegion
llm_args = main_line.llm_args


@dataclass(frozen=True)
class KvCacheLayerGroupLayout(main_line.KvCacheLayerGroupLayout):
    replicated_regions: tuple[main_line.KvCacheRegion, ...] = ()


@dataclass(frozen=True)
class KvCacheLayout:
    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    gpu_pool_mapping_bytes: int | None = None


class KvCacheConnectorConfig(main_line.KvCacheConnectorConfig):
    mooncake_store: dict[str, Any] | None = None


class KvCacheConnectorWorker(main_line.KvCacheConnectorWorker):
    capacity_only = False


class KvCacheConnectorScheduler(main_line.KvCacheConnectorScheduler):
    def cancel_load(self, request: Any, start: int, end: int) -> None:
        return

    def request_reset(self, request: Any) -> None:
        return


class Manager(main_line.Manager):
    bound = BOUND
    serves_owners_flat = True

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        self.scheduler.cancel_load(request, start, end)

    def reset(self, request: Any) -> None:
        self.forget(request)
        self.scheduler.request_reset(request)
