"""A decoder like Llama's with random weights over a paged KV cache, for prefills of real cost."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as nn

_ROPE_BASE = 500_000.0
_NORM_EPSILON = 1e-5
_WEIGHT_SCALE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The sizes of a model and of its pages."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tokens_per_block: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of a page: layers, keys and values, heads, tokens, elements, as in TensorRT-LLM."""
        return (self.num_layers, 2, self.num_kv_heads, self.tokens_per_block, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of a page."""
        return torch.Size(self.page_shape).numel() * self.dtype.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        kv, heads = self.num_kv_heads * self.head_dim, self.num_heads * self.head_dim
        layer = self.hidden * (2 * heads + 2 * kv + 3 * self.mlp)
        return (self.num_layers * layer + 2 * self.vocabulary * self.hidden) * self.dtype.itemsize


LLAMA_3_8B = Shapes(
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp=14336,
    vocabulary=128_256,
    tokens_per_block=32,
    dtype=torch.bfloat16,
)


class Model:
    """Random weights on a device, the same in every run; all norms' weights are 1."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.shapes = shapes
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            made = torch.empty(rows, columns, dtype=shapes.dtype, device=device)
            return made.normal_(std=_WEIGHT_SCALE, generator=generator)

        heads = shapes.num_heads * shapes.head_dim
        all_heads = heads + 2 * shapes.num_kv_heads * shapes.head_dim
        self._embedding = weight(shapes.vocabulary, shapes.hidden)
        self._head = weight(shapes.vocabulary, shapes.hidden)
        self._layers = [
            (
                weight(all_heads, shapes.hidden),
                weight(shapes.hidden, heads),
                weight(2 * shapes.mlp, shapes.hidden),
                weight(shapes.hidden, shapes.mlp),
            )
            for _ in range(shapes.num_layers)
        ]

    @torch.inference_mode()
    def prefill(
        self,
        tokens: torch.Tensor,
        start: int,
        pool: torch.Tensor,
        pages: torch.Tensor,
        before_layer: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor:
        """Compute a prompt from `start` on; the KV of earlier tokens is in the pool.

        Args:
            tokens: the whole prompt, i64 [num_tokens].
            start: first token to compute.
            pool: pages, [num_pages, *page_shape]; those of the computed tokens are written.
            pages: the prompt's pages in order, i64 [num_blocks].
            before_layer: called with each layer before that layer reads its pages.

        Returns:
            The logits after the last token, [vocabulary].
        """
        places = torch.arange(start, len(tokens), device=tokens.device)
        angles = self._angles(places)
        sees = torch.arange(len(tokens), device=tokens.device) <= places[:, None] if start else None
        where = pages[places // self.shapes.tokens_per_block], places % self.shapes.tokens_per_block
        hidden = self._embedding[tokens[start:]]
        for layer, (in_heads, out_heads, up, down) in enumerate(self._layers):
            before_layer(layer)
            query, key, value = self._split(_norm(hidden) @ in_heads.T, angles)
            cache = pool[:, layer]
            cache[where[0], 0, :, where[1]] = key
            cache[where[0], 1, :, where[1]] = value
            if start:  # all keys and values of the prompt, [num_tokens, heads, head_dim] each
                key, value = cache[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : len(tokens)]
            hidden = hidden + _attend(query, key, value, sees).flatten(1) @ out_heads.T
            gate, rest = (_norm(hidden) @ up.T).chunk(2, dim=-1)
            hidden = hidden + (nn.silu(gate) * rest) @ down.T
        return self._head @ _norm(hidden[-1])

    def _split(
        self, projected: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys, rotated, and values, [num_tokens, heads, head_dim] each."""
        shapes = self.shapes
        heads = [shapes.num_heads, shapes.num_kv_heads, shapes.num_kv_heads]
        query, key, value = projected.view(len(projected), -1, shapes.head_dim).split(heads, dim=1)
        return _rotate(query, angles), _rotate(key, angles), value

    def _angles(self, places: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines of the rotation of each token, [2, num_tokens, 1, half]."""
        half = self.shapes.head_dim // 2
        steps = torch.arange(half, device=places.device, dtype=torch.float32) / half
        turned = places[:, None] * _ROPE_BASE**-steps
        return torch.stack((turned.cos(), turned.sin())).to(self.shapes.dtype)[:, :, None]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees: torch.Tensor | None
) -> torch.Tensor:
    """Return attention, [num_queries, heads, head_dim], as `query` is; keys have [num_tokens, ...].

    `sees` says which tokens each query sees, [num_queries, num_tokens]; None: those up to its own.
    """
    attend, share = nn.scaled_dot_product_attention, query.shape[1] // key.shape[1]
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    if sees is None:
        attended = attend(query, key, value, is_causal=True, enable_gqa=True)
    else:
        # The queries of all heads that share a key, one after the other: it is read once.
        query = query.unflatten(1, (-1, share)).flatten(2, 3)
        attended = attend(query, key, value, attn_mask=sees.repeat(share, 1))
        attended = attended.unflatten(2, (share, -1)).flatten(1, 2)
    return attended[0].transpose(0, 1)


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return nn.rms_norm(hidden, hidden.shape[-1:], eps=_NORM_EPSILON)


def _rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
