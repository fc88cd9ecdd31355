"""The arguments of a connector's constructors, named as in TensorRT-LLM's `TorchLlmArgs`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """The part of `TorchLlmArgs.kv_cache_config` that concerns a connector."""

    tokens_per_block: int = 32
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConnectorConfig:
    """The names of a connector's classes; versions 1.1 and 1.2 take nothing else."""

    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramDecodingConfig:
    """The part of `TorchLlmArgs.speculative_config` that says how many tokens are drafted."""

    max_draft_len: int
    decoding_type: str = "NGram"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """This process's place among the ranks, as in `TorchLlmArgs.parallel_config`."""

    rank: int = 0

    def to_mapping(self) -> ParallelConfig:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmArgs:
    """The one argument of a connector's constructors; `model` is a path or `tiny:SEED`."""

    model: str
    tensor_parallel_size: int = 1
    gpus_per_node: int | None = None
    enable_attention_dp: bool = False
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = True
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    kv_connector_config: KvConnectorConfig | None = None
    speculative_config: NGramDecodingConfig | None = None
