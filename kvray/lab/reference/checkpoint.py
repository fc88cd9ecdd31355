"""From the name of a model to the model and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvray import config
from kvray.errors import ConfigError
from kvray.lab.reference.model import (
    BlockModel,
    load_causal_lm,
    make_tiny_causal_lm,
    save_causal_lm,
)
from kvray.lab.reference.ranks import Ranks
from kvray.lab.reference.tensor_split import split_causal_lm
from kvray.lab.reference.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, read
from kvray.lab.reference.weights import find_weights, make_once

SMOLLM2 = "smollm2"
TINY = "tiny"
SMOLLM2_DIRECTORY = "SmolLM2-135M-Instruct-fp32"


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
