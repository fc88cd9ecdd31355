"""Keys of blocks: sha256 chained over a prefix, equal in every process and on every machine.

The chain starts from a *seed*: the sha256 of four items, each behind its length as u64:

    "kvray.seed" | the namespace's digest | salt | adapter

The salt is `str:` and its UTF-8, `int:` and its hex digits, or nothing without a salt. The adapter
is `lora:` and the adapter's fingerprint, or nothing without one. A block's key is the sha256 of its
message:

    parent (32 bytes) | u32 tokens_per_block | its tokens, i32 each | u32 number of extras | extras

The parent is the key of the block before (the seed for the first). An extra is a media item that
begins in this block: u32 its offset in the block, u32 the length of its digest, the digest. Items
stand in order of offset, then digest. All numbers are little endian. Every part has a fixed length
or stands behind its length, so no two different contents give one message.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES, BlockKey, frame, tagged

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]
Packed = bytes | npt.NDArray[np.int32]
"""Tokens as i32 end to end, little-endian: a text of few tokens is bytes, which are faster."""

_PACKED_TOKENS = 10_240
"""Tokens packed by one call: the arguments of many more would not fit into the cache. Not 8192:
prompts of just above that are common, and a second part for the rest costs a fifth more."""

_FEW_TOKENS = 2048
"""Up to here numpy's calls cost more than they save, while the caches are cold."""

_NO_EXTRAS = bytes(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """An image, audio or video item of a prompt.

    Raises:
        ConfigError: the digest is empty: two different items would share keys.
    """

    position: int
    """Index of the first token that stands for the item."""
    digest: bytes
    """The engine's digest of the item's content."""

    def __post_init__(self) -> None:
        if not self.digest:
            raise ConfigError(
                f"The media item at token {self.position} has no digest; a request whose engine"
                " gives none must bypass the cache."
            )


def request_seed(
    namespace: bytes, *, salt: str | int | None = None, lora: bytes | None = None
) -> bytes:
    """Return the 32-byte seed of one request's chain.

    `namespace` is `Namespace.digest()`, `lora` the fingerprint of the request's LoRA adapter. As
    `salt`, text and number never give equal seeds; ConfigError: it is neither.
    """
    salted = b"" if salt is None else tagged(salt, what="The cache salt")
    adapter = b"" if lora is None else b"lora:" + lora
    return _seed(namespace, salted, adapter)


@lru_cache(maxsize=64)
def _seed(namespace: bytes, salted: bytes, adapter: bytes) -> bytes:
    """Return the seed, which each request needs three times, and most have the same."""
    return hashlib.sha256(frame(b"kvray.seed", namespace, salted, adapter)).digest()


def chain_keys(
    tokens: Tokens, *, tokens_per_block: int, seed: bytes, media: Sequence[MediaItem] = ()
) -> list[BlockKey]:
    """Return one key for each full block of `tokens`, in order, each chained to the one before.

    Args:
        tokens: token ids, shape [num_tokens], as a list or anything numpy can read; the tail that
            fills no block is left out.
        tokens_per_block: tokens in a block, the engine's value.
        seed: from `request_seed`; to go on with a chain, the last key of its head.
        media: items whose digests enter the chain at the block where each begins; positions count
            from the first of `tokens`, and an item that begins before it is already in `seed`.

    Raises:
        ConfigError: a number or seed that cannot be, or tokens that are not integers of 32 bits.

    Source: only full blocks are keyed, as in TensorRT-LLM's block reuse.
    """
    return chain_packed(pack(tokens), tokens_per_block=tokens_per_block, seed=seed, media=media)


def chain_packed(
    packed: Packed, *, tokens_per_block: int, seed: bytes, media: Sequence[MediaItem] = ()
) -> list[BlockKey]:
    """Return the keys of tokens that `pack` has packed; otherwise as `chain_keys`."""
    if tokens_per_block < 1:
        raise ConfigError(f"tokens_per_block must be at least 1, not {tokens_per_block}.")
    if len(seed) != KEY_BYTES:
        raise ConfigError(
            f"A seed has {KEY_BYTES} bytes, not {len(seed)}; use what request_seed returns."
        )
    messages = _messages(packed, tokens_per_block)
    if media:
        messages = _add_media(messages, _media_extras(media, tokens_per_block))
    sha256 = hashlib.sha256
    parent, keys = seed, []
    for (message,) in messages:
        parent = sha256(parent + message).digest()
        keys.append(parent)
    return keys  # type: ignore[return-value]


def pack(tokens: Tokens) -> Packed:
    """Return `tokens` packed; ConfigError: one is no integer of 32 bits."""
    if type(tokens) is list and len(tokens) <= _FEW_TOKENS:
        return _pack_few(tokens)
    return pack_tokens(tokens)


def pack_tokens(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Return `tokens` as int32, shape [num_tokens]; ConfigError: one is no integer of 32 bits."""
    try:
        if hasattr(tokens, "__array__"):
            return _pack_array(np.asarray(tokens))
        return _pack_sequence(tokens)
    except (TypeError, RuntimeError) as error:
        raise _no_tokens(error) from None


def _pack_few(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except (struct.error, TypeError, RuntimeError) as error:
        raise _no_tokens(error) from None


def _no_tokens(error: Exception) -> ConfigError:
    return ConfigError(
        f"Tokens must be a list of integers of 32 bits ({error}); give token ids, not text."
    )


def _pack_sequence(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    if len(tokens) <= _PACKED_TOKENS:
        return np.frombuffer(_pack_few(tokens), dtype="<i4")
    parts = range(0, len(tokens), _PACKED_TOKENS)
    return np.concatenate([_pack_sequence(tokens[at : at + _PACKED_TOKENS]) for at in parts])


def _pack_array(tokens: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ConfigError(
            f"Tokens must be a flat array of integers, not {tokens.dtype} of shape"
            f" {list(tokens.shape)}; give the token ids of one prompt."
        )
    if tokens.size and (tokens.min() < -(2**31) or tokens.max() >= 2**31):
        raise ConfigError("A token id does not fit into 32 bits; give the tokenizer's ids.")
    return tokens.astype("<i4", copy=False)


def _messages(packed: Packed, tokens_per_block: int) -> Iterable[tuple[bytes]]:
    """Return the message of each full block, without parent and extras."""
    if isinstance(packed, bytes):
        size = 4 * tokens_per_block
        start = struct.pack("<i", tokens_per_block)
        ends = range(size, len(packed) + 1, size)
        return [(start + packed[end - size : end] + _NO_EXTRAS,) for end in ends]
    framed = _frame_blocks(packed, tokens_per_block)
    # One after the other: a list of them would be memory to fault in for a long prompt.
    return struct.iter_unpack(f"{framed.shape[1] * framed.itemsize}s", framed.data)


def _frame_blocks(tokens: npt.NDArray[np.int32], tokens_per_block: int) -> npt.NDArray[np.int32]:
    """Return the message of each full block, without parent and extras, as a row."""
    num_blocks = len(tokens) // tokens_per_block
    framed = np.empty((num_blocks, tokens_per_block + 2), dtype="<i4")
    framed[:, 0] = tokens_per_block
    framed[:, 1:-1] = tokens[: num_blocks * tokens_per_block].reshape(num_blocks, tokens_per_block)
    framed[:, -1] = 0
    return framed


def _add_media(messages: Iterable[tuple[bytes]], extras: dict[int, bytes]) -> list[tuple[bytes]]:
    """Return `messages`, where extras replace the zero at the end."""
    return [
        (message[:-4] + extras[index],) if index in extras else (message,)
        for index, (message,) in enumerate(messages)
    ]


def _media_extras(media: Sequence[MediaItem], tokens_per_block: int) -> dict[int, bytes]:
    """Return block index -> the count and the extras that end its message."""
    blocks: dict[int, list[bytes]] = {}
    for item in sorted(media, key=lambda item: (item.position, item.digest)):
        index, offset = divmod(item.position, tokens_per_block)
        blocks.setdefault(index, []).append(
            struct.pack("<II", offset, len(item.digest)) + item.digest
        )
    return {
        index: struct.pack("<I", len(extras)) + b"".join(extras) for index, extras in blocks.items()
    }
