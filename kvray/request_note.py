"""What an engine's leader notes of one request for people who ask why it hit or missed.

Made on the engine's thread, so it is a plain tuple of what is at hand; packed by another thread.
"""

from typing import Any, NamedTuple

import msgpack

from kvray.arrival import ARRIVALS_MAX, Arrival, Arrivals
from kvray.block import KEY_BYTES, BlockKey
from kvray.errors import ConfigError
from kvray.opening import OPENING_BYTES

KEYS_MAX = 64
"""Keys of missing blocks in one note; of more it has some, evenly spaced."""
NOTES_MAX = 128
"""Notes in one report of an engine."""
_PACKED_MAX = 16 * 2**10
_REASON_MAX = 64


class RequestNote(NamedTuple):
    """One request, as it was answered last; counts are blocks unless they say otherwise."""

    request_id: int
    at: float
    """When, in seconds since the epoch: it is for people."""
    num_tokens: int
    tokens_per_block: int
    first: int
    """Leading blocks that the engine had itself."""
    end: int
    """Where the blocks end that were promised to it, or that it had."""
    wanted: int
    """Where those end that could have been promised: at least one token is always computed."""
    reason: str
    """Why the blocks from `end` to `wanted` were a miss; `none` if there are none."""
    arrivals: Arrivals = ()
    """How the blocks that were promised came to the node, as far as they were not there."""
    stage_s: float = 0.0
    """How long the shard was waited for."""
    lease_s: float = 0.0
    """How long the rest of the answer took."""
    opening: bytes = b""
    """Digest of how the prompt begins; empty if that has no full block."""
    step: int = 1
    """Blocks from one of `keys` to the next."""
    keys: tuple[BlockKey, ...] = ()
    """Of missing blocks, the first one first."""


def sampled(keys: list[BlockKey], end: int) -> tuple[int, tuple[BlockKey, ...]]:
    """Return (step, keys) for a note on a request that misses `keys` from `end` on."""
    step = max(1, -(-(len(keys) - end) // KEYS_MAX))
    return step, tuple(keys[end::step])


def pack(note: RequestNote) -> bytes:
    """Return a note as bytes."""
    packed: bytes = msgpack.packb((*note[:-1], b"".join(note.keys)))
    return packed


def unpack(packed: object) -> RequestNote:
    """Return the note that `pack` has packed.

    Raises:
        ConfigError: these bytes are none.
    """
    fields = _fields(packed)
    keys = fields["keys"]
    starts = range(0, len(keys), KEY_BYTES)
    return RequestNote(**fields)._replace(
        arrivals=tuple(Arrival(*one) for one in fields["arrivals"]),
        keys=tuple(BlockKey(keys[at : at + KEY_BYTES]) for at in starts),
    )


def request_of(packed: object) -> int:
    """Return which request a packed note is of.

    Raises:
        ConfigError: these bytes are none.
    """
    request_id: int = _fields(packed)["request_id"]
    return request_id


def _fields(packed: object) -> dict[str, Any]:
    """Return the fields of a packed note, with its keys end to end."""
    if not isinstance(packed, bytes) or len(packed) > _PACKED_MAX:
        raise ConfigError(f"A note on a request is at most {_PACKED_MAX} bytes.")
    try:
        values = msgpack.unpackb(packed)
        if _is_sound(*values):
            return dict(zip(RequestNote._fields, values, strict=True))
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException):
        pass
    raise ConfigError("These bytes are no note on a request.")


def _is_sound(*fields: Any) -> bool:
    """Return whether the fields of a note, which came over a wire, are of their types."""
    request_id, at, num_tokens, size, first, end, wanted, reason, *more = fields
    arrivals, stage_s, lease_s, opening, step, keys = more
    counts = (num_tokens, first, end, wanted)
    return (
        isinstance(request_id, int)
        and all(isinstance(count, int) and 0 <= count < 2**31 for count in counts)
        and all(isinstance(one, int | float) for one in (at, stage_s, lease_s))
        and all(isinstance(one, int) and one >= 1 for one in (size, step))
        and (isinstance(reason, str) and len(reason) <= _REASON_MAX)
        and (isinstance(opening, bytes) and len(opening) in (0, OPENING_BYTES))
        and (isinstance(keys, bytes) and len(keys) % KEY_BYTES == 0)
        and len(arrivals) <= ARRIVALS_MAX
        and all(map(_is_arrival, arrivals))
    )


def _is_arrival(one: Any) -> bool:
    stop, way, source = one
    return isinstance(stop, int) and isinstance(way, str) and isinstance(source, str)
