"""Remembers for people which blocks have left a node's tiers, when and why. Thread-safe."""

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

REMOVALS_MAX = 2**18
"""Blocks remembered: 18 bytes each, 4.5 MiB at most."""

TIERS = ("host", "nvme")
HOST, NVME = range(len(TIERS))

_OWN_MAX = 2**16
_NOBODY = np.zeros(0, dtype="<u8")

CAUSES = ("writer", "ahead", "quota", "given_up", "cleared", "corrupt", "disk_room")
WRITER, AHEAD, QUOTA, GIVEN_UP, CLEARED, CORRUPT, DISK_ROOM = range(len(CAUSES))
"""A writer found the memory full; its owner kept room ahead of need; a namespace was over its
quota; its other parts were gone; somebody cleared the tier; its bytes were wrong; there had to be
room on disk."""


REMOVAL = np.dtype([("word", "<u8"), ("at", "<f8"), ("tier", "u1"), ("cause", "u1")])
"""The first 8 bytes of a block's key; when it left, in seconds since the epoch, 0: not remembered;
places in `TIERS` and `CAUSES`."""


class BlockHistory:
    """The last blocks that left, by the first 8 bytes of their keys.

    The owner notes its own evictions at once, with `note`. It finds those of others some moments
    later; `note_rest` leaves out what was noted already.
    """

    def __init__(self, most: int = REMOVALS_MAX) -> None:
        self._lock = threading.Lock()
        self._rows = np.zeros(most, dtype=REMOVAL)
        self._num_noted = 0
        self._began_at = time.time()
        self._own: list[list[Array]] = [[_NOBODY, _NOBODY] for _ in TIERS]
        """For each tier what `note` was told of: before the last finding, and since."""
        self._counts = np.zeros(len(CAUSES), dtype=np.int64)

    def note(self, words: Array, tier: int, causes: Array | int, *, now: float) -> None:
        """Note blocks that the caller has just let go from `tier`.

        `words` are the first 8 bytes of their keys, u8; `causes` are one for all or one each; `now`
        is in seconds since the epoch.
        """
        with self._lock:
            before, since = self._own[tier]
            self._own[tier] = [before, np.concatenate((since, words))[-_OWN_MAX:]]
            self._put(words, tier, np.broadcast_to(causes, words.shape), now)

    def note_rest(self, words: Array, tier: int, causes: Array, *, now: float) -> None:
        """Note blocks that were found to have left, except those that `note` was told of.

        A block that was noted before the last finding, and is not found now, is no longer looked
        for.
        """
        with self._lock:
            before, since = self._own[tier]
            is_own = np.isin(words, np.concatenate((before, since)))
            self._own[tier] = [since[~np.isin(since, words)], _NOBODY]
            self._put(words[~is_own], tier, causes[~is_own], now)

    def of(self, words: Array, *, before: float | None = None) -> Array:
        """Return the last REMOVAL of each of `words`, before a moment if one is given."""
        with self._lock:
            # The oldest first, so that of several removals of one block the latest is kept.
            count = min(self._num_noted, len(self._rows))
            order = np.arange(self._num_noted - count, self._num_noted) % len(self._rows)
            found = self._rows[order[np.isin(self._rows["word"][order], words)]]
        if before is not None:
            found = found[found["at"] < before]
        last = {word: row for row, word in enumerate(found["word"].tolist())}
        removals: Array = np.append(found, np.zeros(1, dtype=REMOVAL))[
            [last.get(word, -1) for word in words.tolist()]
        ]
        return removals

    @property
    def since(self) -> float:
        """From when on all removals are remembered, in seconds since the epoch."""
        with self._lock:
            oldest = self._rows["at"][self._num_noted % len(self._rows)]
            return float(oldest) if self._num_noted >= len(self._rows) else self._began_at

    def counts(self) -> dict[str, int]:
        """Return how many blocks have left for each cause since the start; from any thread."""
        with self._lock:
            counts = self._counts.tolist()
        return {name: count for name, count in zip(CAUSES, counts, strict=True) if count}

    def _put(self, words: Array, tier: int, causes: Array, now: float) -> None:
        self._counts += np.bincount(causes, minlength=len(CAUSES))
        kept = slice(max(0, len(words) - len(self._rows)), None)
        words, causes = words[kept], causes[kept]
        rows = np.arange(self._num_noted, self._num_noted + len(words)) % len(self._rows)
        for name, values in zip(REMOVAL.names or (), (words, now, tier, causes), strict=True):
            self._rows[name][rows] = values
        self._num_noted += len(words)
