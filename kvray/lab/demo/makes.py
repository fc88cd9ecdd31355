"""The makes of engine that the demo can play with: what a `Replica` of each is started with."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from kvray.errors import ConfigError
from kvray.lab import vllm
from kvray.lab.demo.prompts import TOKENS_PER_BLOCK
from kvray.lab.reference import KvConnectorConfig

Make = Callable[..., dict[str, Any]]
"""Returns the arguments of `Replica.spawn` for a model, a pool of `num_blocks` and so many threads,
`with_kvray` or without, `with_reuse` of the pool's own blocks or without."""

_CONNECTOR = KvConnectorConfig(
    connector_module="kvray.connector",
    connector_scheduler_class="KvRayScheduler",
    connector_worker_class="KvRayWorker",
)


def find_make(name: str) -> Make:
    """Return the make of that name; ConfigError: there is none, or it is not installed."""
    if name not in _MAKES:
        raise ConfigError(f"There is no engine {name!r}; give one of {', '.join(sorted(_MAKES))}.")
    if name == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed here; install it, or run `make test-vllm` in a checkout, which"
            " makes an environment with vLLM for the CPU."
        )
    return _MAKES[name]


def _reference(
    model: str, num_blocks: int, *, num_threads: int, with_kvray: bool, with_reuse: bool
) -> dict[str, Any]:
    return {
        "model": model,
        "tokens_per_block": TOKENS_PER_BLOCK,
        "num_blocks": num_blocks,
        "connector": _CONNECTOR if with_kvray else None,
        "enable_block_reuse": with_reuse,
        "num_threads": num_threads,
    }


def _vllm(
    model: str, num_blocks: int, *, num_threads: int, with_kvray: bool, with_reuse: bool
) -> dict[str, Any]:
    return {
        "module": vllm.MODULE,
        "env": vllm.environ(num_threads),
        "model": model,
        "block_size": TOKENS_PER_BLOCK,
        "num_blocks": num_blocks + 1,  # vLLM keeps one for itself
        "max_model_len": num_blocks * TOKENS_PER_BLOCK,
        "dtype": "float32",
        "enable_prefix_caching": with_reuse,
        "with_kvray": with_kvray,
    }


_MAKES: dict[str, Make] = {"reference": _reference, "vllm": _vllm}
