"""Arguments of calls of actors, cut up so that they travel with the call.

Ray sends an argument of up to 100 KiB with the call, and a larger one by way of its object store,
which takes some milliseconds more.
"""

import pickle
from typing import Any

_PIECE_BYTES = 2**16


def in_pieces(data: bytes) -> list[bytes]:
    """Return `data` cut up, as one argument at least."""
    starts = range(0, max(1, len(data)), _PIECE_BYTES)
    return [data[start : start + _PIECE_BYTES] for start in starts]


def packed(value: Any) -> list[Any]:
    """Return the arguments that bring `value` to an actor: itself, or its pickle in pieces."""
    pickled = pickle.dumps(value)
    return [value] if len(pickled) <= _PIECE_BYTES else in_pieces(pickled)


def unpacked(*arguments: Any) -> Any:
    """Return what was `packed`."""
    first = arguments[0]
    # As any argument of an actor it comes from this tier's own processes.
    return pickle.loads(b"".join(arguments)) if isinstance(first, bytes) else first  # noqa: S301
