"""The note of an engine's leader on one request, for people who ask why it hit or missed; pure.

The engine's thread makes it, so it is a plain tuple; another thread packs it.
"""

from typing import Annotated, NamedTuple

import msgpack
from pydantic import Field, TypeAdapter

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES, BlockKey, split_keys
from kvray.trace.arrival import ARRIVALS_MAX, Arrivals

KEYS_MAX = 64
"""Keys of missing blocks in one note; of more it has a sample, evenly spaced."""
NOTES_MAX = 128  # notes in one report of an engine
_PACKED_MAX = 16 * 2**10
_REASON_MAX = 64
NAME_MAX = 256

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Positive = Annotated[int, Field(ge=1, lt=2**31)]
_Time = Annotated[float, Field(ge=0, lt=2**33, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=-1, lt=2**33, allow_inf_nan=False)]  # rounding may make it -0


class RequestNote(NamedTuple):
    """One request, with its last answer; counts are blocks unless they say otherwise."""

    request_id: int
    at: _Time
    """When, in seconds since the epoch: it is for people."""
    num_tokens: _Count
    tokens_per_block: _Positive
    first: _Count
    """Leading blocks that the engine had itself."""
    end: _Count
    """End of the blocks that were promised to it or that it had."""
    wanted: _Count
    """End of the blocks that could have been promised: at least one token is always computed."""
    reason: Annotated[str, Field(max_length=_REASON_MAX)]
    """Why the blocks from `end` to `wanted` were a miss; `none` if there are none."""
    arrivals: Annotated[Arrivals, Field(max_length=ARRIVALS_MAX)] = ()
    """How those of the promised blocks came to the node that were not there."""
    stage_s: _Seconds = 0.0
    """How long the request waited for the shard."""
    lease_s: _Seconds = 0.0
    """How long the rest of its answer took."""
    step: _Positive = 1
    """Blocks from one of `keys` to the next."""
    name: Annotated[str, Field(max_length=NAME_MAX)] = ""
    """What the engine's server calls it, which may have the client's `x-request-id` in it."""
    keys: tuple[BlockKey, ...] = ()
    """Keys of missing blocks, in prefix order."""


_NOTE = TypeAdapter(RequestNote)
"""Checks a note that came over a wire; the keys, which are packed end to end, are checked apart."""


def sampled(keys: list[BlockKey], end: int) -> tuple[int, tuple[BlockKey, ...]]:
    """Return (step, keys) for a note on a request that misses `keys` from `end` on."""
    step = max(1, -(-(len(keys) - end) // KEYS_MAX))
    return step, tuple(keys[end::step])


def pack(note: RequestNote) -> bytes:
    """Return a note as bytes."""
    packed: bytes = msgpack.packb((*note[:-1], b"".join(note.keys)))
    return packed


def unpack(packed: object) -> RequestNote:
    """Return the note that `pack` has packed; ConfigError if these bytes are none."""
    if not isinstance(packed, bytes) or len(packed) > _PACKED_MAX:
        raise ConfigError(f"A note on a request is at most {_PACKED_MAX} bytes.")
    try:
        *fields, keys = msgpack.unpackb(packed, use_list=False)
        note = _NOTE.validate_python((*fields, ()), strict=True)
        if isinstance(keys, bytes) and len(keys) % KEY_BYTES == 0:
            return note._replace(keys=tuple(split_keys(keys)))
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException):
        pass
    raise ConfigError("These bytes are no note on a request.")
