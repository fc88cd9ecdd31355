"""Prompt-prefix digests of one rank, and its misses that turned out to be incompatible."""

import logging
from typing import Any

from kvray.node.incompatible import explain
from kvray.trace.prefix_digest import NOTES_MAX

_log = logging.getLogger("kvray.node")

INCOMPATIBLE = "miss_tokens_incompatible"
"""Counter of missed tokens that another namespace has stored."""

_WAITING_MAX = 4096
_KNOWN_MAX = 4096
_EXPLAINED_MAX = 64


class PrefixDigests:
    """The prefix digests that one rank stored or missed, on their way to the shard.

    The engine's thread notes, in constant time and without a lock; the link's thread reports. Both
    use `_known`, and `_waiting`, to which one appends and which the other cuts.
    """

    def __init__(self) -> None:
        self.incompatible_tokens = 0
        """Missed tokens that turned out to be stored in another namespace; never falls."""
        self._waiting: list[tuple[bytes, int]] = []
        self._known: set[bytes] = set()
        self._explained: set[str] = set()

    def note_stored(self, digest: bytes) -> None:
        """Note that the first block of a prompt is stored: it was saved, or found."""
        if digest in self._known or not self._note(digest, 0):
            return
        if len(self._known) >= _KNOWN_MAX:
            self._known = set()  # It notes digests in use again, so that the shard keeps them.
        self._known.add(digest)

    def note_missed(self, digest: bytes, num_tokens: int) -> None:
        """Note a prompt whose first block is not stored, if that missed any tokens."""
        if num_tokens > 0:
            self._note(digest, num_tokens)

    def waiting(self) -> list[tuple[bytes, int]]:
        """Return the notes to report next, the oldest first."""
        return self._waiting[:NOTES_MAX]

    def reported(self, num_notes: int, incompatible: list[dict[str, Any]]) -> None:
        """Drop the first `num_notes`, which the shard has now, and read its answers."""
        del self._waiting[:num_notes]
        for answer in incompatible:
            self.incompatible_tokens += answer["num_tokens"]
            self._explain(answer)

    def tell_again(self) -> None:
        """Note every digest again at its next use, for a new shard."""
        self._known = set()

    def counted(self, counters: dict[str, int], reason: str) -> dict[str, int]:
        """Return `counters`, with the incompatible tokens moved from `reason` to their own."""
        moved = min(self.incompatible_tokens, counters.get(reason, 0))
        if not moved:
            return counters
        return counters | {reason: counters[reason] - moved, INCOMPATIBLE: moved}

    def _note(self, digest: bytes, num_tokens: int) -> bool:
        if len(self._waiting) >= _WAITING_MAX:
            return False
        self._waiting.append((digest, num_tokens))
        return True

    def _explain(self, answer: dict[str, Any]) -> None:
        difference = {name: (mine, theirs) for name, (mine, theirs) in answer["difference"].items()}
        if repr(difference) in self._explained or len(self._explained) >= _EXPLAINED_MAX:
            return
        self._explained.add(repr(difference))
        _log.warning("%s", explain(answer["num_tokens"], answer["replica"], difference))
