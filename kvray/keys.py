"""Keys of blocks: sha256 chained over a prefix, equal in every process and on every machine.

The chain starts from a *seed*. A seed covers the namespace and, per request, the LoRA adapter
and the cache salt. A block's message is

    parent (32 bytes) | u32 tokens_per_block | its tokens, i32 each | u32 number of extras | extras

all little endian, where an extra is a media item that begins in this block: u32 its offset in
the block, u32 the length of its digest, the digest. Every part has a fixed length or stands
behind its length, so no two different contents give one message.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.block import BlockKey, frame
from kvray.errors import ConfigError

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """An image, audio or video item of a prompt."""

    position: int
    """Index of the first token that stands for the item."""
    digest: bytes
    """The engine's digest of the item's content."""


def request_seed(
    namespace: bytes, *, salt: str | int | None = None, lora: bytes | None = None
) -> bytes:
    """Return the seed of one request's chain.

    Args:
        namespace: `Namespace.digest()`.
        salt: the request's cache salt; text and number never give equal seeds.
        lora: fingerprint of the request's LoRA adapter, None without one.

    Returns:
        32 bytes.
    """
    salted = b"" if salt is None else f"{type(salt).__name__}:{salt}".encode()
    adapted = b"" if lora is None else b"lora:" + lora
    return hashlib.sha256(frame(b"kvray.seed", namespace, salted, adapted)).digest()


def chain_keys(
    tokens: Tokens,
    *,
    tokens_per_block: int,
    seed: bytes,
    media: Sequence[MediaItem] = (),
) -> list[BlockKey]:
    """Return one key for each full block of `tokens`, each chained to the one before.

    Args:
        tokens: token ids, shape [num_tokens]; the tail that fills no block is left out.
        tokens_per_block: tokens in a block, the engine's value.
        seed: what `request_seed` returned; to go on with a chain, the last key of its head.
        media: items whose digests enter the chain at the block where each begins.

    Returns:
        num_tokens // tokens_per_block keys of 32 bytes, in prefix order.

    Raises:
        ConfigError: tokens_per_block < 1, or tokens that are not integers of 32 bits.

    Source: only full blocks are keyed, as in TensorRT-LLM's block reuse.
    """
    if tokens_per_block < 1:
        raise ConfigError(f"tokens_per_block must be at least 1, not {tokens_per_block}.")
    num_blocks = len(tokens) // tokens_per_block
    framed = _frame_blocks(tokens, num_blocks, tokens_per_block)
    step = (tokens_per_block + 2) * 4
    extras = _media_extras(media, tokens_per_block) if media else {}
    sha256 = hashlib.sha256
    parent, keys = seed, []
    if not extras:
        for start in range(0, num_blocks * step, step):
            parent = sha256(parent + framed[start : start + step]).digest()
            keys.append(parent)
        return keys  # type: ignore[return-value]
    for index in range(num_blocks):
        message = framed[index * step : (index + 1) * step]
        if index in extras:
            message = message[:-4] + extras[index]
        parent = sha256(parent + message).digest()
        keys.append(parent)
    return keys  # type: ignore[return-value]


def _frame_blocks(tokens: Tokens, num_blocks: int, tokens_per_block: int) -> bytes:
    """Return the messages of all full blocks, without parents and extras, end to end."""
    packed = pack_tokens(tokens)[: num_blocks * tokens_per_block]
    framed = np.empty((num_blocks, tokens_per_block + 2), dtype="<i4")
    framed[:, 0] = tokens_per_block
    framed[:, 1:-1] = packed.reshape(num_blocks, tokens_per_block)
    framed[:, -1] = 0
    return framed.tobytes()


def pack_tokens(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Return `tokens` as int32, shape [num_tokens].

    Raises:
        ConfigError: a token is not an integer or does not fit into 32 bits.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise ConfigError(
                f"Tokens must be a flat array of integers, not {tokens.dtype} of shape"
                f" {list(tokens.shape)}; give the token ids of one prompt."
            )
        if tokens.size and (tokens.min() < -(2**31) or tokens.max() >= 2**31):
            raise ConfigError("A token id does not fit into 32 bits; give the tokenizer's ids.")
        return tokens.astype(np.int32, copy=False)
    try:
        return np.frombuffer(struct.pack(f"<{len(tokens)}i", *tokens), dtype="<i4")
    except struct.error as error:
        raise ConfigError(
            f"Tokens must be integers of 32 bits ({error}); give token ids, not text."
        ) from None


def _media_extras(media: Sequence[MediaItem], tokens_per_block: int) -> dict[int, bytes]:
    """Return block index -> count and framed extras, items in order of position."""
    blocks: dict[int, list[bytes]] = {}
    for item in sorted(media, key=lambda item: (item.position, item.digest)):
        index, offset = divmod(item.position, tokens_per_block)
        blocks.setdefault(index, []).append(
            struct.pack("<II", offset, len(item.digest)) + item.digest
        )
    return {
        index: struct.pack("<I", len(extras)) + b"".join(extras) for index, extras in blocks.items()
    }
