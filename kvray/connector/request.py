"""What besides its tokens distinguishes a request: salt, LoRA adapter and media; or a bypass.

Whatever enters the keys and values of a request beside its tokens either enters its keys or makes
it bypass the cache. So does what is not understood: each field has a value that is known here to
have no influence, or one that enters the keys, or the request has no keys.

Fields are those of TensorRT-LLM's `LlmRequest`: its bindings, and from 1.1 on the Python attributes
beside them (`py_...`); versions lack some of them. The first cache manager asks with a copy, which
has the bindings' alone; `docs/tensorrt_llm.md` has a table of them.

The engine names an image, video or sound by a digest of its pixels or samples, without their shape
(1.2), and shows where its tokens stand. What the model's processor was told to make of them main
shows beside it, but in no copy.

`id_of` and `only_generates` say which request the engine speaks of, and raise nothing.
"""

import functools
import hashlib
import os
import struct
from collections.abc import Callable, Hashable, Mapping
from itertools import compress, pairwise, repeat
from operator import attrgetter
from typing import Any, cast

import numpy as np

from kvray.engine.engine_args import EngineArgs, are_whole, to_text
from kvray.engine.model_name import Adapters, fingerprints_dir
from kvray.engine.request import Identity, Prompt
from kvray.errors import ConfigError
from kvray.identity.block import frame
from kvray.identity.keys import MediaItem

FingerprintAdapter = Callable[[int, str], bytes | None]
"""From an adapter's task number and path to what tells it from others, as `Adapters` does."""

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
_BOTH_WAYS = "mm_bidirectional_blocks"
_TEXT_DATA = {"mrope_config", "multimodal_embed_mask_cumsum", _BOTH_WAYS}
_DATA = _TEXT_DATA | {
    "image", "video", "audio", "multimodal_embedding", "multimodal_embedding_lengths",
    "special_token_offsets", "layout_metadata", "multimodal_encoder_item_metadata",
    "mm_processor_kwargs_hash",
}  # fmt: skip
"""What is understood of `py_multimodal_data`: the content of media, which their digests stand for,
how keys are turned, what the model's processor was told, and what tokens and digests say as well.

Source: `inputs/registry.py` and the input processors of `tensorrt_llm/_torch/models`. Those of
Qwen's vision models make `mrope_config` for every prompt, for one of text as well.
"""
_TURNED = {"mrope_position_ids", "mrope_position_deltas", "mrope_rotary_cos_sin"}

_UNNAMED = (
    "prompt_embedding_table", "py_prompt_embedding_table", "prompt_vocab_size",
    "input_token_extra_ids", "position_ids", "token_type_ids", "language_adapter_uid",
    "py_encoder_output", "py_encoder_input_features", "encoder_tokens", "encoder_input_features",
    "cross_attention_mask",
)  # fmt: skip
"""Prompt tuning, positions other than 0, 1, 2, ..., encoders: nothing that has a name of its own.

The engine sets `position_ids` where one prompt is spread over ranks, and nowhere else.
"""
_SALTS = ("cache_salt", "cache_salt_id")
_LORA = ("lora_task_id", "py_lora_path", "lora_weights", "lora_config")
_TURNS = "mrope_position_deltas"
"""How far the keys of an answer are turned: by nothing, unless there are media, which decide it."""
_FIELDS = (*_UNNAMED, *MEDIA_FIELDS, *_SALTS, *_LORA, _TURNS)
_FAMILIES = ("multimodal_", "py_multimodal_", "mrope_", "py_mrope_")
"""Fields whose names begin so say what a request has beside text, also if they are new."""
_EMPTY: dict[str, type] = {
    **dict.fromkeys(("input_token_extra_ids", "position_ids", "encoder_tokens"), list),
    **dict.fromkeys((name for name in MEDIA_FIELDS if name.startswith("multimodal_")), list),
    "py_multimodal_data": dict,
}
"""Fields that some versions leave empty where there is nothing, and what is empty then."""

_UNREADABLE = "its tokens, or how many of them are its prompt, cannot be read"
_UNSHOWN = "it may have media, which the first cache manager does not show"

_ITEMS = ("multimodal_hashes", "multimodal_positions", "multimodal_lengths")
_RUNS = (
    "multimodal_item_run_cu_offsets", "multimodal_run_positions", "multimodal_run_lengths",
)  # fmt: skip
_ENCODER = ("encoder_tokens", "try_get_encoder_output_len")
_TOGETHER = (_ITEMS, _RUNS, _ENCODER)
"""Fields that a version has all of, or none."""
_REGULAR = (
    *_ITEMS, *_RUNS, *_ENCODER, *_LORA, "multimodal_embedding", "mrope_rotary_cos_sin", _TURNS,
    "prompt_embedding_table", "prompt_vocab_size", "position_ids", "prompt_len",
    "py_multimodal_data", "is_generation_only_request",
)  # fmt: skip
"""What every request of a version has, or none: bound, or set whenever Python makes a request."""


_PLAIN = Identity()


def identify(
    request: Any, fingerprint_adapter: FingerprintAdapter, *, with_told: bool = True
) -> Identity | None:
    """Return the identity of an engine's request; whatever reading a field raises, this raises.

    `with_told`: what the model's processor was told is part of it, where the request shows that.
    None: something enters its KV that cannot be told from here, so it bypasses the cache.
    ConfigError: a media digest of unknown form, or an adapter that cannot be read.
    """
    if not _is_understood(request):
        return None
    values = [(name, getattr(request, name, None)) for name in _FIELDS]
    fields = {name: value for name, value in values if value is not None}
    if not fields:
        return _PLAIN  # as mostly
    for name in [one for one, value in fields.items() if type(value) is _EMPTY.get(one)]:
        if not fields[name]:
            del fields[name]
    if any(name in fields for name in _UNNAMED):
        return None
    turns = fields.pop(_TURNS, 0)
    if not fields.get("multimodal_hashes") and not (type(turns) is int and turns == 0):
        return None
    media = media_items(fields, prompt_len=prompt_len_of(request), with_told=with_told)
    lora = _lora(fields, fingerprint_adapter)
    if media is None or lora is None:
        return None
    # The text says more than its number, which is a hash of it.
    salt = next((fields[name] for name in _SALTS if name in fields), None)
    if not isinstance(fields.get("cache_salt", ""), str):
        return None
    if type(fields.get("cache_salt_id", 0)) is not int:
        return None
    return Identity(salt=salt, lora=lora or None, media=media)


def prompt_len_of(request: Any) -> int:
    """Return how many tokens the engine counts as the prompt; without end if it has no such field.

    TypeError: it says what is no length of a prompt.
    """
    said: Any = getattr(request, "prompt_len", 2**31)
    if type(said) is not int or said < 1:
        raise TypeError(f"a prompt of {said!r} tokens")
    return said


def _untold(request: Any) -> str:
    """Return why `identify` has no identity for a request."""
    values = [(name, getattr(request, name, None)) for name in _FIELDS if name not in _SALTS]
    names = [name for name, value in values if value is not None]
    if "lora_task_id" in names:
        if "py_lora_path" in names:
            return "its LoRA adapter has not been read yet, or has changed since it was"
        return "it has a LoRA adapter, whose path the first cache manager does not show"
    return f"no key covers all that it has beside its tokens ({', '.join(names) or 'new fields'})"


def _lora(fields: dict[str, Any], fingerprint_adapter: FingerprintAdapter) -> bytes | None:
    """Return what tells a request's adapter from others; empty: it has none; None: untold."""
    if not any(name in fields for name in _LORA):
        return b""
    task_id, path = fields.get("lora_task_id"), fields.get("py_lora_path")
    if (
        type(task_id) is not int
        or task_id < 0
        or not isinstance(path, str | os.PathLike)
        or not str(path)
    ):
        return None
    return fingerprint_adapter(task_id, str(path))


def _is_understood(request: Any) -> bool:
    """Whether a request computes its prompt, without an encoder, of what is known here.

    The engine asks about no others that compute nothing. What no version had so far may say what
    is beside text.
    """
    said: Any = getattr(request, "is_generation_only_request", False)
    said = said() if callable(said) else said
    if not (said is None or said is False):
        return False
    # `encoder_output_len` itself raises for requests without an encoder.
    has_encoder = hasattr(request, "try_get_encoder_output_len")
    if has_encoder and request.try_get_encoder_output_len() is not None:
        return False
    try:
        own = vars(request)
    except TypeError:  # it has its class's fields only
        own = {}
    names = _strangers(cast(Hashable, type(request)), tuple(own))
    return not names or all(attrgetter(name)(request) is None for name in names)


@functools.lru_cache(256)
def _strangers(kind: Hashable, own: tuple[str, ...]) -> frozenset[str]:
    """Return the fields of that kind, of a class and of an object, that say what is not known."""
    names = (*dir(kind), *own)
    return frozenset(one for one in names if one.startswith(_FAMILIES) and one not in _FIELDS)


NO_REQUEST = -1


def id_of(request: Any) -> int:
    """Return the engine's number of a request, NO_REQUEST if it says none; raises nothing."""
    try:
        request_id = request.request_id
    except Exception:  # noqa: BLE001 - a foreign object may raise whatever it likes
        return NO_REQUEST
    is_one = type(request_id) is int and 0 <= request_id < 2**64
    return request_id if is_one else NO_REQUEST


def only_generates(request: Any) -> bool:
    """Whether a request gets its prompt's blocks from elsewhere; no connector is asked about it.

    Source: a property of C++'s requests, a method of Python's.
    """
    said = getattr(request, "is_generation_only_request", False)
    return bool(said() if callable(said) else said)


class RequestReader:
    """Reads the requests of one engine; used by its executor thread.

    All requests of an engine have the same fields. A field that others have and one lacks was
    renamed, or lost on the way here. What it would have said of the request cannot be told then.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.adapters = Adapters(settings=args.adapters, cache_dir=fingerprints_dir())
        self.hides_media = False
        """Whether the engine was seen to ask about a request without showing its media."""
        self._media_tokens = args.checkpoint.media_tokens
        self._seen: set[str] = set()  # fields that requests had
        self._regular: list[bool] = []
        """Which of `_REGULAR` and `_SALTS` the last request had that lacked nothing."""

    def read(self, request: Any, num_computed: Any) -> Prompt | str:
        """Return what the engine asks about, or why that has no keys.

        `request` may lack what Python knows of it. ConfigError: as `identify`.
        """
        try:
            tokens, prompt_len = request.get_tokens(0), prompt_len_of(request)
            if type(tokens) is not list or not tokens:
                return _UNREADABLE
            if prompt_len > len(tokens) and hasattr(request, "prompt_len"):
                return _UNREADABLE
            end = min(len(tokens), prompt_len)
            if type(num_computed) is not int or not 0 <= num_computed <= end:
                return _UNREADABLE
            if self.is_lacking(request):
                return "it lacks fields that others have, or that belong together"
            identity = self.identify(request)
            if identity is None:
                return _untold(request)
            # Only Python attributes tell of some media, and a copy of the request lacks those.
            if not identity.media and not hasattr(request, "py_multimodal_data"):
                media_tokens = self._media_tokens
                if self.hides_media or (media_tokens and media_tokens.may_be_in(tokens)):
                    return _UNSHOWN
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign object may raise what it likes
            return f"a field of it cannot be read ({type(error).__name__})"
        return Prompt(
            request_id=request.request_id,
            tokens=tokens,
            prompt_len=end,
            num_computed=num_computed,
            identity=identity,
        )

    def identify(self, request: Any, *, with_told: bool = True) -> Identity | None:
        """Return what the request shows of what enters its keys; raises as `identify`."""
        return identify(request, self.adapters.fingerprint, with_told=with_told)

    def is_lacking(self, request: Any) -> bool:
        """Whether a request lacks fields that others have, or that never come one by one."""
        fields = [*map(hasattr, repeat(request), (*_REGULAR, *_SALTS))]
        if fields == self._regular:
            return False
        has = set(compress(_REGULAR, fields))
        if any(fields[len(_REGULAR) :]):
            has.add("a salt")  # as text or as a number of it
        self._seen |= has
        is_torn = any(0 < len(has.intersection(names)) < len(names) for names in _TOGETHER)
        is_lacking = self._seen != has or is_torn
        self._regular = [] if is_lacking else fields
        return is_lacking


def media_items(
    fields: Mapping[str, Any], *, prompt_len: int, with_told: bool = True
) -> tuple[MediaItem, ...] | None:
    """Return the media items of a request; None if there are some without digest or position.

    `fields` are those of MEDIA_FIELDS that are set. An item that begins behind `prompt_len` would
    enter no key. Items read in both directions have none: no promise may end within one.
    `with_told` as for `identify`. ConfigError: a digest of unknown form.
    """
    hashes: Any = fields.get("multimodal_hashes")
    data = fields.get("py_multimodal_data")
    if not _is_known(data):
        return None
    if hashes is None:
        return () if _is_text_only(fields) else None
    numbers = [fields[name] for name in MEDIA_FIELDS if name in fields and name in _NUMBERS]
    told = data.get("mm_processor_kwargs_hash", "") if data and with_told else ""
    if not are_whole(numbers) or type(told) is not str or (data or {}).get(_BOTH_WAYS):
        return None
    extents = _extents(fields, len(hashes))
    if extents is None or not all(_is_within(extent, prompt_len) for extent in extents):
        return None
    return tuple(
        MediaItem(
            position=extent[0],
            digest=frame(
                _packed(words), to_text(extent).encode(), _turned(fields, extent), told.encode()
            ),
        )
        for extent, words in zip(extents, hashes, strict=True)
    )


def _is_within(extent: tuple[Any, ...], prompt_len: int) -> bool:
    """Whether an item begins in the prompt and has a length, if that is told."""
    length = extent[1] if len(extent) > 1 else 1
    return 0 <= extent[0] < prompt_len and (not isinstance(length, int) or length > 0)


def _is_known(data: Any) -> bool:
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
    if not set(data) <= _TEXT_DATA:
        return False
    positions = data.get("mrope_config", {}).get("mrope_position_ids")
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
