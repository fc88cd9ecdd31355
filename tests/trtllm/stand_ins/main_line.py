"""TensorRT-LLM's main line: layer groups, partly taken offers, replays, attention data parallelism.

Source: `pyexecutor/connectors/kv_cache_connector.py` and `kv_cache_layout.py` of that line.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from tests.trtllm.stand_ins import v1_2, v1_3rc

VERSION = "1.4.0rc4"
MODULE = v1_3rc.MODULE
HAS_GROUPS = True
RESOLVES_LATE = False
SALT_FIELD = "cache_salt"

_NEW = (
    "cache_salt",
    "multimodal_item_run_cu_offsets",
    "multimodal_run_positions",
    "multimodal_run_lengths",
    "encoder_tokens",
)
BOUND = (
    *(name for name in v1_3rc.BOUND if name != "cache_salt_id"),
    *_NEW,
    "try_get_encoder_output_len",
)
"""Source: `GenericLlmRequest` in cpp/tensorrt_llm/nanobind/batch_manager/bindings.cpp of the
branches lowsfer/TensorRT-LLM at 61997fd2 and patchychen-nv/TensorRT-LLM at b9d514f4, of summer
2026. `encoder_output_len`, which raises for requests without an encoder, is not read. Uuids of
media go into the constructor and cannot be read; they are part of the digests."""

REQUEST_FIELDS = {
    name: value for name, value in v1_3rc.REQUEST_FIELDS.items() if name != "cache_salt_id"
} | dict.fromkeys(_NEW)


@dataclass
class RequestData:
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
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


@dataclass(frozen=True)
class KvCacheBufferRef:
    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class KvCacheRegion:
    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]

    def as_tensor(self, dtype: Any = torch.uint8) -> Any:
        raise NotImplementedError("a device pointer, which this machine has none of")


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]


@dataclass(frozen=True)
class KvCacheLayout:
    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    dtype: Any = torch.uint8

    def as_single_pool_tensor(self) -> None:
        return None


class KvCacheConnectorWorker(v1_2.KvCacheConnectorWorker):
    supports_attention_dp = False

    def register_kv_cache_layout(self, layout: Any) -> None:
        raise NotImplementedError("this connector knows one pool only")


class KvCacheConnectorScheduler(v1_3rc.KvCacheConnectorScheduler):
    supports_attention_dp = False

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        raise NotImplementedError("this connector knows one list of block ids only")

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        raise NotImplementedError("this connector knows one list of block ids only")


class KvCacheConnectorConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    connector: str | None = None
    server_url: str | None = None
    connector_module: str | None = None
    connector_scheduler_class: str | None = None
    connector_worker_class: str | None = None


def llm_args(*, cache: dict[str, Any], **changes: Any) -> Any:
    return v1_2.llm_args(
        cache={
            "use_kv_cache_manager_v2": "auto",
            "disk_cache_size": None,
            "enable_swa_scratch_reuse": False,
            **cache,
        },
        **{"model_kwargs": None, "kv_cache_compression_config": None, **changes},
    )


class Manager(v1_3rc.Manager):
    """Asks and commits apart, so that an engine may take less of an offer."""

    bound = BOUND
    serves_owners_flat = False
    """Whether the first cache manager goes with attention data parallelism."""

    def __init__(
        self,
        workers: list[Any],
        scheduler: Any,
        *,
        owner: int | None = None,
        is_flat: bool = False,
    ) -> None:
        """Serve one engine, or with attention data parallelism the requests of one owner.

        With `is_flat` the first cache manager is in use, which knows one list of blocks.
        """
        if owner is not None:
            assert self.serves_owners_flat or not is_flat, "owners need layer groups"
            assert all(type(one).supports_attention_dp is True for one in (*workers, scheduler))
        super().__init__(workers, scheduler)
        self.owner = owner
        self.is_flat = is_flat
        # Both grouped forms or neither: engines with several groups ask for it at the start.
        for name in ("update_state_after_alloc", "request_finished"):
            grouped = f"{name}_by_layer_group"
            is_own = getattr(type(scheduler), grouped) is not getattr(
                KvCacheConnectorScheduler, grouped
            )
            assert is_own, f"the scheduler has no {grouped}"

    @property
    def is_attention_dp(self) -> bool:
        return self.owner is not None

    def query(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Ask without any effect on what is reported."""
        return self._ask(request, num_computed_tokens)

    def commit(self, request: Any, count: int, is_async: bool) -> None:
        """Note what of the offer is taken; one that loads later is parked whatever is taken."""
        self._commit(request, count, is_async)

    def update_state_after_alloc(self, request: Any, groups: list[list[int]]) -> None:
        if self.is_flat:
            super().update_state_after_alloc(request, groups)
            return
        self.scheduler.update_state_after_alloc_by_layer_group(request, [[*one] for one in groups])

    def request_finished(self, request: Any, groups: list[list[int]]) -> bool:
        is_saving = super().request_finished(request, groups)
        if self.is_attention_dp:  # others keep what they know of an id
            self.forget(request)
        return is_saving

    def tell_finished(self, request: Any, groups: list[list[int]]) -> bool:
        if self.is_flat:
            return super().tell_finished(request, groups)
        return self.scheduler.request_finished_by_layer_group(request, [[*one] for one in groups])

    def new_output(self) -> Any:
        return SchedulerOutput(attention_dp_rank=self.owner)

    def build_scheduler_output(self, context: list[Any], generation: list[Any], cache: Any) -> None:
        if self.is_attention_dp:  # an owner's dummies are nobody's business
            generation = [one for one in generation if not one.is_dummy_request]
        super().build_scheduler_output(context, generation, cache)

    def report(self, request: Any, cache: Any) -> Any:
        if self.is_flat:
            deltas = self.deltas(request, cache)
            hashes = [hash(request.digest(at * 4 + 3)) for at in range(len(request.tokens) // 4)]
            return RequestData(
                *deltas,
                block_hashes=hashes,
                priorities=v1_3rc.priorities_of(request, len(deltas[2])),
                cache_salt=request.cache_salt,
            )
        tokens, groups = request.get_tokens(0), cache.pages_of(request)
        num_tokens, counts = self.seen.get(request.request_id, (0, [0] * len(groups)))
        self.seen[request.request_id] = (
            max(num_tokens, len(tokens)),
            [max(count, len(pages)) for pages, count in zip(groups, counts, strict=True)],
        )
        fresh = [pages[count:] for pages, count in zip(groups, counts, strict=True)]
        return RequestData(
            request.request_id,
            tokens[num_tokens:],
            fresh[0] if len(fresh) == 1 else [],
            *self.span(request, tokens),
            block_hashes=[],
            cache_salt=request.cache_salt,
            new_block_ids_by_layer_group=fresh,
        )

    def begin_pass(self, context: list[Any]) -> list[Any]:
        """Plan before the parked are taken out, and load twice: the second time is a repetition."""
        self.handle_metadata()
        left = self.park(context)
        self.handle_metadata()
        self.start_load()
        self.start_load()
        return left

    def handle_metadata(self) -> None:
        if self.output is not None:
            super().handle_metadata()

    def forget(self, request: Any) -> None:
        """Have a request whose blocks were taken away reported again."""
        self.seen.pop(request.request_id, None)
        self.external_loads.pop(request.request_id, None)
        self.loaded.pop(request.request_id, None)
