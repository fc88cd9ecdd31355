"""A Llama model as a pure function of fixed shape: one block's tokens at their positions.

A step always runs `tokens_per_block` rows at the positions of block b, attending to the KV of
blocks 0..b-1 and causally to itself; rows without a token hold token 0, come last, and are hidden
by the mask. So the shapes of all arithmetic depend on b alone, never on caches, batches or
chunks, and the KV of a generated token equals bit for bit that of the same token in a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvray.errors import ConfigError
from kvray.reference.tokenizer import import_transformers, read

_ATTENTION = "kvray_block"

TINY_CONFIG = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of one token's KV in one layer, times the number of layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_size(self, tokens_per_block: int) -> int:
        """Return the elements of one block in one layer, of the keys or of the values alone."""
        return self.num_kv_heads * tokens_per_block * self.head_dim


@dataclass(slots=True)
class Step:
    """One block on its way through the layers; `hidden` is [1, tokens_per_block, hidden_size]."""

    block_index: int
    num_tokens: int
    hidden: torch.Tensor
    mask: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]


class BlockModel:
    """A Llama-family model of transformers, run layer by layer over blocks, in fp32 on the CPU.

    A split model (`tensor_split`) has this rank's heads only. Its steps sum over the ranks behind
    the attention and behind the MLP of every layer.
    """

    def __init__(self, causal_lm: Any, *, tokens_per_block: int) -> None:
        config = causal_lm.config
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.tokens_per_block = tokens_per_block
        self.vocab_size: int = config.vocab_size
        self.max_tokens: int = config.max_position_embeddings
        self.geometry = KVGeometry(
            num_layers=config.num_hidden_layers,
            num_kv_heads=causal_lm.model.layers[0].self_attn.k_proj.out_features // head_dim,
            head_dim=head_dim,
        )
        import_transformers().AttentionInterface.register(_ATTENTION, _attend)
        causal_lm.config._attn_implementation = _ATTENTION
        self._body = causal_lm.model
        self._head = causal_lm.lm_head
        _align(causal_lm)

    @torch.inference_mode()
    def begin(self, tokens: Sequence[int], block_index: int) -> Step:
        """Return the step of the given tokens of a block: at least one, at most the block's."""
        size = self.tokens_per_block
        first = block_index * size
        assert 0 < len(tokens) <= size, "a step has the tokens of one block"
        ids = torch.zeros(1, size, dtype=torch.long)
        ids[0, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.long)
        hidden = self._body.embed_tokens(ids)
        positions = torch.arange(first, first + size)[None]
        mask = torch.ones(size, first + size, dtype=torch.bool).tril_(diagonal=first)
        return Step(
            block_index=block_index,
            num_tokens=len(tokens),
            hidden=hidden,
            mask=mask[None, None],
            rotary=self._body.rotary_emb(hidden, position_ids=positions),
        )

    @torch.inference_mode()
    def layer(
        self, layer_index: int, step: Step, past: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one layer of a step, which moves on, and return the keys and values up to its end.

        Args:
            layer_index: the layer.
            step: what `begin` returned, after all layers before this one.
            past: keys and values of the blocks before, each contiguous and shaped
                [1, num_kv_heads, block_index * tokens_per_block, head_dim].

        Returns:
            Keys and values as in `past` with those of this block appended: the next block's
            past. Rows from `num_tokens` on belong to no token.
        """
        kv = _Past(*past)
        step.hidden = self._body.layers[layer_index](
            step.hidden,
            attention_mask=step.mask,
            position_embeddings=step.rotary,
            past_key_values=kv,
            use_cache=True,
        )
        return kv.keys, kv.values

    @torch.inference_mode()
    def logits(self, step: Step, row: int | None = None) -> torch.Tensor:
        """Return the logits after the token of one row, by default the last: [vocab_size]."""
        hidden = step.hidden[:, step.num_tokens - 1 if row is None else row].clone()
        logits: torch.Tensor = self._head(self._body.norm(hidden))[0]
        return logits


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend with grouped heads; transformers' own function copies the keys per query head."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


@dataclass(slots=True)
class _Past:
    """The cache that a layer of transformers appends to, for one step of this one layer."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = torch.cat((self.keys, keys), dim=2)
        self.values = torch.cat((self.values, values), dim=2)
        return self.keys, self.values


def load_causal_lm(path: Path) -> Any:
    """Return the Llama model of a .gguf file or of a checkpoint's directory, in fp32."""
    try:
        causal_lm = read("AutoModelForCausalLM", path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no checkpoint that transformers reads: {error}") from error
    if causal_lm.config.model_type != "llama":
        raise ConfigError(
            f"{path} holds a {causal_lm.config.model_type!r} model; the reference engine runs "
            "the Llama family only."
        )
    return causal_lm.eval()


def make_tiny_causal_lm(seed: int = 0) -> Any:
    """Return a Llama of two layers with random weights that depend on the seed alone."""
    transformers = import_transformers()
    causal_lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY_CONFIG)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(causal_lm.named_parameters()):
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return causal_lm


def save_causal_lm(causal_lm: Any, directory: Path) -> None:
    """Write a checkpoint in fp32, also of a model that was read from a .gguf file."""
    config = causal_lm.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = import_transformers().LlamaForCausalLM(config)
    plain.load_state_dict(causal_lm.state_dict())
    plain.save_pretrained(directory)


def _align(causal_lm: Any) -> None:
    """Move every weight to memory of torch's own alignment.

    A weight mapped from a file may lie anywhere, and a GEMM may round differently by alignment:
    two processes would then disagree in the last bit.
    """
    with torch.no_grad():
        for weight in causal_lm.parameters():
            weight.requires_grad_(False)
            weight.data = weight.data.clone(memory_format=torch.contiguous_format)
