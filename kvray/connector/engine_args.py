"""What the engine says of itself: read from `llm_args` by duck typing, refused where it must be.

`llm_args` is TensorRT-LLM's `TorchLlmArgs`, whose fields differ from version to version; every
field is read with a default, and none is ever written.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvray.errors import ConfigError

_PLAIN = (str, int, float, list, dict)
_NO_FIELD = "kvray_asks_for_no_such_field"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The engine's settings that decide what its blocks are and which of them may be shared."""

    model: str
    tokens_per_block: int
    num_ranks: int
    rank: int
    block_reuse: bool
    partial_reuse: bool
    quantization: str
    overrides: str
    attention_backend: str
    engine: str


def read_engine_args(llm_args: Any) -> EngineArgs:
    """Return the settings of `llm_args`.

    Raises:
        ConfigError: a setting that no connector, or not kvray, can serve; or no tokens_per_block.
    """
    cache = getattr(llm_args, "kv_cache_config", None)
    _refuse_unsupported(llm_args, cache)
    num_ranks = _number(llm_args, "tensor_parallel_size", 1)
    return EngineArgs(
        model=str(field_of(llm_args, "model") or ""),
        tokens_per_block=_tokens_per_block(llm_args, cache),
        num_ranks=num_ranks,
        rank=_rank(llm_args, num_ranks),
        block_reuse=bool(getattr(cache, "enable_block_reuse", True)),
        partial_reuse=bool(getattr(cache, "enable_partial_reuse", True)),
        quantization=_quantization(llm_args),
        overrides=_overrides(llm_args),
        attention_backend=_text(llm_args, "attn_backend"),
        engine=_engine_version(),
    )


def field_of(source: Any, name: str) -> Any:
    """Return a field of an engine's object; None if it is not there.

    A value that has every attribute one asks for was made up by the asking: it is no value.
    """
    value = getattr(source, name, None)
    return None if hasattr(value, _NO_FIELD) else value


def _refuse_unsupported(llm_args: Any, cache: Any) -> None:
    """Refuse at start what 1.1 and 1.2 let through and a connector would serve wrongly."""
    for name, what in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("context_parallel_size", "context parallelism"),
        ("max_beam_width", "beam search"),
    ):
        if _number(llm_args, name, 1) > 1:
            raise ConfigError(f"kvray does not serve engines with {what}; set {name} to 1.")
    if getattr(llm_args, "enable_attention_dp", False) is True:
        raise ConfigError("kvray does not serve attention data parallelism; unset it.")
    if field_of(llm_args, "speculative_config") is not None:
        raise ConfigError("kvray does not serve speculative decoding; unset speculative_config.")
    if _number(cache, "host_cache_size", 0) > 0:
        raise ConfigError(
            "TensorRT-LLM's own host cache and a connector exclude each other; unset"
            " kv_cache_config.host_cache_size, kvray's host tier takes its place."
        )
    windows = getattr(cache, "max_attention_window", None)
    if isinstance(windows, Sequence) and len(set(windows)) > 1:
        raise ConfigError(
            "kvray does not serve layers with different attention windows; give one window."
        )
    if str(field_of(cache, "dtype")).lower() in ("nvfp4", "fp4"):
        raise ConfigError(
            "An FP4 KV cache keeps its scales in a pool that no connector is given; choose"
            " kv_cache_config.dtype fp8 or auto."
        )


def _tokens_per_block(llm_args: Any, cache: Any) -> int:
    found = _number(cache, "tokens_per_block", 0) or _number(llm_args, "tokens_per_block", 0)
    if found < 1:
        raise ConfigError(
            "The engine does not say its tokens_per_block; set it in kv_cache_config."
        )
    return found


def _rank(llm_args: Any, num_ranks: int) -> int:
    """Return this process's rank among the engine's ranks.

    TensorRT-LLM's own answer comes first: by it the engine decides which rank is the leader.
    """
    utilities = sys.modules.get("tensorrt_llm._utils")
    if utilities is not None and hasattr(utilities, "mpi_rank"):
        rank = int(utilities.mpi_rank())
        if rank >= num_ranks:
            raise ConfigError(
                f"This is rank {rank} of an engine whose tensor_parallel_size is {num_ranks}; kvray"
                " serves tensor parallelism only, and must know its size."
            )
        return rank
    if num_ranks == 1:
        return 0
    parallel = field_of(llm_args, "parallel_config")
    mapping = parallel.to_mapping() if hasattr(parallel, "to_mapping") else llm_args
    rank = field_of(mapping, "rank")
    if not isinstance(rank, int):
        raise ConfigError("The engine has several ranks but does not say which one this is.")
    return rank


def _quantization(llm_args: Any) -> str:
    quant = getattr(llm_args, "quant_config", None)
    names = ("quant_algo", "kv_cache_quant_algo", "group_size")
    return _plain_fields(quant, names)


def _overrides(llm_args: Any) -> str:
    """Return what changes the checkpoint's own configuration, as one text."""
    names = ("model_kwargs", "rope_scaling", "rope_theta", "max_seq_len", "dtype")
    return _plain_fields(llm_args, names)


def _plain_fields(source: Any, names: tuple[str, ...]) -> str:
    """Return the named fields that are set to plain values, in one canonical text.

    An object's text may hold its address, which would give every process a namespace of its own.
    """
    found = {name: getattr(source, name, None) for name in names}
    plain = {name: value for name, value in found.items() if isinstance(value, _PLAIN)}
    return json.dumps(plain, sort_keys=True, default=lambda value: type(value).__name__)


def _engine_version() -> str:
    tensorrt_llm = sys.modules.get("tensorrt_llm")
    version = getattr(tensorrt_llm, "__version__", None)
    if version is None:
        return "reference"
    return "tensorrt_llm " + ".".join(str(version).split(".")[:2])


def _text(source: Any, name: str) -> str:
    value = getattr(source, name, None)
    return value if isinstance(value, str) else "default"


def _number(llm_args: Any, name: str, default: int) -> int:
    value = getattr(llm_args, name, None)
    return value if isinstance(value, int) else default
