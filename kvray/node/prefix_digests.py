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

    The engine's thread notes, in constant time and without a lock; the link's thread reports and
    hears. Both use `_waiting`, which the one appends to and the other cuts, and `_known`.
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
            self._known = set()  # They are noted again, so the shard does not forget those in use.
        self._known.add(digest)

    def note_missed(self, digest: bytes, num_tokens: int) -> None:
        """Note a prompt whose very first block is not stored.

        `num_tokens` count as missed because of it; with none there is no note.
        """
        if num_tokens > 0:
            self._note(digest, num_tokens)

    def waiting(self) -> list[tuple[bytes, int]]:
        """Return what to report next, in the order in which it was noted."""
        return self._waiting[:NOTES_MAX]

    def reported(self, num_notes: int, incompatible: list[dict[str, Any]]) -> None:
        """Drop the first `num_notes`, which the shard has, and read its answers."""
        del self._waiting[:num_notes]
        for answer in incompatible:
            self.incompatible_tokens += answer["num_tokens"]
            self._explain(answer)

    def tell_again(self) -> None:
        """Note every digest again at its next use: the shard is a new one."""
        self._known = set()

    def counted(self, counters: dict[str, int], reason: str) -> dict[str, int]:
        """Return `counters` with the incompatible tokens moved from `reason` to their own counter.

        The totals themselves belong to the engine's thread alone.
        """
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
        """Log the difference to a namespace, once."""
        difference = {name: (mine, theirs) for name, (mine, theirs) in answer["difference"].items()}
        if repr(difference) in self._explained or len(self._explained) >= _EXPLAINED_MAX:
            return
        self._explained.add(repr(difference))
        _log.warning("%s", explain(answer["num_tokens"], answer["replica"], difference))
