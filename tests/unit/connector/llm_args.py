"""Stand-ins for an engine's arguments and for the configuration files of a checkpoint."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvray.connector import base
from kvray.connector.model.engine_args import EngineArgs, read_engine_args

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DEEPSEEK = LLAMA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def args_of(*, cache: dict[str, Any] | None = None, **fields: Any) -> SimpleNamespace:
    config = {"tokens_per_block": 32, "enable_block_reuse": True, **(cache or {})}
    return SimpleNamespace(
        **{"model": "/m", "kv_cache_config": SimpleNamespace(**config), **fields}
    )


def checkpoint(directory: Path, config: dict[str, Any], **files: Any) -> str:
    """Write configuration files, config.json and those of `files`; return where."""
    for name, content in {"config": config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return str(directory)


def read_args(llm_args: Any) -> EngineArgs:
    """Return the settings of `llm_args`, as a start of the engine would."""
    return read_engine_args(
        llm_args,
        asks_every_rank=base.asks_every_rank(),
        takes_offers_later=base.takes_offers_later(),
    )
