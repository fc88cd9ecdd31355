"""KV tensors for tests: random bits, so that every NaN payload and both zeros occur."""

from typing import Any

import torch

from kvray.tensor_cache import TensorMetadata

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_blob(num_tokens: int, metadata: TensorMetadata, *, seed: int = 0) -> torch.Tensor:
    """Return [num_layers, 2, ...] in the layout of `metadata`, of random bits."""
    heads, size = metadata.num_kv_heads, metadata.head_size
    huggingface = metadata.layout == "huggingface"
    per_layer = (heads, num_tokens, size) if huggingface else (num_tokens, heads, size)
    generator = torch.Generator().manual_seed(seed)
    shape = (metadata.num_layers, 2, *per_layer[:-1], size * metadata.dtype.itemsize)
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return noise.view(metadata.dtype)


def pairs(blob: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    return tuple((layer[0], layer[1]) for layer in blob)


def cut(blob: torch.Tensor, start: int, stop: int, metadata: TensorMetadata) -> torch.Tensor:
    """Return some of the tokens of `blob`."""
    bits = blob.view(INTEGERS[blob.dtype.itemsize])
    cut = bits[:, :, :, start:stop] if metadata.layout == "huggingface" else bits[:, :, start:stop]
    return cut.contiguous().view(blob.dtype)


def as_blob(kv: Any) -> torch.Tensor:
    """Return what was retrieved as one tensor of integers, which compare by their bits."""
    if isinstance(kv, torch.Tensor):
        return kv.view(INTEGERS[kv.dtype.itemsize])
    layers = [
        torch.stack([one.view(INTEGERS[one.dtype.itemsize]) for one in layer]) for layer in kv
    ]
    return torch.stack(layers)


def assert_same(kv: Any, expected: torch.Tensor) -> None:
    """Fail unless `kv` has the shape and every bit of `expected`."""
    assert torch.equal(as_blob(kv), as_blob(expected))


def suffix_mask(num_tokens: int, num_masked: int) -> torch.Tensor:
    return torch.arange(num_tokens) >= num_masked
