"""Conversion between KV tensors and the bytes of blocks.

A block is stored as [num_layers, 2, num_kv_heads, tokens_per_block, head_size], keys before values,
whatever the layout of the tensors; TensorRT-LLM's pools have this order too. Elements are moved as
integers of their size: no conversion, no NaN that changes its payload.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from kvray.errors import LayoutMismatch
from kvray.store.arena.payload import runs
from kvray.store.arena.tables import Array
from kvray.tensor_cache.metadata import TensorMetadata

KV: TypeAlias = Sequence[Sequence[torch.Tensor]] | torch.Tensor
"""A (keys, values) pair for each layer, or one tensor [num_layers, 2, ...]."""

Heads: TypeAlias = list[torch.Tensor]
"""Keys and values of layer 0, of layer 1 and so on: views of integers, each of shape [num_kv_heads,
num_tokens, head_size]."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def heads_of(kv: KV, metadata: TensorMetadata) -> Heads:
    """Return `kv` as views of heads; LayoutMismatch: it does not fit `metadata`."""
    try:
        pairs = [tuple(pair) for pair in kv]
    except TypeError:
        raise _no_kv(f"is a {type(kv).__name__} that holds no pairs of tensors") from None
    if len(pairs) != metadata.num_layers:
        raise _no_kv(f"has {len(pairs)} layers, not {metadata.num_layers}")
    heads = []
    for layer, pair in enumerate(pairs):
        if len(pair) != 2:
            raise LayoutMismatch(
                f"Layer {layer} of the KV holds {len(pair)} things; give a pair (keys, values)."
            )
        heads += [_heads(tensor, layer, metadata) for tensor in pair]
    counts = {one.shape[1] for one in heads}
    if len(counts) > 1:
        raise LayoutMismatch(
            f"The KV's tensors hold different numbers of tokens ({sorted(counts)}); all layers'"
            " keys and values must be of the same tokens."
        )
    return heads


def empty_blob(num_tokens: int, metadata: TensorMetadata) -> torch.Tensor:
    """Return an uninitialised CPU tensor [num_layers, 2, ...] in the layout of `metadata`."""
    shape = metadata.num_layers, 2, *_shape(num_tokens, metadata)
    return torch.empty(shape, dtype=metadata.dtype, device="cpu")


def num_tokens(blob: torch.Tensor, metadata: TensorMetadata) -> int:
    """Return how many tokens `blob` holds."""
    return blob.shape[2 + _token_dim(metadata)]


def pack(heads: Heads, blocks: Array, metadata: TensorMetadata) -> Array:
    """Return the bytes of some blocks of `heads`, u8 [num_blocks, block_bytes].

    `heads` may be on any device. `blocks` are ascending indexes from the first token on.
    """
    size = metadata.tokens_per_block
    block_bytes = np.empty((len(blocks), metadata.block_bytes), dtype=np.uint8)
    pool = _elements(block_bytes, metadata)
    for start, stop in runs(np.diff(blocks) != 1, len(blocks)):
        first = int(blocks[start]) * size
        for index, one in enumerate(heads):
            run = one[:, first : first + (stop - start) * size].unflatten(1, (stop - start, size))
            # By numpy: torch's threads wait for each other, long on a machine with other work.
            np.copyto(pool[start:stop, index], run.transpose(0, 1).cpu().numpy())
    return block_bytes


def unpack(block_bytes: Array, heads: Heads, first: int, metadata: TensorMetadata) -> None:
    """Write u8 [num_blocks, block_bytes] into `heads` on the CPU; the inverse of `pack`.

    `first` is the index of the first block, from the first token of `heads` on.
    """
    num_blocks, size = len(block_bytes), metadata.tokens_per_block
    if num_blocks == 0:
        return
    pool = _elements(block_bytes, metadata)
    for index, one in enumerate(heads):
        run = one[:, first * size : (first + num_blocks) * size]
        into = run.unflatten(1, (num_blocks, size)).numpy()
        np.copyto(into, pool[:, index].swapaxes(0, 1))


def _heads(tensor: torch.Tensor, layer: int, metadata: TensorMetadata) -> torch.Tensor:
    """Return one tensor of a layer as [num_kv_heads, num_tokens, head_size] integers."""
    if not isinstance(tensor, torch.Tensor):
        raise LayoutMismatch(
            f"Layer {layer} of the KV holds a {type(tensor).__name__}; give torch tensors."
        )
    if tensor.dtype != metadata.dtype:
        raise LayoutMismatch(
            f"Layer {layer} of the KV is of {tensor.dtype}, not {metadata.dtype}; make the cache"
            " with the tensors' dtype in its metadata: nothing is converted."
        )
    token_dim = _token_dim(metadata)
    fits = tensor.ndim == 3 and tensor.shape == _shape(tensor.shape[token_dim], metadata)
    if not fits or tensor.layout != torch.strided or tensor.is_meta:
        order = ", ".join(map(str, _shape("num_tokens", metadata)))
        batched = tensor.ndim == 4 and tensor.shape[0] == 1
        fix = "take the batch dimension off with tensor[0]" if batched else "see the metadata"
        raise LayoutMismatch(
            f"Layer {layer} of the KV is a tensor of shape {list(tensor.shape)}, where the layout"
            f" {metadata.layout!r} has dense ones of [{order}]; {fix}."
        )
    return tensor.detach().view(_BITS[metadata.dtype.itemsize]).movedim(token_dim, 1)


def _no_kv(problem: str) -> LayoutMismatch:
    return LayoutMismatch(
        f"The KV {problem}; give one (keys, values) pair for each layer, or one tensor"
        " [num_layers, 2, ...]."
    )


def _shape(num_tokens: Any, metadata: TensorMetadata) -> tuple[Any, ...]:
    """Return the shape of one layer's keys or values."""
    heads, size = metadata.num_kv_heads, metadata.head_size
    by_head = metadata.layout == "huggingface"
    return (heads, num_tokens, size) if by_head else (num_tokens, heads, size)


def _token_dim(metadata: TensorMetadata) -> int:
    return 1 if metadata.layout == "huggingface" else 0


def _elements(block_bytes: Array, metadata: TensorMetadata) -> Array:
    """Return blocks as integers [num_blocks, 2 * num_layers, heads, tokens, head_size]."""
    elements = block_bytes.view(f"i{metadata.dtype.itemsize}")
    size = metadata.num_kv_heads, metadata.tokens_per_block, metadata.head_size
    return elements.reshape(len(block_bytes), 2 * metadata.num_layers, *size)
