"""How both halves of the connector begin, and what vLLM carries between them."""

import hashlib
import platform
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm
import vllm.envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvray.config import load_config
from kvray.engine.cache_layout import EngineIdentity
from kvray.engine.engine_args import (
    EngineArgs,
    canonical_text,
    field_of,
    find_checkpoint,
    read_checkpoint,
    release_of,
    text_of,
    to_text,
)
from kvray.engine.meta import ConnectorMeta
from kvray.engine.shared_state import SharedState, shared_state_for
from kvray.vllm import REPLICA_SETTING
from kvray.vllm.held import HeldLoad, Hold
from kvray.vllm.read import only_group, refuse_unsupported

_OVERRIDES = (
    "revision", "code_revision", "hf_overrides", "max_model_len", "config_format", "hf_config_path",
    "model_impl", "disable_sliding_window", "override_attention_dtype", "rope_scaling",
    "rope_theta", "model_class_overrides",
)  # fmt: skip
_QUANTIZATION = ("quantization", "quantization_config")
_ENVIRONMENT = (
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
)  # fmt: skip
"""What quantizes weights or activations beside that."""
_CACHE = ("cache_dtype", "sliding_window", "kv_cache_dtype_skip_layers")
_MEDIA = (
    "mm_processor_kwargs", "mm_device_do_normalize", "mm_encoder_attn_dtype",
    "video_pruning_rate", "video_pruning_method",
)  # fmt: skip
_FROM_FILES = {
    "auto", "hf", "dummy", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt",
    "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state", "gguf",
    "bitsandbytes",
}  # fmt: skip
"""Formats whose weights are in the checkpoint's files. A daemon's (`ipc_cache`) are compared by the
tensors' names and sizes alone: `WeightCacheKey` in `weight_cache/protocol.py`."""
_ADAPTERS = ("max_lora_rank", "lora_dtype", "fully_sharded_loras", "target_modules")


def state_for(vllm_config: Any, kv_cache_config: Any) -> SharedState:
    """Return the state of one half of the connector; the halves meet in what vLLM carries.

    ConfigError: the configuration, or a setting of vLLM, cannot be used.
    """
    refuse_unsupported(vllm_config)
    setting = vllm_config.kv_transfer_config.get_from_extra_config
    overrides = {"connector.replica": setting(REPLICA_SETTING, None)}
    config = load_config(setting("kvray_config", None), overrides=overrides)
    return shared_state_for(object(), read_args(vllm_config, kv_cache_config), config)


def read_args(vllm_config: Any, kv_cache_config: Any) -> EngineArgs:
    """Return what decides what vLLM's blocks are, and which of them may be shared."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    found = find_checkpoint(str(model.model), field_of(model, "revision"))
    group = only_group(kv_cache_config)
    load_format = str(field_of(vllm_config.load_config, "load_format"))
    elsewhere = "model_weights" if field_of(model, "model_weights") else load_format
    return EngineArgs(
        model=str(model.model),
        tokens_per_block=int(group.kv_cache_spec.block_size),
        num_ranks=int(parallel.tensor_parallel_size),
        rank=int(parallel.rank) % int(parallel.tensor_parallel_size),
        block_reuse=True,
        # Without a process of its own the engine takes no step between the last answer and
        # `reset_prefix_cache` or `sleep`, which fail while blocks of ended requests are kept.
        has_writes_aside=not vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING,
        quantization=canonical_text(model, _QUANTIZATION),
        overrides=to_text(
            {
                "model": canonical_text(model, _OVERRIDES),
                "config": _config_of(model),
                "cache": canonical_text(cache, _CACHE),
                "media": canonical_text(field_of(model, "multimodal_config"), _MEDIA),
                "dtype": str(field_of(model, "dtype")),
                "layout": text_of(kv_cache_config, "kv_cache_layout"),
                "load_format": load_format,
                "environment": canonical_text(vllm.envs, _ENVIRONMENT),
            }
        ),
        attention_backend=f"{_backend(vllm_config)} on {_device(vllm_config)}",
        engine=f"vllm {release_of(vllm.__version__)}",
        is_compiled=True,  # graphs run without hooks
        adapters=canonical_text(field_of(vllm_config, "lora_config"), _ADAPTERS),
        checkpoint=read_checkpoint(found),
        spread_setting="one node",
        asks_again=True,
        holds_loads=True,
        weights_from="" if elsewhere in _FROM_FILES else elsewhere,
        # With the one they are sent to it, and the other has calls of its own for its workers.
        weights_may_change=field_of(vllm_config, "weight_transfer_config") is not None
        or bool(text_of(parallel, "worker_extension_cls")),
        takes_offers_later=True,
        served_name=str(field_of(model, "served_model_name") or ""),
    )


def _config_of(model: Any) -> str:
    """Return a digest of the configuration that takes the place of the checkpoint's, if here."""
    if not (named := field_of(model, "hf_config_path")):
        return ""
    config = Path(find_checkpoint(str(named), field_of(model, "revision")), "config.json")
    return hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""


def _backend(vllm_config: Any) -> str:
    config = field_of(vllm_config, "attention_config")
    named = text_of(field_of(config, "backend"), "name") or "default"
    by_kind = field_of(config, "backend_per_kind")
    return f"{named} {to_text(by_kind)}" if by_kind else named


def _device(vllm_config: Any) -> str:
    """Return what decides how a block's bytes lie; CPUs with AMX have them packed otherwise.

    Source: `_get_attn_isa` in `vllm/v1/attention/backends/cpu_attn.py`.
    """
    kind = str(vllm_config.device_config.device_type)
    if kind != "cpu":
        return kind
    has_amx = torch.cpu._is_amx_tile_supported()
    return f"cpu {platform.machine()}{' amx' if has_amx else ''}"


@dataclass(slots=True, kw_only=True)
class PassMetadata(KVConnectorMetadata):
    """One pass's holds, loads and saves, for the ranks."""

    meta: ConnectorMeta  # its loads are in `loads`
    holds: tuple[Hold, ...] = ()
    drops: tuple[int, ...] = ()
    """Holds that nobody wants any more."""
    loads: tuple[HeldLoad, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    """vLLM's names of the requests of which the pass saves blocks, by kvray's numbers."""


@dataclass(slots=True, kw_only=True)
class PoolMetadata(KVConnectorHandshakeMetadata):
    """What a rank has registered, for the scheduler; sent once, when vLLM starts."""

    identity: EngineIdentity
    hold_blocks: int
    """How many blocks each rank can hold at a time."""
    host: str = field(default_factory=socket.gethostname)


@dataclass(slots=True)
class HoldAnswers(KVConnectorWorkerMetadata):
    """What ranks hold since their last answers."""

    num_ranks: Counter[int]
    """Hold -> how many of these ranks have answered for it."""
    num_valid: dict[int, int]
    """Hold -> its leading blocks that all of them have, and whose copies have their checksums."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HoldAnswers":
        """Return the answers of both; vLLM joins those of all ranks so."""
        assert isinstance(other, HoldAnswers), "all ranks run one connector"
        joined = dict(self.num_valid)
        for hold_id, valid in other.num_valid.items():
            joined[hold_id] = min(valid, joined.get(hold_id, valid))
        return HoldAnswers(self.num_ranks + other.num_ranks, joined)
