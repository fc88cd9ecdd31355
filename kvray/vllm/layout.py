"""Reads what vLLM registers: a tensor a layer, cut into blocks as `KVCacheConfig` says.

Layer `i` of a `KVCacheTensor` has its bytes of block `b` at `offset + i * layer_stride + b *
block_stride` of the storage that its tensors share. Source: `vllm/v1/kv_cache_interface.py` of
vLLM 0.32.
"""

from collections.abc import Iterator
from typing import Any

import torch

from kvray.engine.cache_layout import CacheLayout, Group, LayerRange, Region
from kvray.errors import ConfigError


def read_layout(kv_caches: dict[str, torch.Tensor], config: Any) -> CacheLayout:
    """Return the layout of a rank's cache; the names of `kv_caches` are those of vLLM's layers.

    ConfigError: it is not one group of layers of which each has its bytes to itself, or a layer
    lies elsewhere than `config` says.
    """
    group = _only_group(config)
    numbers = {name: number for number, name in enumerate(group.layer_names)}
    regions = tuple(_regions(kv_caches, config, numbers))
    read = {layer for region in regions for step in region.steps for layer in step.layers}
    missing = [name for name, number in numbers.items() if number not in read]
    if missing:
        raise ConfigError(
            f"vLLM registered no cache for {len(missing)} layers, {missing[0]} the first; kvray"
            " serves models whose layers all have a KV cache of their own."
        )
    spec = group.kv_cache_spec
    is_latent = getattr(spec, "head_size_v", None) == 0
    own, shared = ((), regions) if is_latent else (regions, ())
    return CacheLayout(
        groups=(Group(layers=tuple(numbers.values()), window=None, own=own, shared=shared),),
        dtype=str(spec.dtype).removeprefix("torch."),
        kv_factor=1 if is_latent else 2,
        tokens_per_block=int(spec.block_size),
        is_flat=True,
    )


def _only_group(config: Any) -> Any:
    """Return the group of layers of a cache that has just one."""
    groups = config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"The KV cache has {len(groups)} groups of layers; kvray serves vLLM with one. Start it"
            " with --disable-hybrid-kv-cache-manager, or leave --kv-transfer-config out."
        )
    return groups[0]


def _regions(
    kv_caches: dict[str, torch.Tensor], config: Any, numbers: dict[str, int]
) -> Iterator[Region]:
    """Yield the bytes of each layer's blocks, layers of one block that touch as one region."""
    page_bytes = int(config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
    for placed in config.kv_cache_tensors:
        layers = [name for name in placed.layers if name in numbers]
        if len(layers) != len(placed.layers) or placed.host_resident:
            raise ConfigError(
                f"vLLM keeps other caches beside that of {placed.layers[0]}; kvray serves models"
                " with one KV cache."
            )
        if not 0 < page_bytes <= placed.block_stride:
            raise ConfigError(
                f"A block has {page_bytes} bytes a layer and {placed.block_stride} to the next one;"
                " kvray serves blocks that do not overlap."
            )
        storage = _storage(kv_caches, layers, placed)
        if placed.layer_stride == page_bytes:  # a block has its layers end to end
            yield _region(storage, config, placed, 0, [numbers[name] for name in layers])
            continue
        for index, name in enumerate(layers):
            yield _region(storage, config, placed, index, [numbers[name]])


def _region(
    storage: torch.Tensor, config: Any, placed: Any, index: int, layers: list[int]
) -> Region:
    page_bytes = int(config.kv_cache_groups[0].kv_cache_spec.page_size_bytes)
    start = placed.offset + index * placed.layer_stride
    pages = storage.as_strided(
        (config.num_blocks, page_bytes * len(layers)), (placed.block_stride, 1), start
    )
    steps = [
        LayerRange((layer,), place * page_bytes, (place + 1) * page_bytes)
        for place, layer in enumerate(layers)
    ]
    return Region(pages=pages, steps=tuple(steps))


def _storage(kv_caches: dict[str, torch.Tensor], layers: list[str], placed: Any) -> torch.Tensor:
    """Return the bytes that the tensors of `layers` share, once they are seen to lie as said."""
    missing = [name for name in layers if name not in kv_caches]
    if missing:
        raise ConfigError(f"vLLM registered no KV cache for {missing[0]}; kvray needs all of them.")
    first = kv_caches[layers[0]]
    storage = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    for index, name in enumerate(layers):
        tensor = kv_caches[name]
        said = storage.data_ptr() + placed.offset + index * placed.layer_stride
        if tensor.data_ptr() != said or storage.numel() < placed.size:
            raise ConfigError(
                f"The KV cache of {name} lies elsewhere than vLLM says; kvray serves vLLM 0.32 and"
                " what lays its cache out alike."
            )
    return storage
