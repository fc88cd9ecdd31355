"""What besides its tokens distinguishes a request: salt, LoRA adapter and media; or a bypass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    """
    if any(getattr(request, name, None) is not None for name in _PROMPT_EMBEDDINGS):
        return None
    media = _media(request)
    if media is None:
        return None
    lora = None
    if getattr(request, "lora_task_id", None) is not None:
        path = getattr(request, "py_lora_path", None)
        if not path:
            return None
        lora = bytes.fromhex(fingerprint_adapter(str(path)))
    salt = getattr(request, "cache_salt", None)
    if salt is None:
        salt = getattr(request, "cache_salt_id", None)
    return Identity(salt=salt, lora=lora, media=media)


def _media(request: Any) -> tuple[MediaItem, ...] | None:
    """Return the media items; None if there are some without digest or position."""
    if all(not _present(getattr(request, name, None)) for name in _MEDIA):
        return ()
    hashes: Any = getattr(request, "multimodal_hashes", None)
    positions: Any = getattr(request, "multimodal_positions", None)
    if not _present(hashes) or not _present(positions) or len(hashes) != len(positions):
        return None
    return tuple(
        MediaItem(position=int(at), digest=np.asarray(words, dtype="<i4").tobytes())
        for at, words in zip(positions, hashes, strict=True)
    )


def _present(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)
