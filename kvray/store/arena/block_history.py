"""Remembers for people which blocks have left a node's tiers, when and why. Thread-safe."""

import threading
import time
from dataclasses import dataclass

import numpy as np

from kvray.store.arena.tables import Array

REMOVALS_MAX = 2**18
"""Blocks remembered: 18 bytes each, 4.5 MiB at most."""

TIERS = ("host", "nvme")
HOST, NVME = range(len(TIERS))

_OWN_MAX = 2**16
_NOBODY = np.zeros(0, dtype="<u8")

CAUSES = ("writer", "ahead", "quota", "duplicate", "given_up", "cleared", "corrupt", "disk_room")
WRITER, AHEAD, QUOTA, DUPLICATE, GIVEN_UP, CLEARED, CORRUPT, DISK_ROOM = range(len(CAUSES))
"""A writer found the memory full; its owner kept room ahead of need; a namespace was over its
quota; another node keeps it; its other parts were gone; somebody cleared the tier; its bytes were
wrong; there had to be room on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removals:
    """Removals of some blocks; rows in the order of the request."""

    at: Array
    """When each left last, in seconds since the epoch, f8; 0: not remembered."""
    tier: Array
    """The tier that it left, of `TIERS`, u1."""
    cause: Array
    """The reason, of `CAUSES`, u1."""


class BlockHistory:
    """The last blocks that left, by the first 8 bytes of their keys.

    The owner notes its own evictions at once, with `note`. It finds those of others some moments
    later; `note_rest` leaves out what was noted already.
    """

    def __init__(self, most: int = REMOVALS_MAX) -> None:
        self._lock = threading.Lock()
        self._words = np.zeros(most, dtype="<u8")
        self._at = np.zeros(most)
        self._tier = np.zeros(most, dtype=np.uint8)
        self._cause = np.zeros(most, dtype=np.uint8)
        self._num_noted = 0
        self._began_at = time.time()
        self._own: list[list[Array]] = [[_NOBODY, _NOBODY] for _ in TIERS]
        """For each tier what `note` was told of: before the last finding, and since."""
        self._counts = np.zeros(len(CAUSES), dtype=np.int64)

    def note(self, words: Array, tier: int, causes: Array | int, *, now: float) -> None:
        """Note blocks that the caller has just let go.

        Args:
            words: the first 8 bytes of their keys, u8.
            tier: which they left.
            causes: one for all, or one each.
            now: seconds since the epoch.
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

    def of(self, words: Array, *, before: float | None = None) -> Removals:
        """Return when and why each of `words` left last, before a moment if one is given."""
        with self._lock:
            count = min(self._num_noted, len(self._words))
            # The oldest first, so that of several removals of one block the latest is kept.
            order = np.arange(self._num_noted - count, self._num_noted) % len(self._words)
            order = order[_are_in(self._words[order], np.unique(words))]
            if before is not None:
                order = order[self._at[order] < before]
            rows = dict(zip(self._words[order].tolist(), order.tolist(), strict=True))
            at = np.array([rows.get(word, -1) for word in words.tolist()], dtype=np.int64)
            return Removals(
                at=np.where(at < 0, 0.0, self._at[at]),
                tier=self._tier[at],
                cause=self._cause[at],
            )

    @property
    def since(self) -> float:
        """From when on all removals are remembered, in seconds since the epoch."""
        with self._lock:
            is_full = self._num_noted >= len(self._words)
            return float(self._at[self._num_noted % len(self._at)]) if is_full else self._began_at

    def counts(self) -> dict[str, int]:
        """Return how many blocks have left for each cause since the start; from any thread."""
        with self._lock:
            counts = self._counts.tolist()
        return {name: count for name, count in zip(CAUSES, counts, strict=True) if count}

    def _put(self, words: Array, tier: int, causes: Array, now: float) -> None:
        self._counts += np.bincount(causes, minlength=len(CAUSES))
        kept = slice(max(0, len(words) - len(self._words)), None)
        words, causes = words[kept], causes[kept]
        rows = np.arange(self._num_noted, self._num_noted + len(words)) % len(self._words)
        self._words[rows], self._at[rows] = words, now
        self._tier[rows], self._cause[rows] = tier, causes
        self._num_noted += len(words)


def _are_in(many: Array, few: Array) -> Array:
    """Return a mask of `many`: those among the sorted `few`."""
    if not len(few):
        return np.zeros(len(many), dtype=bool)
    at = np.minimum(np.searchsorted(few, many), len(few) - 1)
    found: Array = few[at] == many
    return found
