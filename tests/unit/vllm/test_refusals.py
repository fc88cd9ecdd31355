"""Set-ups of vLLM that would be served wrongly do not start."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvray.errors import ConfigError
from kvray.vllm.refusals import refuse_unsupported


def config(
    *, parallel: dict[str, Any] | None = None, cache: dict[str, Any] | None = None, **more: Any
) -> SimpleNamespace:
    """Return a configuration that is served, with changes."""
    fields = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=2, nnodes=1, **(parallel or {})),
        "cache_config": SimpleNamespace(**{"cache_dtype": "auto", **(cache or {})}),
        "speculative_config": None,
        "kv_transfer_config": SimpleNamespace(kv_role="kv_both"),
    }
    return SimpleNamespace(**{**fields, **more})


def test_what_is_served_starts() -> None:
    refuse_unsupported(config())
    refuse_unsupported(config(cache={"cache_dtype": "fp8"}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is 2"),
        ({"parallel": {"decode_context_parallel_size": 4}}, "decode_context_parallel_size is 4"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size is 2"),
        ({"cache": {"cache_dtype": "int8_per_token_head"}}, "scales beside the blocks"),
        ({"cache": {"kv_sharing_fast_prefill": True}}, "switch it off"),
        ({"speculative_config": SimpleNamespace()}, "speculative decoding"),
        ({"kv_transfer_config": SimpleNamespace(kv_role="kv_producer")}, "set it to kv_both"),
    ],
)
def test_what_is_not_served_is_refused_with_a_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_unsupported(config(**changes))
