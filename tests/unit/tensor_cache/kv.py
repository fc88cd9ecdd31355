"""KV tensors for tests: random bits, so that every NaN payload and both zeros occur."""

from dataclasses import replace
from typing import Any

import torch

from kvray.tensor_cache import TensorCache, TensorMetadata

BLOCK = 4
METADATA = TensorMetadata(
    model="tiny",
    dtype=torch.float32,
    num_layers=3,
    num_kv_heads=2,
    head_size=8,
    tokens_per_block=BLOCK,
)
VLLM = replace(METADATA, layout="vllm")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed(metadata: TensorMetadata, **changes: Any) -> TensorMetadata:
    return replace(metadata, **changes)


def random_blob(
    num_tokens: int, metadata: TensorMetadata = METADATA, *, seed: int = 0
) -> torch.Tensor:
    """Return [num_layers, 2, ...] in the layout of `metadata`, of random bits."""
    heads, size = metadata.num_kv_heads, metadata.head_size
    huggingface = metadata.layout == "huggingface"
    per_layer = (heads, num_tokens, size) if huggingface else (num_tokens, heads, size)
    generator = torch.Generator().manual_seed(seed)
    shape = (metadata.num_layers, 2, *per_layer[:-1], size * metadata.dtype.itemsize)
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return noise.view(metadata.dtype)


TOKENS = list(range(100, 100 + 6 * BLOCK))
BLOB = random_blob(len(TOKENS))


def pairs(blob: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    return tuple((layer[0], layer[1]) for layer in blob)


def cut(
    blob: torch.Tensor, start: int, stop: int, metadata: TensorMetadata = METADATA
) -> torch.Tensor:
    bits = blob.view(INTEGERS[blob.dtype.itemsize])
    cut = bits[:, :, :, start:stop] if metadata.layout == "huggingface" else bits[:, :, start:stop]
    return cut.contiguous().view(blob.dtype)


def as_blob(kv: Any) -> torch.Tensor:
    """Return what was retrieved as one tensor of integers, which compare by their bits."""
    if isinstance(kv, torch.Tensor):
        return kv.view(INTEGERS[kv.dtype.itemsize])
    return torch.stack([torch.stack([as_blob(one) for one in layer]) for layer in kv])


def assert_same(kv: Any, expected: torch.Tensor) -> None:
    """Fail unless `kv` has the shape and every bit of `expected`."""
    assert torch.equal(as_blob(kv), as_blob(expected))


def assert_finds(
    cache: TensorCache, tokens: list[int], blob: torch.Tensor, num_blocks: int
) -> None:
    """Fail unless exactly so many leading blocks of `blob` are retrieved."""
    kv, ret_mask = cache.retrieve(tokens)
    end = num_blocks * BLOCK
    assert ret_mask.tolist() == [True] * end + [False] * (len(tokens) - end)
    if end:
        assert_same(kv, cut(blob, 0, end, cache.metadata))
    else:
        assert kv == ()


def suffix_mask(num_tokens: int, num_masked: int) -> torch.Tensor:
    return torch.arange(num_tokens) >= num_masked
