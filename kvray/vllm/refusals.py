"""Set-ups of vLLM that kvray would serve wrongly, refused at the start with what to change."""

from collections.abc import Iterator
from typing import Any

from kvray.engine.fields import field_of, number_of
from kvray.errors import ConfigError

_CACHE_DTYPES = {"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"}
"""Those whose blocks are all there is to a block: no scales beside it."""


def refuse_unsupported(vllm_config: Any) -> None:
    """Raise ConfigError for a setting that kvray cannot serve."""
    for is_so, sentence in _reasons(vllm_config):
        if is_so:
            raise ConfigError(sentence)


def _reasons(vllm_config: Any) -> Iterator[tuple[bool, str]]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in (
        "nnodes",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = number_of(parallel, name, 1)
        yield size > 1, f"{name} is {size}; kvray serves vLLM with 1."
    yield (
        field_of(vllm_config, "speculative_config") is not None,
        "speculative_config is set; kvray does not serve speculative decoding with vLLM yet, so"
        " leave it or --kv-transfer-config out.",
    )
    dtype = field_of(cache, "cache_dtype")
    yield (
        str(dtype) not in _CACHE_DTYPES,
        f"cache_dtype is {dtype!r}, which has scales beside the blocks; kvray serves"
        f" {', '.join(sorted(_CACHE_DTYPES))}.",
    )
    yield (
        bool(field_of(cache, "kv_sharing_fast_prefill")),
        "kv_sharing_fast_prefill is set, which leaves blocks unfilled; switch it off.",
    )
    role = field_of(vllm_config.kv_transfer_config, "kv_role")
    yield role != "kv_both", f"kv_role is {role!r}; kvray loads and saves, so set it to kv_both."
