"""What besides its tokens distinguishes a request: salt, LoRA adapter and media; or a bypass."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvray.connector.engine_args import field_of
from kvray.errors import ConfigError
from kvray.keys import MediaItem

FingerprintAdapter = Callable[[str], str]

_PROMPT_EMBEDDINGS = ("prompt_embedding_table", "py_prompt_embedding_table", "prompt_vocab_size")
_MEDIA = ("multimodal_embedding", "py_multimodal_data", "multimodal_hashes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What enters the keys of a request beside its tokens."""

    salt: str | int | None
    lora: bytes | None
    media: tuple[MediaItem, ...]


def identify(request: Any, fingerprint_adapter: FingerprintAdapter) -> Identity | None:
    """Return the identity of an engine's request.

    None: something enters its KV that cannot be told from here (an adapter without a readable
    path, media without digests, prompt embeddings): such a request bypasses the cache.

    Raises:
        ConfigError: a media digest of unknown form, or an adapter that cannot be read.
    """
    if any(field_of(request, name) is not None for name in _PROMPT_EMBEDDINGS):
        return None
    media = _media(request)
    if media is None:
        return None
    lora = None
    if field_of(request, "lora_task_id") is not None:
        path = field_of(request, "py_lora_path")
        if not path:
            return None
        lora = bytes.fromhex(fingerprint_adapter(str(path)))
    salt = field_of(request, "cache_salt")
    if salt is None:
        salt = field_of(request, "cache_salt_id")
    return Identity(salt=salt, lora=lora, media=media)


def _media(request: Any) -> tuple[MediaItem, ...] | None:
    """Return the media items; None if there are some without digest or position."""
    if all(not _present(field_of(request, name)) for name in _MEDIA):
        return ()
    hashes: Any = field_of(request, "multimodal_hashes")
    positions: Any = field_of(request, "multimodal_positions")
    if not _present(hashes) or not _present(positions) or len(hashes) != len(positions):
        return None
    return tuple(
        MediaItem(position=int(at), digest=_packed(words))
        for at, words in zip(positions, hashes, strict=True)
    )


def _packed(words: Any) -> bytes:
    """Return a digest that came as words of 32 bits, with or without a sign."""
    numbers = [int(word) for word in words]
    if not all(-(2**31) <= number < 2**32 for number in numbers):
        raise ConfigError("A media digest has words of more than 32 bits; kvray knows none such.")
    return struct.pack(f"<{len(numbers)}I", *(number & 0xFFFFFFFF for number in numbers))


def _present(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)
