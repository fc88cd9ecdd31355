"""Reads what the engine says of its KV cache: one tensor, or TensorRT-LLM's `KvCacheLayout`.

The first cache manager hands over one tensor, the second describes layer groups whose pages are
counted apart (`connectors/kv_cache_layout.py`), read by duck typing.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kvray.engine.cache_layout import CacheLayout, Group, LayerRange, Region
from kvray.errors import ConfigError

_DIMENSIONS = 4


def layout_of_tensor(
    tensor: torch.Tensor, *, may_be_latent: bool = True, is_head_major: bool = False
) -> CacheLayout:
    """Return the layout of one pool [num_blocks, num_layers, kv_factor, block_elems].

    A pool with one tensor a layer instead of keys and values is a latent cache, which is the same
    on all ranks, unless the model is known to have none. `is_head_major`: the attention backend
    keeps one head after the other, each with its tokens. ConfigError: it has no whole blocks.
    """
    if tensor.dim() != _DIMENSIONS or not tensor.is_contiguous() or not tensor.numel():
        raise ConfigError(
            f"The KV pool has shape {list(tensor.shape)}, contiguous: {tensor.is_contiguous()};"
            " kvray serves contiguous pools [num_blocks, num_layers, kv_factor, block_elems]."
        )
    num_layers, kv_factor = tensor.shape[1:3]
    pages = tensor.view(torch.uint8).reshape(tensor.shape[0], -1)
    layers = tuple(range(num_layers))
    steps = _even_steps(layers, pages.shape[1])
    num_planes = num_layers * kv_factor if is_head_major and kv_factor > 1 else 0
    regions = (Region(pages=pages, steps=steps, num_planes=num_planes),)
    is_latent = kv_factor == 1 and may_be_latent
    own, shared = ((), regions) if is_latent else (regions, ())
    group = Group(layers=layers, window=None, own=own, shared=shared)
    return CacheLayout(
        groups=(group,),
        dtype=_name(tensor.dtype),
        kv_factor=kv_factor,
        tokens_per_block=None,
        is_flat=True,
    )


def read_layout(
    described: Any, *, may_be_latent: bool = True, is_head_major: bool = False
) -> CacheLayout:
    """Return what TensorRT-LLM's `KvCacheLayout` describes.

    A group without any VALUE buffer is a latent cache, which is the same on all ranks, unless the
    model is known to have none. `is_head_major` as for `layout_of_tensor`. ConfigError: its groups
    are not counted from 0, or its regions are no whole pages.
    """
    groups = sorted(described.groups, key=lambda group: int(group.layer_group_id))
    if not groups or [int(group.layer_group_id) for group in groups] != list(range(len(groups))):
        raise ConfigError(
            f"The KV cache has layer groups {[int(g.layer_group_id) for g in groups]}; kvray"
            " serves groups that are counted from 0 without a gap."
        )
    return CacheLayout(
        groups=tuple(_read_group(group, may_be_latent, is_head_major) for group in groups),
        dtype=_name(getattr(described, "dtype", torch.uint8)),
        kv_factor=0,
        tokens_per_block=int(described.tokens_per_block),
        is_flat=False,
    )


def _read_group(group: Any, may_be_latent: bool, is_head_major: bool) -> Group:
    own = tuple(_read_region(region, is_head_major) for region in group.regions)
    replicated = getattr(group, "replicated_regions", ())
    shared = tuple(_read_region(region, is_head_major) for region in replicated)
    roles = {str(buffer.role).lower() for region in group.regions for buffer in region.buffers}
    if may_be_latent and roles == {"key"}:
        own, shared = (), own + shared
    if not own and not shared:
        raise ConfigError(
            f"Layer group {group.layer_group_id} of the KV cache has no bytes; kvray serves groups"
            " with at least one region."
        )
    window = group.window_size
    return Group(
        layers=tuple(int(layer) for layer in group.layer_ids),
        window=None if window is None else int(window),
        own=own,
        shared=shared,
    )


def _read_region(region: Any, is_head_major: bool) -> Region:
    base, size, stride = int(region.base), int(region.size), int(region.stride)
    num_pages = int(region.num_slots)
    if size < 1 or stride < size or num_pages < 1:
        raise ConfigError(
            f"A region of the KV cache has {num_pages} pages of {size} bytes, {stride} bytes apart;"
            " kvray serves pages that do not overlap."
        )
    return Region(
        pages=_pages(region, base, size, stride, num_pages),
        steps=_steps_of(region.buffers, size),
        num_planes=_num_planes(region.buffers, size) if is_head_major else 0,
    )


def _num_planes(buffers: Sequence[Any], size: int) -> int:
    """Return how many buffers of keys or values a page is made of; 0: there is something else.

    Source: `_storage/_config.py` of the second manager puts buffers of one size into one pool.
    """
    kinds = {(str(one.role).lower(), int(getattr(one, "expansion", 1))) for one in buffers}
    is_plain = bool(buffers) and kinds <= {("key", 1), ("value", 1)} and size % len(buffers) == 0
    return len(buffers) if is_plain else 0


def _pages(region: Any, base: int, size: int, stride: int, num_pages: int) -> torch.Tensor:
    """Return the region's own view of its pages, which is one on a device; without, of memory."""
    if torch.cuda.is_available():
        pages: torch.Tensor = region.as_tensor(torch.uint8)
        return pages
    length = stride * (num_pages - 1) + size
    memory = (ctypes.c_uint8 * length).from_address(base)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat.as_strided((num_pages, size), (stride, 1))


def _steps_of(buffers: Sequence[Any], size: int) -> tuple[LayerRange, ...]:
    """Return a step a layer if all layers lie alike in a page, else one for all of it."""
    in_layer: dict[int, list[tuple[str, int]]] = {}
    for buffer in buffers:
        role = str(buffer.role), int(getattr(buffer, "expansion", 1))
        in_layer.setdefault(int(buffer.layer_id), []).append(role)
    in_turn = [layer for layer, roles in in_layer.items() for _ in roles]
    first, *others = in_layer.values() or ([],)
    is_in_turn = [int(buffer.layer_id) for buffer in buffers] == in_turn
    if in_layer and is_in_turn and all(roles == first for roles in others):
        return _even_steps(tuple(in_layer), size)
    return (LayerRange(tuple(in_layer), 0, size),)


def _even_steps(layers: tuple[int, ...], size: int) -> tuple[LayerRange, ...]:
    share, rest = divmod(size, len(layers))
    if rest:
        return (LayerRange(layers, 0, size),)
    return tuple(
        LayerRange((layer,), place * share, (place + 1) * share)
        for place, layer in enumerate(layers)
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
