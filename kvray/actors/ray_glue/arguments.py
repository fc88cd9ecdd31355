"""Arguments of calls of actors, in pieces that travel with the call.

Ray sends an argument of up to 100 KiB with the call. A larger one goes through its object store,
which takes some milliseconds more.
"""

import pickle
from typing import Any

_PIECE_BYTES = 2**16


def in_pieces(data: bytes) -> list[bytes]:
    """Return `data` in pieces, one at least."""
    starts = range(0, max(1, len(data)), _PIECE_BYTES)
    return [data[start : start + _PIECE_BYTES] for start in starts]


def packed(value: Any) -> list[Any]:
    """Return the arguments that bring `value` to an actor: itself, or its pickle in pieces."""
    pickled = pickle.dumps(value)
    return [value] if len(pickled) <= _PIECE_BYTES else in_pieces(pickled)


def unpacked(*arguments: Any) -> Any:
    """Return the value of `packed` arguments."""
    first = arguments[0]
    # Like any argument of an actor it comes from processes of this Ray cluster.
    return pickle.loads(b"".join(arguments)) if isinstance(first, bytes) else first  # noqa: S301
