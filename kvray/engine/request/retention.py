"""Reads what an engine says of how long blocks are to be kept: retention priorities, 0 to 100."""

from typing import Any

import numpy as np

from kvray.store.arena.layout import DEFAULT_PRIORITY, PRIORITY_MAX

_DEFAULT = bytes([DEFAULT_PRIORITY])


def read_priorities(report: Any) -> bytes:
    """Return the priorities of a report's new pages, one byte each; empty where it has none.

    What is out of range is taken for the nearest that is not; what are no numbers says nothing.

    Source: `RequestData.priorities`, a list as long as `new_block_ids`, or None for requests
    without a `KvCacheRetentionConfig`; older versions have no such field.
    """
    asked = getattr(report, "priorities", None)
    if not isinstance(asked, list | tuple):
        return b""
    try:
        numbers = np.array(asked, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return b""
    return numbers.clip(0, PRIORITY_MAX).astype(np.uint8).tobytes() if numbers.ndim == 1 else b""


class Priorities:
    """Priorities of one request's blocks, in prompt order; unnamed blocks have the default."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known = bytearray()

    def extend(self, more: bytes, *, at: int, count: int) -> None:
        """Note those of `count` blocks from the place `at` on; `more` may have too many or few."""
        if more:
            self._known += _DEFAULT * (at - len(self._known)) + more[:count]

    def of(self, first: int, end: int) -> bytes:
        """Return those of the blocks from `first` to `end`; empty if all have the default."""
        found = bytes(self._known[first:end])
        return found.ljust(end - first, _DEFAULT) if found.strip(_DEFAULT) else b""

    def are_raised(self, end: int) -> bool:
        """Whether one of the first `end` is to be kept longer than if nothing were said of it."""
        return max(self._known[:end], default=0) > DEFAULT_PRIORITY
