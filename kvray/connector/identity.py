"""What besides its tokens distinguishes a request: salt, LoRA adapter and media; or a bypass.

Whatever enters the keys and values of a request beside its tokens either enters its keys or makes
it bypass the cache. Fields are those of TensorRT-LLM's `LlmRequest`: its bindings, and from 1.1 on
the Python attributes beside them (`py_...`); versions lack some of them.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvray.block import frame
from kvray.connector.fields import field_of, number_of, to_text
from kvray.errors import ConfigError
from kvray.keys import MediaItem

FingerprintAdapter = Callable[[int, str], bytes | None]
"""From an adapter's task number and path to what tells it from others, as `Adapters` does."""

_UNNAMED = (
    "prompt_embedding_table",
    "py_prompt_embedding_table",
    "prompt_vocab_size",
    "input_token_extra_ids",
    "position_ids",
    "token_type_ids",
    "language_adapter_uid",
    "py_encoder_output",
    "py_encoder_input_features",
)
"""Prompt tuning, positions other than 0, 1, 2, ..., encoders: nothing that has a name of its own.

The engine sets `position_ids` where one prompt is spread over ranks, and nowhere else.
"""
_ENCODER = ("encoder_tokens", "encoder_input_features", "cross_attention_mask")
"""Asked of the Python attributes alone: a binding may raise where a request has no encoder."""
_MEDIA = (
    "multimodal_hashes",
    "multimodal_positions",
    "multimodal_lengths",
    "multimodal_uuids",
    "multimodal_item_runs",
    "multimodal_item_run_cu_offsets",
    "multimodal_run_positions",
    "multimodal_run_lengths",
    "multimodal_embedding",
    "py_multimodal_data",
    "mrope_rotary_cos_sin",
)
_SALTS = ("cache_salt", "cache_salt_id")
_FIELDS = (*_UNNAMED, *_MEDIA, *_SALTS, "lora_task_id")
_TEXT_ONLY = {"mrope_config"}
"""What `py_multimodal_data` has of a prompt without media: positions that follow from its length.

Source: the input processors of Qwen's vision models, which make it for every prompt.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What enters the keys of a request beside its tokens."""

    salt: str | int | None
    lora: bytes | None
    media: tuple[MediaItem, ...]


_PLAIN = Identity(salt=None, lora=None, media=())


def identify(request: Any, fingerprint_adapter: FingerprintAdapter) -> Identity | None:
    """Return the identity of an engine's request.

    None: something enters its KV that cannot be told from here (an adapter without a path, or one
    whose files have changed; media without digests; prompt embeddings; an encoder's output): such
    a request bypasses the cache.

    Raises:
        ConfigError: a media digest of unknown form, or an adapter that cannot be read.
    """
    if _has_encoder(request):
        return None
    found = [name for name in _FIELDS if getattr(request, name, None) is not None]
    if not found:
        return _PLAIN  # most requests; the rest need not be as fast
    fields = {name: value for name in found if _is_set(value := field_of(request, name))}
    if any(name in fields for name in _UNNAMED):
        return None
    media = _media(request, fields)
    if media is None:
        return None
    lora = None
    if "lora_task_id" in fields:
        path = field_of(request, "py_lora_path")
        lora = fingerprint_adapter(int(fields["lora_task_id"]), str(path)) if path else None
        if lora is None:
            return None
    # The text says more than its number, which is a hash of it.
    salt = next((fields[name] for name in _SALTS if name in fields), None)
    return Identity(salt=salt, lora=lora, media=media)


def _has_encoder(request: Any) -> bool:
    own = getattr(request, "__dict__", None)
    if own and any(own.get(name) is not None for name in _ENCODER):
        return True
    encoder_output_len = getattr(request, "try_get_encoder_output_len", None)
    return encoder_output_len is not None and isinstance(encoder_output_len(), int)


def _is_set(value: Any) -> bool:
    """Return whether there is a value; some versions say that there is none by an empty list."""
    return value is not None and not (isinstance(value, (list, tuple, dict)) and not value)


def _media(request: Any, fields: Mapping[str, Any]) -> tuple[MediaItem, ...] | None:
    """Return the media items; None if there are some without digest or position."""
    hashes: Any = fields.get("multimodal_hashes")
    if hashes is None:
        return () if _is_text_only(fields) else None
    extents = _extents(fields, len(hashes))
    # An item that begins nowhere in the prompt would enter no key.
    num_tokens = number_of(request, "prompt_len", 2**31)
    if extents is None or not all(0 <= extent[0] < num_tokens for extent in extents):
        return None
    return tuple(
        MediaItem(
            position=int(extent[0]), digest=frame(_packed(words), to_text(extent).encode("ascii"))
        )
        for extent, words in zip(extents, hashes, strict=True)
    )


def _is_text_only(fields: Mapping[str, Any]) -> bool:
    named = [name for name in _MEDIA if name in fields]
    data = fields.get("py_multimodal_data")
    is_position_only = isinstance(data, dict) and set(data) <= _TEXT_ONLY
    return not named or (named == ["py_multimodal_data"] and is_position_only)


def _extents(fields: Mapping[str, Any], num_items: int) -> list[tuple[Any, ...]] | None:
    """Return where each item begins and what else is said of its tokens: length, runs of them.

    All of it is part of the item's digest. The tokens after a block tell how far an item reaches,
    but the keys and values in the block may depend on that already: an image's tokens may attend
    to all of the image. And items that are woven into one another differ in their runs only.

    Returns:
        (position, more...) of each item, position first; None if that cannot be told.
    """
    runs = _runs(fields)
    positions = fields.get("multimodal_positions")
    if positions is None and runs is not None:
        positions = [item[0][0] if item else -1 for item in runs]
    if positions is None:
        return None
    columns = [positions, fields.get("multimodal_lengths"), runs]
    given = [column for column in columns if column is not None]
    if any(len(column) != num_items for column in given):
        return None
    return list(zip(*given, strict=True))


def _runs(fields: Mapping[str, Any]) -> Any:
    """Return the runs of tokens of each item; None where the engine tells of none.

    Source: main has them as offsets into two flat lists, branches that feed it as a list of
    (position, length, offsets without an embedding) for each item.
    """
    offsets: Any = fields.get("multimodal_item_run_cu_offsets")
    if offsets is None:
        return fields.get("multimodal_item_runs")
    columns = [fields.get(f"multimodal_run_{name}", ()) for name in ("positions", "lengths")]
    if any(len(column) != offsets[-1] for column in columns):
        return []  # of another form than the items: such a request bypasses the cache
    flat = list(zip(*columns, strict=True))
    return [flat[start:end] for start, end in pairwise(offsets)]


def _packed(words: Any) -> bytes:
    """Return a digest that came as words of 32 bits, with or without a sign."""
    numbers = [int(word) for word in words]
    if not numbers or not all(-(2**31) <= number < 2**32 for number in numbers):
        raise ConfigError("A media digest is not made of words of 32 bits; kvray knows none such.")
    return struct.pack(f"<{len(numbers)}I", *(number & 0xFFFFFFFF for number in numbers))
