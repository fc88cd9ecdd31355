"""From the name of a model to its tokenizer and the model, or one rank's share of its weights.

A rank has its query heads, the KV heads that they attend to, and its MLP columns. Embeddings, norms
and the head stay whole, and every rank samples by itself, from equal bits.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvray import config as kvray_config
from kvray.errors import ConfigError
from kvray.reference.model import (
    LLAMA_3_8B_CONFIG,
    TINY_CONFIG,
    BlockModel,
    Config,
    Weights,
    make_random_weights,
)
from kvray.reference.ranks import Ranks
from kvray.reference.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    import_transformers,
    load_tokenizer,
    read,
)
from kvray.reference.weights import find_weights, make_once

SMOLLM2 = "smollm2"
TINY = "tiny"
RANDOM = {TINY: TINY_CONFIG, "llama-3-8b": LLAMA_3_8B_CONFIG}
"""Models whose weights are made in memory."""
SMOLLM2_DIRECTORY = "SmolLM2-135M-Instruct-fp32"


def split_weights(config: Config, weights: Weights, ranks: Ranks) -> Weights:
    """Return this rank's share of a whole model's weights; ConfigError if it does not divide.

    With more ranks than KV heads several ranks hold the same head, as in TensorRT-LLM.
    """
    rank, size = ranks.rank, ranks.size
    heads, columns = config["num_attention_heads"], config["intermediate_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % size or columns % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"{size} ranks cannot share {heads} attention heads, {kv_heads} KV heads and "
            f"{columns} MLP columns evenly; choose another tensor_parallel_size or another model."
        )
    num_kv_shares = min(kv_heads, size)

    def share(name: str, tensor: torch.Tensor) -> torch.Tensor:
        *_, linear, kind = name.split(".")
        if linear in {"k_proj", "v_proj"}:
            tensor = tensor.chunk(num_kv_shares)[rank * num_kv_shares // size]
        elif linear in {"q_proj", "gate_proj", "up_proj"}:
            tensor = tensor.chunk(size)[rank]
        elif linear in {"o_proj", "down_proj"} and kind == "weight":
            tensor = tensor.chunk(size, dim=1)[rank]
        return tensor

    return {name: _aligned(share(name, tensor)) for name, tensor in weights.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model ready to run; `name` is its path, or that of `RANDOM` and a seed, as in `tiny:7`."""

    name: str
    model: BlockModel
    tokenizer: Tokenizer


def load_checkpoint(
    model: str | Path, *, tokens_per_step: int, split_over: Ranks | None = None, device: str = "cpu"
) -> Checkpoint:
    """Load `smollm2`, a name of `RANDOM` with or without a seed, or the checkpoint at a path.

    With `split_over` the model has this rank's share of the weights only. A ConfigError says that
    there is no such model, or that the ranks cannot share it.
    """
    name, _, seed = str(model).partition(":")
    tokenizer: Tokenizer
    if name in RANDOM:
        if seed and not seed.isdecimal():
            raise ConfigError(f"The seed of {model!r} is no number; write {name}:7, for example.")
        config = RANDOM[name]
        weights = make_random_weights(int(seed or 0), config, device=device)
        name = f"{name}:{int(seed or 0)}"
        tokenizer = ByteTokenizer()
    else:
        path = find_smollm2() if name == SMOLLM2 else Path(model).expanduser()
        if not path.exists():
            raise ConfigError(
                f"There is no model at {path}; give {SMOLLM2!r}, {TINY!r}, or the path of a "
                "Llama-family checkpoint (a directory or a .gguf file)."
            )
        name = str(path.resolve())
        config, weights = _read_checkpoint(path)
        weights = {key: tensor.to(device) for key, tensor in weights.items()}
        tokenizer = load_tokenizer(path)
    if split_over is not None:
        weights = split_weights(config, weights, split_over)
    block_model = BlockModel(config, weights, tokens_per_step=tokens_per_step, ranks=split_over)
    return Checkpoint(name=name, model=block_model, tokenizer=tokenizer)


def find_smollm2() -> Path:
    """Return SmolLM2-135M-Instruct as a checkpoint's directory, made on first use.

    transformers takes some twenty seconds to read the .gguf file, which costs half a GiB of disk
    in the cache.
    """
    gguf = find_weights()
    directory = kvray_config.cache_dir() / SMOLLM2_DIRECTORY
    return make_once(directory, lambda target: _unpack(gguf, target))


def _unpack(gguf: Path, target: Path) -> None:
    causal_lm = _load_causal_lm(gguf)
    del causal_lm.config.quantization_config
    plain = import_transformers().LlamaForCausalLM(causal_lm.config)
    plain.load_state_dict(causal_lm.state_dict())
    plain.save_pretrained(target)
    read("AutoTokenizer", gguf).save_pretrained(target)


def _read_checkpoint(path: Path) -> tuple[Config, Weights]:
    """Return a Llama model's config and weights, in fp32."""
    try:
        if (found := _read_safetensors(path)) is None:
            # A .gguf file, or a directory with weights of an older format.
            causal_lm = _load_causal_lm(path)
            state = causal_lm.state_dict()
            found = causal_lm.config.to_dict(), {key: _aligned(one) for key, one in state.items()}
        config, weights = found
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no checkpoint of a model: {error}") from error
    if config.get("model_type") != "llama":
        raise ConfigError(
            f"{path} holds a {config.get('model_type')!r} model; the reference engine runs "
            "the Llama family only."
        )
    if config.get("quantization_config"):
        raise ConfigError(f"{path} is quantized; the reference engine reads plain weights only.")
    return config, weights


def _read_safetensors(path: Path) -> tuple[Config, Weights] | None:
    """Read a directory without transformers, which takes seconds to import; None: it must do it."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif single.is_file():
        names = [single.name]
    else:
        return None
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    weights: Weights = {}
    for name in names:
        try:
            tensors = load_file(path / name)
        except SafetensorError as error:
            raise ValueError(f"{name}: {error}") from error
        weights |= {key: _aligned(tensor) for key, tensor in tensors.items()}
    return config, weights


def _load_causal_lm(path: Path) -> Any:
    return read("AutoModelForCausalLM", path, dtype=torch.float32)


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32, in memory of torch's own alignment.

    A weight mapped from a file may lie anywhere, and a GEMM may round differently by alignment:
    two processes would then disagree in the last bit.
    """
    return weight.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
