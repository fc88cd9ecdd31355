"""Refuses a pool that is not the whole KV cache."""

from collections.abc import Sequence

from kvray.connector.model.engine_args import EngineArgs
from kvray.errors import ConfigError


def refuse_flat_pool(args: EngineArgs, shape: Sequence[int]) -> None:
    """Refuse a pool [num_blocks, num_layers, kv_factor, block_elems] that is not the whole cache.

    The first cache manager hands over the pool of one window and one number of heads, without a
    word if there are others; what is not in it would be neither saved nor loaded. FlashMLA makes
    blocks of 64 tokens whatever kv_cache_config says (1.2).

    Raises:
        ConfigError: the pool is not all of the KV cache, or its blocks are not of
            `args.tokens_per_block`.
    """
    if len(shape) != 4 or shape[2] not in (1, 2):
        raise ConfigError(
            f"The KV pool has shape {list(shape)}; kvray serves pools [num_blocks, num_layers,"
            " 1 or 2, block_elems], so leave the attention backend at TRTLLM."
        )
    _, num_layers, kv_factor, block_elems = shape
    if len(args.windows) > 1 or args.is_sparse:
        raise ConfigError(
            "One pool is not all of a KV cache with several windows or an index; set"
            " kv_cache_config.use_kv_cache_manager_v2 to true."
        )
    if args.num_layers not in (None, num_layers):
        raise ConfigError(
            f"The KV pool has {num_layers} of the model's {args.num_layers} layers with attention,"
            " the others are in pools that no connector is given; set"
            " kv_cache_config.use_kv_cache_manager_v2 to true."
        )
    if kv_factor == 2 or not args.latent_elems or block_elems % args.latent_elems:
        return
    tokens = block_elems // args.latent_elems
    if tokens != args.tokens_per_block:
        raise ConfigError(
            f"The engine's blocks hold {tokens} tokens, not the {args.tokens_per_block} that it was"
            f" told; set kv_cache_config.tokens_per_block to {tokens}."
        )
