"""Set-ups that a connector would serve wrongly, refused at the start with what to change.

TensorRT-LLM checks some of them from one version on and others never: 1.1 and 1.2 refuse pipeline
parallelism, the policy, several windows and drafts; later ones also context parallelism, beams, the
host cache and Mamba, but not all drafts. Each rank checks all of them, so that the start fails
cleanly on each.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from kvray.connector.base import hashes_blocks, version_numbers
from kvray.engine.cache_layout import CacheLayout
from kvray.engine.engine_args import CheckpointConfig, EngineArgs, field_of, number_of, text_of
from kvray.errors import ConfigError

Reasons = Iterator[tuple[bool, str]]
"""Pairs of whether something is so, and the sentence that refuses it."""

_SPECULATIVE = ("medusa_choices", "lookahead_decoding_config", "eagle_config")
_DRAFTS_WITHOUT_LAYERS = ("NGRAM", "AUTO")
"""Kinds of speculative decoding that keep no keys and values of their own; AUTO is n-grams, too.

Source: `auto_heuristic.py` and `should_use_separate_draft_kv_cache` of TensorRT-LLM.
"""


def refuse_unsupported(
    llm_args: Any, checkpoint: CheckpointConfig, *, asks_every_rank: bool
) -> None:
    """Raise ConfigError for settings that no connector, or not kvray, can serve.

    `asks_every_rank`: this TensorRT-LLM asks every rank's connector under attention DP.
    """
    cache = getattr(llm_args, "kv_cache_config", None)
    for reasons in (
        _parallelism(llm_args, asks_every_rank=asks_every_rank),
        _decoding(llm_args, cache),
        _speculation(llm_args, cache),
        _sleep(llm_args),
        _transfers(llm_args),
        _cache(llm_args, cache, checkpoint),
        _model(checkpoint),
    ):
        for is_so, sentence in reasons:
            if is_so:
                raise ConfigError(sentence)


def refuse_flat_pool(args: EngineArgs, shape: Sequence[int]) -> None:
    """Raise ConfigError for a pool that is not the whole cache, or has other blocks than `args`.

    `shape` is [num_blocks, num_layers, kv_factor, block_elems]. The first cache manager hands over
    the pool of one window and one number of heads, without a word if there are others; what is not
    in it would be neither saved nor loaded. FlashMLA, which is for latent vectors of 576 elements,
    makes blocks of 64 tokens whatever kv_cache_config says (`create_py_executor`, 1.2 and 1.3).
    """
    if len(shape) != 4 or shape[2] not in (1, 2):
        raise ConfigError(
            f"The KV pool has shape {list(shape)}; kvray serves pools [num_blocks, num_layers,"
            " 1 or 2, block_elems], so leave the attention backend at TRTLLM."
        )
    _, num_layers, kv_factor, block_elems = shape
    expected, latent = args.checkpoint.num_layers, args.checkpoint.latent_elems
    if args.checkpoint.is_mla is None:  # it cannot be read
        latent = 576
    if len(args.windows) > 1 or args.is_sparse:
        raise ConfigError(
            "One pool is not all of a KV cache with several windows or an index; set"
            " kv_cache_config.use_kv_cache_manager_v2 to true."
        )
    if args.windows and hashes_blocks():
        raise ConfigError(
            "With a connector and the first cache manager this version of TensorRT-LLM ends once an"
            " attention window has passed a block; unset kv_cache_config.max_attention_window."
        )
    if expected not in (None, num_layers):
        raise ConfigError(
            f"The KV pool has {num_layers} of the model's {expected} layers with attention,"
            " the others are in pools that no connector is given; set"
            " kv_cache_config.use_kv_cache_manager_v2 to true."
        )
    if kv_factor == 2 or not latent or block_elems % latent:
        return
    tokens = block_elems // latent
    if tokens != args.tokens_per_block:
        raise ConfigError(
            f"The engine's blocks hold {tokens} tokens, not the {args.tokens_per_block} that it was"
            f" told; set kv_cache_config.tokens_per_block to {tokens}."
        )


def refuse_layout(args: EngineArgs, layout: CacheLayout) -> None:
    """Raise ConfigError for layer groups with other blocks than `args`, or with unwritten pages.

    The second cache manager gives a prompt the pages of its first chunk before it asks what is
    promised. Those that a window has passed by the end of the promise are in no report, so nobody
    writes them. It may take them into its own prefix cache all the same.
    """
    if layout.tokens_per_block != args.tokens_per_block:
        raise ConfigError(
            f"The KV cache has {layout.tokens_per_block} tokens in a block, the engine's"
            f" arguments say {args.tokens_per_block}; set"
            " kv_cache_config.tokens_per_block to what the cache has."
        )
    has_windows = any(layers.window is not None for layers in layout.groups)
    if has_windows and args.block_reuse and args.reuses_passed:
        raise ConfigError(
            "Under the policy all_reusable the second cache manager reuses pages that an attention"
            " window has passed and nobody has written; set"
            " kv_cache_config.block_reuse_config.policy to per_request."
        )


def _parallelism(llm_args: Any, *, asks_every_rank: bool) -> Reasons:
    for name, what in (
        ("pipeline_parallel_size", "pipeline parallelism"),
        ("context_parallel_size", "context parallelism"),
        ("max_beam_width", "beam search"),
    ):
        is_several = number_of(llm_args, name, 1) > 1
        yield is_several, f"kvray does not serve engines with {what}; set {name} to 1."
    yield (
        field_of(llm_args, "enable_attention_dp") is True and not asks_every_rank,
        "This version of TensorRT-LLM asks the connector of rank 0 only, but with attention data"
        " parallelism every rank has requests; unset enable_attention_dp or upgrade TensorRT-LLM.",
    )
    # Up to 1.2 the connector's collectives are MPI's, which see one rank under Ray.
    is_ray = text_of(llm_args, "orchestrator_type") == "ray"
    yield (
        is_ray and number_of(llm_args, "tensor_parallel_size", 1) > 1,
        "Under Ray's orchestrator TensorRT-LLM's connector reaches one rank only; unset"
        " orchestrator_type or set tensor_parallel_size to 1.",
    )


def _decoding(llm_args: Any, cache: Any) -> Reasons:
    policy = text_of(field_of(llm_args, "scheduler_config"), "capacity_scheduler_policy")
    yield (
        policy not in ("", "GUARANTEED_NO_EVICT") and not _has_second_manager(cache),
        f"Under the policy {policy} the first cache manager takes blocks back that a connector"
        " reads; set scheduler_config.capacity_scheduler_policy to GUARANTEED_NO_EVICT.",
    )
    yield (
        text_of(llm_args, "attn_backend").upper() == "VANILLA",
        "The VANILLA attention backend makes blocks of max_num_tokens tokens, which are hardly"
        " ever shared; set attn_backend to TRTLLM.",
    )


def _speculation(llm_args: Any, cache: Any) -> Reasons:
    """Yield what is said of drafts; their layers' bytes depend on more than a block's tokens.

    From early 1.3 on those layers have a pool of their own, whose manager calls the connector as if
    it were the target's.
    """
    speculative = field_of(llm_args, "speculative_config")
    decoding = field_of(llm_args, "decoding_config")
    is_other = any(field_of(decoding, name) is not None for name in _SPECULATIVE)
    kind = text_of(speculative, "decoding_type").upper()
    yield (
        is_other or (speculative is not None and kind not in _DRAFTS_WITHOUT_LAYERS),
        "Of speculative decoding kvray serves drafts by n-grams only (decoding_type NGram or AUTO):"
        " draft layers keep bytes that no connector can share; unset speculative_config.",
    )
    yield (
        speculative is not None and _has_second_manager(cache),
        "The second cache manager tells no connector which blocks of rejected drafts it takes back;"
        " set kv_cache_config.use_kv_cache_manager_v2 to false, or unset speculative_config.",
    )


def _sleep(llm_args: Any) -> Reasons:
    """Yield what is said of engines that give their memory back while no request runs.

    Source: `release_with_tag`, which does not wait for saves.
    """
    yield (
        field_of(llm_args, "sleep_config") is not None,
        "An engine that sleeps gives its KV pool back while blocks are still saved from it; unset"
        " sleep_config.",
    )


def _transfers(llm_args: Any) -> Reasons:
    """Yield what is said of servers that hand blocks over, or are handed some.

    Nothing in the arguments says which kind a server is, but that those that send blocks have no
    overlap scheduler.
    """
    transfers = field_of(llm_args, "cache_transceiver_config")
    if field_of(transfers, "backend") is None:
        return
    yield (
        field_of(llm_args, "disable_overlap_scheduler") is not True,
        "Where cache_transceiver_config has a backend, a connector is for context servers, which"
        " set disable_overlap_scheduler to true; a generation server gets its blocks from them and"
        " is started without kv_connector_config.",
    )
    yield (
        field_of(transfers, "enable_pipelined_transfer") is True,
        "Blocks that are sent while their pass still runs may not be loaded yet; set"
        " cache_transceiver_config.enable_pipelined_transfer to false.",
    )
    # A block that is pinned for a transfer comes into the free queue twice: #12667. From
    # #11247 on blocks are pinned for partial reuse alone.
    cache, version = field_of(llm_args, "kv_cache_config"), version_numbers()
    is_kept = version < [1, 3, 0, 6] or field_of(cache, "enable_partial_reuse") is not False
    yield (
        [1, 2] <= version < [1, 3, 0, 11] and is_kept,
        "Before 1.3.0rc11 a context server may give one page to two requests; upgrade TensorRT-LLM,"
        " or from 1.3.0rc6 on set kv_cache_config.enable_partial_reuse to false.",
    )


def _cache(llm_args: Any, cache: Any, checkpoint: CheckpointConfig) -> Reasons:
    for name, what in (("host_cache_size", "host"), ("disk_cache_size", "disk")):
        yield (
            number_of(cache, name, 0) > 0,
            f"TensorRT-LLM's own {what} cache and a connector exclude each other; unset"
            f" kv_cache_config.{name}, kvray's tiers take its place.",
        )
    yield (
        _is_fp4(llm_args, cache, checkpoint),
        "An FP4 KV cache keeps its scales in a pool that no connector is given; set"
        " kv_cache_config.dtype to fp8.",
    )
    windows = field_of(cache, "max_attention_window")
    yield (
        isinstance(windows, list | tuple)
        and len(set(windows)) > 1
        and not _has_second_manager(cache),
        "The first cache manager hands a connector the layers of one attention window only; unset"
        " kv_cache_config.max_attention_window or set use_kv_cache_manager_v2 to true.",
    )
    yield (
        isinstance(windows, list | tuple) and min(windows, default=1) < 1,
        "An attention window below 1 stands for layers with a recurrent state, which is outside of"
        " the KV cache; serve this model without kv_connector_config.",
    )
    yield (
        field_of(cache, "enable_swa_scratch_reuse") is True,
        "With scratch pages the blocks outside of a window are not kept; set"
        " kv_cache_config.enable_swa_scratch_reuse to false.",
    )
    yield (
        field_of(llm_args, "kv_cache_compression_config") is not None,
        "A compressed KV cache lacks tokens that its blocks are named after; unset"
        " kv_cache_compression_config.",
    )
    sparse = field_of(llm_args, "sparse_attention_config")
    yield (
        field_of(sparse, "sparse_disable_index_value") is False,
        "The values of this sparse attention's index are outside of the KV cache; set"
        " sparse_attention_config.sparse_disable_index_value to true.",
    )


def _model(checkpoint: CheckpointConfig) -> Reasons:
    yield (
        bool(checkpoint.recurrent),
        "Layers with a recurrent state keep it outside of the KV cache (the checkpoint's"
        f" {checkpoint.recurrent}); serve this model without kv_connector_config.",
    )
    yield (
        checkpoint.is_encoder_decoder,
        "The keys and values of an encoder-decoder model depend on more than its tokens; serve"
        " this model without kv_connector_config.",
    )


def _has_second_manager(cache: Any) -> bool:
    """Whether the second cache manager may be in use: a switch from 1.3 on, later also `auto`."""
    return field_of(cache, "use_kv_cache_manager_v2") not in (None, False)


def _is_fp4(llm_args: Any, cache: Any, checkpoint: CheckpointConfig) -> bool:
    """Whether KV has 4 bits; kv_cache_config goes first, and may name `fp8` or `nvfp4`."""
    dtype = text_of(cache, "dtype").lower()
    if "fp4" in dtype or dtype == "fp8":
        return dtype != "fp8"
    algorithm = text_of(field_of(llm_args, "quant_config"), "kv_cache_quant_algo")
    return "FP4" in algorithm.upper() or checkpoint.has_fp4_cache
