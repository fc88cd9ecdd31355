"""How both halves of the connector begin: from TensorRT-LLM's arguments and a configuration.

TensorRT-LLM tells no connector that its weights are replaced, so kvray watches for it:
`WorkerExtension.update_weights` calls `ModelLoader.reload` for each part of the new weights and
`PyExecutor.reset_prefix_cache` at the end, in each rank's process and between two passes. Those two
methods are wrapped, once a process. Nothing else shows it: that the engine does not have a block
any more may also mean that it needed the page.

Source: `llmapi/rlhf_utils.py`, `pyexecutor/py_executor.py` and `pyexecutor/model_loader.py`, from
1.2 on.
"""

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from kvray.config import load_config
from kvray.connector.base import asks_every_rank, takes_offers_later
from kvray.connector.engine_args import read_engine_args
from kvray.engine.shared_state import SharedState, shared_state_for

REPLACING = (
    ("tensorrt_llm._torch.pyexecutor.model_loader", "ModelLoader", "reload"),
    ("tensorrt_llm._torch.pyexecutor.py_executor", "PyExecutor", "reset_prefix_cache"),
)
_ENGINES = "kvray_engines"


def watch_weights(shared: SharedState) -> None:
    """Have the engine of `shared` leave the tier when weights are replaced in this process.

    A process with several engines does not say which of them it is, so all of them leave it.
    """
    for module, owner, name in REPLACING:
        found = vars(sys.modules[module]).get(owner) if module in sys.modules else None
        method = None if found is None else vars(found).get(name)
        if method is None:
            continue
        if _ENGINES not in vars(method):
            method = _watched(method)
            setattr(found, name, method)
        vars(method)[_ENGINES].add(shared)


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    engines = weakref.WeakSet[SharedState]()

    @functools.wraps(method)
    def told(*args: Any, **options: Any) -> Any:
        for shared in list(engines):
            shared.name_weights(None)
        return method(*args, **options)

    vars(told)[_ENGINES] = engines
    return told


_log = logging.getLogger("kvray.connector")


def state_for(llm_args: Any, config_path: str | None) -> SharedState:
    """Return the state of the engine that `llm_args` describes, one for both halves of a process.

    ConfigError: the configuration, or an engine setting, cannot be used.
    """
    args = read_engine_args(
        llm_args, asks_every_rank=asks_every_rank(), takes_offers_later=takes_offers_later()
    )
    shared = shared_state_for(llm_args, args, load_config(config_path))
    watch_weights(shared)
    if not args.block_reuse:
        _log.warning(
            "kvray: kv_cache_config.enable_block_reuse is false: the engine ignores every match;"
            " set it to true to load from the tier."
        )
    return shared
