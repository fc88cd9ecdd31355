"""Which request the engine speaks of, and whether it only generates; raises nothing."""

from typing import Any

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
