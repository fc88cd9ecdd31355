"""From the name of a model to its tokenizer and the model, or one rank's share of its weights.

A rank has its query heads, the KV heads that they attend to, and its MLP columns. Embeddings, norms
and the head stay whole, and every rank samples by itself, from equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvray import config
from kvray.errors import ConfigError
from kvray.reference.model import (
    BlockModel,
    load_causal_lm,
    make_tiny_causal_lm,
    save_causal_lm,
)
from kvray.reference.ranks import Ranks
from kvray.reference.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, read
from kvray.reference.weights import find_weights, make_once

SMOLLM2 = "smollm2"
TINY = "tiny"
SMOLLM2_DIRECTORY = "SmolLM2-135M-Instruct-fp32"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model ready to run; `name` is its path, or `tiny:SEED` for weights made in memory."""

    name: str
    model: BlockModel
    tokenizer: Tokenizer


def load_checkpoint(
    model: str | Path,
    *,
    tokens_per_block: int,
    split_over: Ranks | None = None,
) -> Checkpoint:
    """Load `smollm2`, `tiny`, `tiny:SEED` or the checkpoint at a path.

    With `split_over` the model has this rank's share of the weights only. A ConfigError says that
    there is no such model, or that the ranks cannot share it.
    """
    name, _, seed = str(model).partition(":")
    if name == TINY:
        if seed and not seed.isdecimal():
            raise ConfigError(f"The seed of {model!r} is no number; write tiny:7, for example.")
        number = int(seed or 0)
        return Checkpoint(
            name=f"{TINY}:{number}",
            model=_block_model(make_tiny_causal_lm(number), tokens_per_block, split_over),
            tokenizer=ByteTokenizer(),
        )
    is_smollm2 = str(model) == SMOLLM2
    path = find_smollm2() if is_smollm2 else Path(model).expanduser()
    if not path.exists():
        raise ConfigError(
            f"There is no model at {path}; give {SMOLLM2!r}, {TINY!r}, or the path of a "
            "Llama-family checkpoint (a directory or a .gguf file)."
        )
    return Checkpoint(
        name=str(path.resolve()),
        model=_block_model(load_causal_lm(path), tokens_per_block, split_over),
        tokenizer=load_tokenizer(path),
    )


def _block_model(causal_lm: Any, tokens_per_block: int, split_over: Ranks | None) -> BlockModel:
    if split_over is not None:
        split_causal_lm(causal_lm, split_over)
    return BlockModel(causal_lm, tokens_per_block=tokens_per_block)


def find_smollm2() -> Path:
    """Return SmolLM2-135M-Instruct as a checkpoint's directory, made on first use.

    transformers takes some twenty seconds to read the .gguf file and two to read the directory,
    which costs half a GiB of disk in the cache.
    """
    gguf = find_weights()
    return make_once(config.cache_dir() / SMOLLM2_DIRECTORY, lambda target: _unpack(gguf, target))


def _unpack(gguf: Path, target: Path) -> None:
    save_causal_lm(load_causal_lm(gguf), target)
    read("AutoTokenizer", gguf).save_pretrained(target)
