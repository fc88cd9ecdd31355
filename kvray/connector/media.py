"""The images, videos and sounds of a request, as they enter the keys of its blocks.

The engine names an item by a digest of its pixels or samples, without their shape (1.2) and
without what the model's processor was told to make of them, and shows where its tokens stand.
"""

import hashlib
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from kvray.engine.engine_args import are_whole, to_text
from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.keys import MediaItem

MEDIA_FIELDS = (
    "multimodal_hashes", "multimodal_positions", "multimodal_lengths", "multimodal_uuids",
    "multimodal_item_runs", "multimodal_item_run_cu_offsets", "multimodal_run_positions",
    "multimodal_run_lengths", "multimodal_embedding", "py_multimodal_data",
    "mrope_rotary_cos_sin",
)  # fmt: skip
"""Fields of a request of which at least one is set if it has media."""
_NUMBERS = {name for name in MEDIA_FIELDS if name.startswith("multimodal_")} - {
    "multimodal_uuids",
    "multimodal_embedding",
}
_DATA = {"image", "video", "audio", "multimodal_embedding", "mrope_config"}
"""What is understood of `py_multimodal_data`: the content of media, which their digests stand for,
and how keys are turned.

Source: the input processors of `tensorrt_llm/_torch/models`. Those of Qwen's vision models make
`mrope_config` for every prompt, for one of text as well.
"""
_TURNED = {"mrope_position_ids", "mrope_position_deltas", "mrope_rotary_cos_sin"}


def media_items(fields: Mapping[str, Any], *, prompt_len: int) -> tuple[MediaItem, ...] | None:
    """Return the media items of a request; None if there are some without digest or position.

    `fields` are those of MEDIA_FIELDS that are set. An item that begins behind `prompt_len` would
    enter no key. ConfigError: a digest of unknown form.
    """
    hashes: Any = fields.get("multimodal_hashes")
    if not _is_understood(fields.get("py_multimodal_data")):
        return None
    if hashes is None:
        return () if _is_text_only(fields) else None
    numbers = [fields[name] for name in MEDIA_FIELDS if name in fields and name in _NUMBERS]
    if not are_whole(numbers):
        return None
    extents = _extents(fields, len(hashes))
    if extents is None or not all(_is_within(extent, prompt_len) for extent in extents):
        return None
    return tuple(
        MediaItem(
            position=extent[0],
            digest=frame(_packed(words), to_text(extent).encode(), _turned(fields, extent)),
        )
        for extent, words in zip(extents, hashes, strict=True)
    )


def _is_within(extent: tuple[Any, ...], prompt_len: int) -> bool:
    """Whether an item begins in the prompt and has a length, if that is told."""
    length = extent[1] if len(extent) > 1 else 1
    return 0 <= extent[0] < prompt_len and (not isinstance(length, int) or length > 0)


def _is_understood(data: Any) -> bool:
    """Whether `py_multimodal_data` has nothing but what is known here; it may not be there."""
    if data is None:
        return True
    if type(data) is not dict or not set(data) <= _DATA:
        return False
    config = data.get("mrope_config", {})
    return type(config) is dict and set(config) <= _TURNED


def _is_text_only(fields: Mapping[str, Any]) -> bool:
    """Whether fields without digests are of text: its keys are turned by their places in it."""
    named = [name for name in MEDIA_FIELDS if name in fields]
    if named != ["py_multimodal_data"]:
        return not named
    data = fields["py_multimodal_data"]
    if set(data) != {"mrope_config"}:
        return False
    positions = data["mrope_config"].get("mrope_position_ids")
    if not _is_readable(positions):
        return True  # it is not there, or on a device
    return bool((np.asarray(positions) == np.arange(np.shape(positions)[-1])).all())


def _extents(fields: Mapping[str, Any], num_items: int) -> list[tuple[Any, ...]] | None:
    """Return (position, length, runs of tokens) of each item, as far as told; None: no position.

    All of it is part of the item's digest. The tokens after a block tell how far an item reaches,
    but the keys and values in the block may depend on that already: an image's tokens may attend
    to all of the image. And items that are woven into one another differ in their runs only.
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

    Source: main has offsets into two flat lists; branches that feed it have a list of (position,
    length, offsets without an embedding) for each item.
    """
    offsets: Any = fields.get("multimodal_item_run_cu_offsets")
    if offsets is None:
        return fields.get("multimodal_item_runs")
    columns = [fields.get(f"multimodal_run_{name}", ()) for name in ("positions", "lengths")]
    if any(len(column) != offsets[-1] for column in columns):
        return []  # of another form than the items: such a request bypasses the cache
    flat = list(zip(*columns, strict=True))
    return [flat[start:end] for start, end in pairwise(offsets)]


def _turned(fields: Mapping[str, Any], extent: tuple[Any, ...]) -> bytes:
    """Return a digest of how far keys are turned at an item's tokens; empty if that is not told.

    It tells apart what has equal pixels in another shape, or equal frames at another rate.

    Source: `mrope_config` of Qwen's input processors, positions of shape [3, 1, prompt_len].
    """
    data = fields.get("py_multimodal_data")
    config = data.get("mrope_config") if isinstance(data, dict) else None
    positions: Any = config.get("mrope_position_ids") if isinstance(config, dict) else None
    if not _is_readable(positions) or len(extent) < 2 or not isinstance(extent[1], int):
        return b""
    turned = np.asarray(positions[..., extent[0] : extent[0] + extent[1]])
    return hashlib.sha256(turned.astype("<i8").tobytes()).digest()


def _is_readable(positions: Any) -> bool:
    return getattr(getattr(positions, "device", None), "type", None) == "cpu"


def _packed(numbers: list[int]) -> bytes:
    """Return a digest that came as words of 32 bits, with or without a sign."""
    if not numbers or not all(-(2**31) <= number < 2**32 for number in numbers):
        raise ConfigError("A media digest is not made of words of 32 bits; kvray knows none such.")
    return struct.pack(f"<{len(numbers)}I", *(number & 0xFFFFFFFF for number in numbers))
