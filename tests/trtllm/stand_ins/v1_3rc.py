"""TensorRT-LLM 1.3's release candidates: another place to import from, salts and priorities.

Source: `pyexecutor/connectors/kv_cache_connector.py` of that line.
"""

from dataclasses import dataclass
from typing import Any

from tests.trtllm.stand_ins import v1_2

VERSION = "1.3.0rc9"
MODULE = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
HAS_GROUPS = False
RESOLVES_LATE = False
SALT_FIELD = "cache_salt_id"

BOUND = (*v1_2.BOUND, "kv_cache_retention_config")
"""Source: as of 1.2. No copy of the bindings of that very time was at hand; the connector of that
line reads `kv_cache_retention_config` and `cache_salt_id` of its requests."""

REQUEST_FIELDS = v1_2.REQUEST_FIELDS | {
    "kv_cache_retention_config": None,
    "py_num_connector_matched_tokens": 0,
}

KvCacheConnectorWorker = v1_2.KvCacheConnectorWorker
KvCacheConnectorConfig = v1_2.KvCacheConnectorConfig
SchedulerOutput = v1_2.SchedulerOutput


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    priorities: list[int] | None = None
    cache_salt_id: int | None = None


class KvCacheConnectorScheduler(v1_2.KvCacheConnectorScheduler):
    def wait_for_initialization(self) -> None:
        return


def priorities_of(request: Any, num_pages: int) -> list[int] | None:
    """Return those of new pages, which the cache manager has from the retention config."""
    retention = request.kv_cache_retention_config
    return None if retention is None else [retention.priority] * num_pages


def llm_args(*, cache: dict[str, Any], **changes: Any) -> Any:
    return v1_2.llm_args(cache={"use_kv_cache_manager_v2": False, **cache}, **changes)


class Manager(v1_2.Manager):
    bound = BOUND
    counts_drafts = True

    def __init__(self, workers: list[Any], scheduler: Any) -> None:
        super().__init__(workers, scheduler)
        scheduler.wait_for_initialization()

    def report(self, request: Any, cache: Any) -> Any:
        deltas = self.deltas(request, cache)
        return RequestData(
            *deltas,
            priorities=priorities_of(request, len(deltas[2])),
            cache_salt_id=request.cache_salt_id,
        )

    def _commit(self, request: Any, count: int, is_async: bool) -> None:
        super()._commit(request, count, is_async)
        request.py_num_connector_matched_tokens = count
