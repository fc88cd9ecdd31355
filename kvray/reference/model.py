"""A Llama model as a pure function of fixed shape: one step's tokens at their positions.

A step always runs `tokens_per_step` rows, from position s times as many on, attending to the KV of
steps 0..s-1 and causally to itself; rows without a token hold token 0, come last, and are hidden
by the mask. So the shapes of all arithmetic depend on s alone, never on caches, batches or
chunks, and the KV of a generated token equals bit for bit that of the same token in a prompt.

The arithmetic is written out here, because importing transformers' own costs seconds a process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from kvray.reference.ranks import Ranks

Config: TypeAlias = Mapping[str, Any]
"""What a checkpoint's `config.json` says; a missing field has the default of transformers."""
Weights: TypeAlias = dict[str, torch.Tensor]
"""Tensors by their names in a checkpoint, on one device."""

CPU = torch.device("cpu")
TINY_CONFIG: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA_3_8B_CONFIG: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "dtype": "bfloat16",
    "initializer_range": 0.02,
}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of one token's KV in one layer, times the number of layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def block_size(self, tokens_per_block: int) -> int:
        """Return the elements of one block in one layer, of the keys or of the values alone."""
        return self.num_kv_heads * tokens_per_block * self.head_dim


@dataclass(slots=True)
class Step:
    """Some tokens on their way through the layers; `hidden` is [1, tokens_per_step, hidden_size].

    `mask` says which tokens each row sees, once for each head that shares a key.
    """

    index: int
    num_tokens: int
    hidden: torch.Tensor
    mask: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]


class BlockModel:
    """A model of the Llama family, run layer by layer over steps of one or more blocks.

    It computes where its weights are, and in their type. With `ranks` the weights are this rank's
    share (`split_weights`). Its steps sum over the ranks behind the attention and behind the MLP of
    every layer.
    """

    def __init__(
        self, config: Config, weights: Weights, *, tokens_per_step: int, ranks: Ranks | None = None
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.vocab_size: int = config["vocab_size"]
        self.max_tokens: int = config.get("max_position_embeddings", 2048)
        self.weights = weights
        self._ranks: Ranks = ranks or Ranks()
        self._head_dim = head_dim(config)
        self._eps: float = config.get("rms_norm_eps", 1e-6)
        self._activate: Any = getattr(functional, config.get("hidden_act", "silu"))
        self._rotary = _make_rotary(config)
        is_tied = config.get("tie_word_embeddings", False)
        self._head = "model.embed_tokens" if is_tied else "lm_head"
        keys, queries = (weights[f"model.layers.0.self_attn.{one}_proj.weight"] for one in "kq")
        self._share = len(queries) // len(keys)  # query heads of each KV head
        self.geometry = KVGeometry(
            num_layers=config["num_hidden_layers"],
            num_kv_heads=len(keys) // self._head_dim,
            head_dim=self._head_dim,
            dtype=keys.dtype,
            device=keys.device,
        )

    @torch.inference_mode()
    def begin(self, tokens: Sequence[int], index: int) -> Step:
        """Return a step with its first tokens: at least one, at most `tokens_per_step`."""
        size, device, dtype = self.tokens_per_step, self.geometry.device, self.geometry.dtype
        first = index * size
        assert 0 < len(tokens) <= size, "a step has the tokens of its own places"
        ids = torch.zeros(1, size, dtype=torch.long)
        ids[0, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.long)
        mask = torch.ones(size, first + size, dtype=torch.bool, device=device).tril_(diagonal=first)
        cosines, sines = self._rotary(torch.arange(first, first + size))
        return Step(
            index=index,
            num_tokens=len(tokens),
            hidden=functional.embedding(ids.to(device), self.weights["model.embed_tokens.weight"]),
            mask=mask.repeat(self._share, 1),
            rotary=(cosines.to(device, dtype), sines.to(device, dtype)),
        )

    @torch.inference_mode()
    def layer(
        self, layer_index: int, step: Step, past: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one layer of a step, which moves on, and return the keys and values up to its end.

        Args:
            layer_index: the layer.
            step: what `begin` returned, after all layers before this one.
            past: keys and values of the steps before, each contiguous and shaped
                [1, num_kv_heads, index * tokens_per_step, head_dim].

        Returns:
            Keys and values as in `past` with those of this step appended: the next step's
            past. Rows from `num_tokens` on belong to no token.
        """
        name = f"model.layers.{layer_index}"
        hidden = self._norm(step.hidden, f"{name}.input_layernorm")
        queries, keys, values = (
            self._linear(hidden, f"{name}.self_attn.{kind}_proj")
            .view(1, self.tokens_per_step, -1, self._head_dim)
            .transpose(1, 2)
            for kind in "qkv"
        )
        keys = torch.cat((past[0], _rotate(keys, step.rotary)), dim=2)
        values = torch.cat((past[1], values), dim=2)
        # The queries of all heads that share a key, one after the other: it is read once.
        queries = _rotate(queries, step.rotary).unflatten(1, (-1, self._share)).flatten(2, 3)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=step.mask
        )
        attended = attended.unflatten(2, (self._share, -1)).flatten(1, 2)
        heads = attended.transpose(1, 2).flatten(2)
        step.hidden = step.hidden + self._summed_linear(heads, f"{name}.self_attn.o_proj")
        hidden = self._norm(step.hidden, f"{name}.post_attention_layernorm")
        columns = self._activate(self._linear(hidden, f"{name}.mlp.gate_proj"))
        columns = columns * self._linear(hidden, f"{name}.mlp.up_proj")
        step.hidden = step.hidden + self._summed_linear(columns, f"{name}.mlp.down_proj")
        return keys, values

    @torch.inference_mode()
    def logits(self, step: Step, row: int | None = None) -> torch.Tensor:
        """Return the logits after the token of one row, by default the last: [vocab_size]."""
        hidden = step.hidden[:, step.num_tokens - 1 if row is None else row].clone()
        return self._linear(self._norm(hidden, "model.norm"), self._head)[0]

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return functional.rms_norm(hidden, weight.shape, weight, self._eps)

    def _linear(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        return functional.linear(inputs, self.weights[f"{name}.weight"], bias)

    def _summed_linear(self, columns: torch.Tensor, name: str) -> torch.Tensor:
        """Sum the ranks' products of their own columns, and only then add the bias."""
        total = self._ranks.sum(functional.linear(columns, self.weights[f"{name}.weight"]))
        bias = self.weights.get(f"{name}.bias")
        return total if bias is None else total + bias


def dtype_of(config: Config) -> torch.dtype:
    """Return the type that random weights have."""
    dtype: torch.dtype = getattr(torch, config.get("dtype", "float32"))
    return dtype


def head_dim(config: Config) -> int:
    """Return the elements of one attention head."""
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights, without biases."""
    width, dim = config["hidden_size"], head_dim(config)
    queries = config["num_attention_heads"] * dim
    keys, columns = config["num_key_value_heads"] * dim, config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.norm": (width,)}
    shapes |= dict.fromkeys(("model.embed_tokens", "lm_head"), (config["vocab_size"], width))
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (queries, width),
            "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (columns, width),
            "mlp.up_proj": (columns, width),
            "mlp.down_proj": (width, columns),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def make_random_weights(
    seed: int = 0, config: Config = TINY_CONFIG, *, device: str = "cpu"
) -> Weights:
    """Return random weights for a model, which depend on the seed and the kind of device alone."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = dtype_of(config)
    spread: float = config.get("initializer_range", 0.2)
    return {
        f"{name}.weight": torch.ones(shape, dtype=dtype, device=device)
        if "norm" in name
        else torch.randn(shape, dtype=dtype, device=device, generator=generator) * spread
        for name, shape in sorted(weight_shapes(config).items())
    }


def _rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn each head by its token's position, as checkpoints of transformers expect it."""
    cosines, sines = rotary
    low, high = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-high, low), dim=-1) * sines


def _make_rotary(config: Config) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return what maps positions [n] to cosines and sines, each [n, head_dim]."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return _scaled_rotary(config)
    theta: float = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    dim = head_dim(config)
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    return rotary


def _scaled_rotary(config: Config) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Leave to transformers how long contexts stretch the positions."""
    from transformers.models.llama import configuration_llama, modeling_llama

    scaled = modeling_llama.LlamaRotaryEmbedding(configuration_llama.LlamaConfig(**config))

    def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = scaled(torch.empty(0), position_ids=positions[None])
        return cosines[0], sines[0]

    return rotary
