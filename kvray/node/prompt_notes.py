"""The prompts of one engine, of which its shard gets a sample."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.store.sizing.prompts import BLOCKS_MAX, KEYS_MAX, PROMPTS_MAX, SampledPrompts

_WAITING_BLOCKS_MAX = 2**17
"""Keys that wait to be looked at; they are kept alive for it."""

_Prompt = tuple[float, Sequence[BlockKey], int, int, int]


class PromptNotes:
    """The prompts that wait for the next report.

    The engine's thread notes, in less than a microsecond and without a lock; the link's thread
    looks at the keys. Each has a counter of its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[_Prompt] = deque()
        self._num_in = self._num_out = 0
        self._num_lost = self._num_told = 0
        self._limit = -1

    def note(self, keys: Sequence[BlockKey], num_tokens: int, num_asked: int, num_own: int) -> None:
        """Note a prompt of `num_tokens`; its first `num_asked` blocks could have been promised.

        Of these the engine had `num_own` itself. `keys` is not changed any more, and has the
        answer's blocks too.
        """
        if self._num_in - self._num_out > _WAITING_BLOCKS_MAX or len(self._waiting) >= PROMPTS_MAX:
            self._num_lost += 1
            return
        self._num_in += len(keys)
        self._waiting.append((self._clock(), keys, num_tokens, num_asked, num_own))

    def heard(self, limit: object) -> None:
        """Note the limit of what the shard wants next; another object, such as None: nothing."""
        self._limit = limit if isinstance(limit, int) else -1

    def take(self) -> SampledPrompts | None:
        """Return a sample of the oldest prompts that wait, as many as a report may have.

        None: the shard wants none, or there are none.
        """
        limit, num_lost = self._limit, self._num_lost
        if limit < 0 or not (self._waiting or num_lost > self._num_told):
            return None
        now, sums = self._clock(), np.zeros(3, dtype=np.int64)
        ages, lengths, parts = [], [], []
        num_keys = 0
        while self._waiting and num_keys <= KEYS_MAX - BLOCKS_MAX:
            at, keys, num_tokens, num_asked, num_own = self._waiting.popleft()
            self._num_out += len(keys)
            asked = min(num_asked, len(keys), BLOCKS_MAX)
            own = min(num_own, asked)
            sums += asked, own, num_tokens
            numbers = np.frombuffer(b"".join(keys[:BLOCKS_MAX]), "<u8")[:: KEY_BYTES // 8]
            mask = numbers <= limit
            if count := int(np.count_nonzero(mask)):
                ages.append(max(0.0, now - at))
                counts = np.count_nonzero(mask[:asked]), np.count_nonzero(mask[:own])
                lengths.append((count, *map(int, counts)))
                parts.append(numbers[mask])
                num_keys += count
        num_told, self._num_told = self._num_told, num_lost
        blocks, own, tokens = sums.tolist()
        return SampledPrompts(
            limit=limit,
            num_lost=num_lost - num_told,
            num_blocks=blocks,
            num_own=own,
            num_tokens=tokens,
            ages=np.array(ages, dtype="<f4"),
            lengths=np.array(lengths, dtype="<u4").reshape(-1, 3),
            keys=np.concatenate(parts) if parts else np.zeros(0, dtype="<u8"),
        )
