"""The weights of one rank: its query heads, the KV heads that they attend to, its MLP columns.

Embeddings, norms and the head stay whole, and every rank samples by itself, from equal bits.
"""

from __future__ import annotations

from typing import Any

import torch

from kvray.errors import ConfigError
from kvray.lab.reference.ranks import Ranks


def split_causal_lm(causal_lm: Any, ranks: Ranks) -> None:
    """Keep this rank's share of every layer, and sum over the ranks where the shares meet.

    With more ranks than KV heads several ranks hold the same head, as in TensorRT-LLM.
    """
    config, rank, size = causal_lm.config, ranks.rank, ranks.size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    columns = config.intermediate_size
    if heads % size or columns % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"{size} ranks cannot share {heads} attention heads, {kv_heads} KV heads and "
            f"{columns} MLP columns evenly; choose another tensor_parallel_size or another model."
        )
    num_shares = min(kv_heads, size)
    for layer in causal_lm.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        _keep_rows(attention.q_proj, rank, size)
        _keep_rows(attention.k_proj, rank * num_shares // size, num_shares)
        _keep_rows(attention.v_proj, rank * num_shares // size, num_shares)
        attention.o_proj = _SummedLinear(attention.o_proj, ranks)
        _keep_rows(mlp.gate_proj, rank, size)
        _keep_rows(mlp.up_proj, rank, size)
        mlp.down_proj = _SummedLinear(mlp.down_proj, ranks)


class _SummedLinear(torch.nn.Module):
    """This rank's columns of a linear layer; the ranks' products are summed, then biased."""

    def __init__(self, linear: Any, ranks: Ranks) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            linear.weight.data.chunk(ranks.size, dim=1)[ranks.rank], requires_grad=False
        )
        self.bias = linear.bias
        self._ranks = ranks

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        total = self._ranks.sum(torch.nn.functional.linear(columns, self.weight))
        return total if self.bias is None else total + self.bias


def _keep_rows(linear: Any, index: int, num_shares: int) -> None:
    """Leave the outputs of one share of equal ones."""
    linear.weight.data = linear.weight.data.chunk(num_shares)[index]
    if linear.bias is not None:
        linear.bias.data = linear.bias.data.chunk(num_shares)[index]
    linear.out_features = linear.weight.shape[0]
