"""A prompt as a caller gives it: the keys of its full blocks, and where its mask begins.

A cache reports under a name that no other of this process has.
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvray.errors import ConfigError
from kvray.identity import keys
from kvray.identity.block import BlockKey

Tokens: TypeAlias = keys.Tokens | torch.Tensor
Mask: TypeAlias = torch.Tensor | npt.NDArray[Any] | list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPrompt:
    """A token list as blocks, and the suffix of them that a call is about."""

    num_tokens: int
    num_masked: int
    """Leading tokens that the mask leaves out."""
    first: int
    """Index of the first block of the suffix."""
    keys: list[BlockKey]
    """Keys of all full blocks, those that the mask leaves out too."""

    @property
    def num_blocks(self) -> int:
        """Full blocks of the suffix."""
        return max(0, len(self.keys) - self.first)


def read_prompt(
    tokens: Tokens, mask: Mask | None, *, tokens_per_block: int, seed: bytes | None
) -> MaskedPrompt:
    """Return the prompt of `tokens` and `mask`.

    `tokens` are ids, shape [num_tokens], on any device. `mask` has booleans, shape [num_tokens]:
    False for some leading tokens and True for all others; None: all True. `seed` is from
    `request_seed`; None: no prompt has keys now. ConfigError: tokens that are not integers, or a
    mask that selects no suffix or begins inside a block.

    Source: suffix masks that begin at a chunk, as in LMCache's LMCacheEngine.
    """
    on_host = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else tokens
    packed = keys.pack_tokens(on_host)
    num_masked = 0 if mask is None else _num_masked(mask, len(packed))
    first, inside = divmod(num_masked, tokens_per_block)
    if inside:
        raise ConfigError(
            f"The mask leaves out {num_masked} tokens, which ends inside a block; leave out a"
            f" multiple of tokens_per_block = {tokens_per_block}, for example"
            f" {first * tokens_per_block}."
        )
    if seed is None:
        return MaskedPrompt(num_tokens=len(packed), num_masked=num_masked, first=0, keys=[])
    return MaskedPrompt(
        num_tokens=len(packed),
        num_masked=num_masked,
        first=first,
        keys=keys.chain_keys(packed, tokens_per_block=tokens_per_block, seed=seed),
    )


def _num_masked(mask: Mask, num_tokens: int) -> int:
    on_host = mask.detach().cpu() if isinstance(mask, torch.Tensor) else mask
    flags = np.asarray(on_host)
    if flags.shape != (num_tokens,) or (flags.dtype != np.bool_ and num_tokens):
        raise ConfigError(
            f"A mask must have one boolean for each of the {num_tokens} tokens, not be"
            f" {flags.dtype} of shape {list(flags.shape)}."
        )
    num_masked = num_tokens - int(np.count_nonzero(flags))
    if flags[:num_masked].any():
        raise ConfigError(
            "A mask must be False for leading tokens and True for all others (a suffix); this one"
            " has a True before a False."
        )
    return num_masked


Place = tuple[Path, int]
"""Directory of the tier, and rank."""

_taken: set[tuple[Place, str]] = set()
_lock = threading.Lock()


def claim_name(place: Place, name: str) -> str:
    """Return `name`, with a number behind it if another cache here reports under it."""
    with _lock:
        unique, number = name, 1
        while (place, unique) in _taken:
            number += 1
            unique = f"{name}.{number}"
        _taken.add((place, unique))
        return unique


def release_name(place: Place, name: str) -> None:
    """Let another cache have the name."""
    with _lock:
        _taken.discard((place, name))
