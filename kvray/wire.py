"""Frames on a node's unix socket: a u32 length, then one msgpack map; bounded both ways.

A request has `op` and its fields; a reply has `ok`, and then fields, or `error` (the name of a
class of `kvray.errors`) and `message`.
"""

import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from kvray import errors

SOCKET_FILE = "socket"
"""Name of the socket, beside the arena."""
MOVER_SOCKET_FILE = "mover"
"""Name of the socket of the node's mover, which the shard alone may use; it has other frames."""

FRAME_MAX = 4 * 2**20
"""Longest frame either side accepts, bytes."""

_ITEMS_MAX = 16_384
"""Values of one list or map, and lists and maps of one frame: a frame of nothing else would hold up
whoever decodes it for a second."""

LENGTH = struct.Struct("<I")


def encode(message: Mapping[str, Any]) -> bytes:
    """Return `message` as one frame; TransferError: too long, or nothing that a frame can carry."""
    try:
        # Whole numbers of other libraries pass for ints, a lone surrogate for a character.
        body: bytes = msgpack.packb(
            dict(message), default=operator.index, unicode_errors="surrogatepass"
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.TransferError(f"A message cannot be sent ({error}).") from None
    if len(body) > FRAME_MAX:
        raise errors.TransferError(
            f"A message of {len(body)} bytes exceeds the {FRAME_MAX} of a frame; send fewer keys."
        )
    return LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Return the length that a frame's first 4 bytes announce; TransferError: it is too long."""
    length: int = LENGTH.unpack(head)[0]
    if length > FRAME_MAX:
        raise errors.TransferError(
            f"The peer announced a frame of {length} bytes; it does not speak kvray's protocol."
        )
    return length


def decode(body: bytes) -> dict[str, Any]:
    """Return the message in a frame's body; TransferError: it is no msgpack map with text keys."""
    try:
        # Maps inside may have numbers for keys, such as ranks.
        message = msgpack.unpackb(
            body,
            unicode_errors="surrogatepass",
            strict_map_key=False,
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
            list_hook=(counted := at_most(_ITEMS_MAX)),
            object_hook=counted,
        )
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException) as error:
        raise errors.TransferError(f"The peer sent a broken frame ({error}).") from None
    if not isinstance(message, dict):
        raise errors.TransferError(f"The peer sent a {type(message).__name__} instead of a map.")
    if not all(isinstance(key, str) for key in message):
        raise errors.TransferError("The peer sent a map with keys that are no text.")
    return message


def at_most(left: int) -> Callable[[Any], Any]:
    """Return a function that lets so many things pass, and refuses all after them."""

    def count(value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("too many lists and maps")
        return value

    return count


def error_reply(error: errors.KVRayError) -> dict[str, Any]:
    """Return the reply that carries `error`."""
    return {"ok": False, "error": type(error).__name__, "message": str(error)}


def raise_for(reply: Mapping[str, Any]) -> None:
    """Raise the error that `reply` carries, if any."""
    if not reply.get("ok"):
        kind = getattr(errors, str(reply.get("error")), None)
        if not (isinstance(kind, type) and issubclass(kind, errors.KVRayError)):
            kind = errors.KVRayError
        raise kind(str(reply.get("message")))
