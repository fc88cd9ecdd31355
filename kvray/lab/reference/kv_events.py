"""The events of the pool, in the shape in which TensorRT-LLM's `get_kv_cache_events` has them."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

_PRIORITY = 35  # TensorRT-LLM's default


class KvCacheEvents:
    """A buffer of events: of too many the oldest go, which shows as a gap in their numbers.

    The executor's thread adds, any other takes.
    """

    def __init__(self, events_max: int, *, window_size: int) -> None:
        self._ids = itertools.count()
        self._window_size = window_size
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque(maxlen=events_max)

    def created(self, num_blocks: int) -> None:
        self._add({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})

    def stored(
        self,
        parent_hash: int | None,
        blocks: Sequence[tuple[int, Sequence[int]]],
        *,
        salt: Hashable,
    ) -> None:
        """Tell of new blocks of one chain: their hashes and tokens."""
        told: list[dict[str, Any]] = [
            {
                "type": "stored_block",
                "block_hash": block_hash,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in tokens
                ],
                "cache_level": 0,
                "priority": _PRIORITY,
                "mm_keys": [],
                "cache_salt": salt,
            }
            for block_hash, tokens in blocks
        ]
        self._add({"type": "stored", "parent_hash": parent_hash, "blocks": told})

    def removed(self, block_hashes: Sequence[int]) -> None:
        self._add({"type": "removed", "block_hashes": [*block_hashes]})

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        with self._lock:
            events = [*self._events]
            self._events.clear()
        return events

    def _add(self, data: dict[str, Any]) -> None:
        event = {"event_id": next(self._ids), "data": data, "window_size": self._window_size}
        with self._lock:
            self._events.append(event)


def block_hash(parent_hash: int | None, tokens: Sequence[int], *, salt: Hashable) -> int:
    """Return the hash of a block, which depends on all before it and on the salt."""
    return xxh3_64_intdigest(repr((parent_hash, tokens, salt)).encode())
