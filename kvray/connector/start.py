"""How both halves of the connector begin: from TensorRT-LLM's arguments and a configuration.

`llm_args` is TensorRT-LLM's `TorchLlmArgs`, whose fields differ from version to version. What no
connector could serve is refused. Nothing that differs from rank to rank enters the namespace.

TensorRT-LLM tells no connector that its weights are replaced, so kvray watches for it:
`WorkerExtension.update_weights` calls `ModelLoader.reload` for each part of the new weights and
`PyExecutor.reset_prefix_cache` at the end, in each rank's process and between two passes. Those two
methods are wrapped, once a process. Nothing else shows it: that the engine does not have a block
any more may also mean that it needed the page.

Source: `llmapi/rlhf_utils.py`, `pyexecutor/py_executor.py` and `pyexecutor/model_loader.py`, from
1.2 on.
"""

import functools
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvray.config import load_config
from kvray.connector.base import asks_every_rank, takes_offers_later, version_numbers
from kvray.connector.refusals import refuse_unsupported
from kvray.engine.engine_args import (
    CheckpointConfig,
    EngineArgs,
    canonical_text,
    field_of,
    find_checkpoint,
    number_of,
    read_checkpoint,
    release_of,
    text_of,
    to_text,
)
from kvray.engine.model_name import fingerprints_dir
from kvray.engine.shared_state import SharedState, shared_state_for
from kvray.errors import ConfigError
from kvray.identity.fingerprint import fingerprint_model

_log = logging.getLogger("kvray.connector")

_QUANTIZATION = (
    "quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val",
    "use_meta_recipe", "has_zero_point", "pre_quant_scale", "exclude_modules", "quantized_layers",
)  # fmt: skip
_OVERRIDES = (
    "model_kwargs", "rope_scaling", "rope_theta", "max_seq_len", "dtype", "revision",
    "checkpoint_format", "checkpoint_loader", "force_dynamic_quantization",
    "sparse_attention_config",
)  # fmt: skip
_CACHE_OVERRIDES = ("max_attention_window", "sink_token_length")
"""A window decides what a token attends to, and with it the keys and values of the next layer."""
_FROM_FILES = {"", "AUTO", "DUMMY", "VISION_ONLY", "HF", "MISTRAL", "MISTRAL_LARGE_3"}
"""Ways to load whose weights are in the checkpoint's files. By GMS and MX they are those of another
engine, which are compared by shape and type alone: `weight_sharing/source_identity.py`, main."""
_ADAPTERS = (
    "lora_ckpt_source",
    "lora_target_modules",
    "trtllm_modules_to_hf_modules",
    "swap_gate_up_proj_lora_b_weight",
)
REPLACING = (
    ("tensorrt_llm._torch.pyexecutor.model_loader", "ModelLoader", "reload"),
    ("tensorrt_llm._torch.pyexecutor.py_executor", "PyExecutor", "reset_prefix_cache"),
)
_ENGINES = "kvray_engines"


def state_for(llm_args: Any, named_path: str | None) -> SharedState:
    """Return the state of the engine that `llm_args` describes, one for both halves of a process.

    `named_path` is that of a configuration file behind the class's name. ConfigError: the
    configuration, or an engine setting, cannot be used.
    """
    args = read_engine_args(
        llm_args, asks_every_rank=asks_every_rank(), takes_offers_later=takes_offers_later()
    )
    config = load_config(config_path_of(llm_args, named_path))
    shared = shared_state_for(llm_args, args, config)
    watch_weights(shared)
    if not args.block_reuse:
        _log.warning(
            "kvray: kv_cache_config.enable_block_reuse is false: the engine ignores every match;"
            " set it to true to load from the tier."
        )
    return shared


def config_path_of(llm_args: Any, named_path: str | None) -> str | None:
    """Return the configuration file's path: that of `server_url`, else the one behind the name.

    None: neither is there, and `load_config` looks elsewhere. ConfigError: the URL is of another
    scheme than kvray's.
    """
    written = text_of(field_of(llm_args, "kv_connector_config"), "server_url")
    url = urlsplit(written)
    if url.scheme and (url.scheme != "kvray" or url.netloc or not url.path.startswith("/")):
        raise ConfigError(
            f"kv_connector_config.server_url is {written!r}, and kvray has no server; set it to"
            " kvray:///path/to/kvray.yaml, or to the path alone."
        )
    path = unquote(url.path) if url.scheme else written
    if path and named_path and path != named_path:
        _log.warning("kvray: server_url goes before %s, behind the class's name", named_path)
    if found := path or named_path:
        where = "server_url" if path else "the class's name"
        _log.info("kvray: configuration is %s, from %s", found, where)
    return found


def watch_weights(shared: SharedState) -> None:
    """Have the engine of `shared` leave the tier when weights are replaced in this process.

    A process with several engines does not say which of them it is, so all of them leave it.
    """
    for module, owner, name in REPLACING:
        found = _class_in(module, owner)
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
    def watched(*args: Any, **options: Any) -> Any:
        for shared in list(engines):
            shared.name_weights(None)
        return method(*args, **options)

    vars(watched)[_ENGINES] = engines
    return watched


def read_engine_args(
    llm_args: Any, *, asks_every_rank: bool, takes_offers_later: bool
) -> EngineArgs:
    """Return the settings of `llm_args`; the other two are those of `base`.

    ConfigError: a setting that no connector, or not kvray, can serve; or no tokens_per_block.
    """
    cache = getattr(llm_args, "kv_cache_config", None)
    model = str(field_of(llm_args, "model") or "")
    found = find_checkpoint(model, text_of(llm_args, "revision") or None)
    changes = field_of(llm_args, "model_kwargs")
    checkpoint = read_checkpoint(found, changes if isinstance(changes, Mapping) else None)
    refuse_unsupported(llm_args, checkpoint, asks_every_rank=asks_every_rank)
    num_ranks = number_of(llm_args, "tensor_parallel_size", 1)
    partial_reuse = field_of(cache, "enable_partial_reuse") is not False
    is_compiled = field_of(llm_args, "torch_compile_config") is not None
    is_compiled = is_compiled or field_of(llm_args, "torch_compile_enabled") is True
    # `BreakableCUDAGraphRunner.execute` replays the layers without their hooks.
    graphs = text_of(llm_args, "prefill_cuda_graph_backend").lower()
    is_compiled = is_compiled or graphs not in ("", "disabled")
    transfers = field_of(llm_args, "cache_transceiver_config")
    # Second manager: `KvCache::commit` copies a prompt's begun block behind the pass under these
    # policies; under the others `_unlockStaleBlocks` holds for it what a window passes.
    reuse = text_of(field_of(cache, "block_reuse_config"), "policy").lower()
    keeps_ends = reuse in ("per_request", "per_conversation")
    return EngineArgs(
        model=model,
        tokens_per_block=_tokens_per_block(llm_args, cache),
        num_ranks=num_ranks,
        rank=_rank(llm_args, num_ranks),
        block_reuse=field_of(cache, "enable_block_reuse") is not False,
        has_writes_aside=(
            partial_reuse or keeps_ends or field_of(transfers, "backend") is not None
        ),
        refills_inputs=_refills_inputs(llm_args),
        owns_partial_blocks=partial_reuse and not is_compiled and not _copies_aside(),
        quantization=canonical_text(field_of(llm_args, "quant_config"), _QUANTIZATION),
        overrides=_overrides(llm_args, cache),
        attention_backend=text_of(llm_args, "attn_backend").upper() or "default",
        engine=_engine_version(),
        ranks_per_node=number_of(llm_args, "gpus_per_node", 0),
        attention_dp=field_of(llm_args, "enable_attention_dp") is True,
        is_compiled=is_compiled,
        windows=_windows(llm_args, cache),
        adapters=canonical_text(field_of(llm_args, "lora_config"), _ADAPTERS),
        checkpoint=checkpoint,
        is_sparse=_is_sparse(llm_args, checkpoint),
        spread_setting="gpus_per_node",
        drafts_tokens=field_of(llm_args, "speculative_config") is not None,
        reuses_passed=reuse != "" and not keeps_ends,
        finds_parts=partial_reuse,
        reuses_unwritten=_reuses_unwritten(),
        weights_from=_weights_from(llm_args),
        weights_may_change=field_of(llm_args, "ray_worker_extension_cls") is not None,
        takes_offers_later=takes_offers_later,
    )


def _tokens_per_block(llm_args: Any, cache: Any) -> int:
    found = number_of(cache, "tokens_per_block", 0) or number_of(llm_args, "tokens_per_block", 0)
    if found < 1:
        raise ConfigError("The engine names no tokens_per_block; set it in kv_cache_config.")
    return found


def _rank(llm_args: Any, num_ranks: int) -> int:
    """Return this process's rank; TensorRT-LLM's answer, which decides who leads, goes first."""
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
        raise ConfigError(
            "The engine has several ranks but does not say which one this is; start it with MPI."
        )
    return rank


def _overrides(llm_args: Any, cache: Any) -> str:
    found = {name: field_of(llm_args, name) for name in _OVERRIDES}
    found |= {name: field_of(cache, name) for name in _CACHE_OVERRIDES}
    # A text in some versions, an enumeration in others; `dummy` are weights made up.
    found["load_format"] = text_of(llm_args, "load_format").upper() or None
    found["algorithm"] = os.environ.get("OVERRIDE_QUANT_ALGO") or None  # of a model in MXFP4
    # Its adapters' embeddings take the place of the model's, for requests without one, too.
    found["lora_dir"] = [
        fingerprint_model(Path(path), cache_dir=fingerprints_dir())
        for path in field_of(field_of(llm_args, "lora_config"), "lora_dir") or ()
    ] or None
    return to_text({name: value for name, value in found.items() if value is not None})


def _weights_from(llm_args: Any) -> str:
    ways = (
        text_of(llm_args, "load_format"),
        text_of(llm_args, "checkpoint_format"),
        text_of(field_of(llm_args, "checkpoint_loader"), "checkpoint_format"),
    )
    return next((way for way in ways if way.upper() not in _FROM_FILES), "")


def _copies_aside() -> bool:
    """Whether pages are copied for partial reuse on a stream that no layer waits for.

    Source: the first cache manager makes a stream of its own unless it is given the executor's,
    which builds of 1.1 do not take.
    """
    manager = _class_in("tensorrt_llm._torch.pyexecutor.resource_manager", "KVCacheManager")
    return manager is not None and "execution_stream" not in inspect.signature(manager).parameters


def _refills_inputs(llm_args: Any) -> bool:
    """Whether a pass whose stream stalls before it may get page tables of the pass after it.

    Source: with the overlap scheduler the tables are copied from memory that is filled again once
    the pass before has ended. #15546 copies from a stage, #14128 waits.
    """
    manager = _class_in("tensorrt_llm._torch.pyexecutor.resource_manager", "KVCacheManager")
    engine = _class_in("tensorrt_llm._torch.pyexecutor.model_engine", "PyTorchModelEngine")
    mends = {"_stage_block_offsets_for_copy", "wait_for_input_copy"}
    is_mended = not mends.isdisjoint([*dir(manager), *dir(engine)])
    is_overlapped = field_of(llm_args, "disable_overlap_scheduler") is not True
    return manager is not None and is_overlapped and not is_mended


def _class_in(module: str, name: str) -> Any:
    """Return a class of TensorRT-LLM's; None if its module is not imported, or has none."""
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def _windows(llm_args: Any, cache: Any) -> tuple[int, ...]:
    """Return the attention windows that differ; none if all reach to the longest prompt's end."""
    windows = field_of(cache, "max_attention_window")
    if not isinstance(windows, Sequence):
        return ()
    longest = number_of(llm_args, "max_seq_len", 2**31)
    found = {min(window, longest) for window in windows}
    return () if found == {longest} else tuple(sorted(found))


def _is_sparse(llm_args: Any, checkpoint: CheckpointConfig) -> bool:
    sparse = field_of(llm_args, "sparse_attention_config")
    # `skip_softmax` changes the arithmetic and caches nothing.
    is_asked_for = sparse is not None and text_of(sparse, "algorithm") != "skip_softmax"
    return is_asked_for or checkpoint.has_index_cache


def _reuses_unwritten() -> bool:
    """Return whether this version reuses blocks of prompts that ended on their way.

    Source: `WindowBlockManager::releaseBlocks` of the first cache manager. Its mend is #12673, of
    April 2026; the first release candidate that has it for sure is taken.
    """
    return version_numbers() < [1, 3, 0, 14]


def _engine_version() -> str:
    tensorrt_llm = sys.modules.get("tensorrt_llm")
    version = getattr(tensorrt_llm, "__version__", None)
    if version is None:
        return "reference"
    return f"tensorrt_llm {release_of(str(version))}"
