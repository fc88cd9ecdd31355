"""The notes of engines on their requests, kept by their shard for people who ask later."""

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from kvray.actors.staging.replicas import Origin
from kvray.errors import ConfigError
from kvray.trace.request_note import NOTES_MAX, unpack

_BYTES_MAX = 16 * 2**20
"""Of all notes; one has some hundred bytes, and up to 2.5 KiB if it is a miss."""
_OVERHEAD = 300  # bytes that keeping one takes beside its own
FOUND_MAX = 1000


class RequestLog:
    """The latest requests of a node's replicas; state of the shard's event loop.

    They stay when their engine is gone. Of too many the oldest goes, whosever it is: so the log
    covers the same time for all.
    """

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._packed: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()

    def note(self, origin: Origin, notes: Sequence[Any]) -> int:
        """Take notes of one rank; a later one of the same request takes the place of the first.

        Returns how many are not valid, and were not taken. ConfigError: they are no notes at all.
        """
        if not isinstance(notes, list | tuple) or len(notes) > NOTES_MAX:
            raise ConfigError(f"Notes on requests are a list of at most {NOTES_MAX}.")
        found = []
        for packed in notes:
            with contextlib.suppress(ConfigError):
                found.append((unpack(packed).request_id, packed))
        for request_id, packed in found:
            key = origin.replica, origin.rank, request_id
            before = self._packed.pop(key, None)
            if before is not None:
                self._num_bytes -= _OVERHEAD + len(before)
            self._packed[key] = packed
            self._num_bytes += _OVERHEAD + len(packed)
        while self._num_bytes > self._bytes_max:
            _, gone = self._packed.popitem(last=False)
            self._num_bytes -= _OVERHEAD + len(gone)
        return len(notes) - len(found)

    def find(
        self, replica: str | None, request_id: int | None, last: int
    ) -> list[tuple[str, int, bytes]]:
        """Return (replica, rank, packed note) of up to `last` requests, the latest first.

        Without `replica` or `request_id` all count.
        """
        found = (
            (name, rank, self._packed[name, rank, number])
            for name, rank, number in reversed(self._packed)
            if replica in (None, name) and request_id in (None, number)
        )
        return list(islice(found, max(0, min(last, FOUND_MAX))))
