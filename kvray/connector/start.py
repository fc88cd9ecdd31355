"""How both halves of the connector begin: from TensorRT-LLM's arguments and a configuration."""

import logging
from typing import Any

from kvray.config import load_config
from kvray.connector.base import asks_every_rank, takes_offers_later
from kvray.connector.model.engine_args import read_engine_args
from kvray.connector.weights_watch import watch_weights
from kvray.engine.shared_state import SharedState, shared_state_for

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
