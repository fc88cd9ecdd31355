"""Openings of prompts that one rank noted, and the misses that turned out to be incompatible."""

import logging
from typing import Any

from kvray.node.incompatible import explain
from kvray.opening import NOTES_MAX

_log = logging.getLogger("kvray.node")

INCOMPATIBLE = "miss_tokens_incompatible"
"""Counter of the tokens that another namespace has stored."""

_WAITING_MAX = 4096
_KNOWN_MAX = 4096
_EXPLAINED_MAX = 64


class Openings:
    """What one rank stored and missed, on its way to the shard.

    The engine's thread notes, in constant time and without a lock; the link's thread reports and
    hears. What crosses: `_waiting`, appended to by the one and cut by the other, and `_known`.
    """

    def __init__(self) -> None:
        """Start with nothing noted."""
        self.incompatible_tokens = 0
        """Missed tokens that turned out to be stored in another namespace; never falls."""
        self._waiting: list[tuple[bytes, int]] = []
        self._known: set[bytes] = set()
        self._explained: set[str] = set()

    def note_stored(self, opening: bytes) -> None:
        """Note that the first block of a prompt is stored: it was saved, or found.

        Args:
            opening: `opening_digest` of the prompt.
        """
        if opening in self._known or not self._note(opening, 0):
            return
        if len(self._known) >= _KNOWN_MAX:
            self._known = set()  # They are told again, and so not forgotten while in use.
        self._known.add(opening)

    def note_missed(self, opening: bytes, num_tokens: int) -> None:
        """Note a prompt of which not even the first block is stored.

        Args:
            opening: `opening_digest` of the prompt.
            num_tokens: tokens that are counted as missed because of it; of none there is no note.
        """
        if num_tokens > 0:
            self._note(opening, num_tokens)

    def waiting(self) -> list[tuple[bytes, int]]:
        """Return what to report next, in the order in which it was noted."""
        return self._waiting[:NOTES_MAX]

    def reported(self, num_notes: int, incompatible: list[dict[str, Any]]) -> None:
        """The shard has taken the first `num_notes` and answered what `OpeningDesk` says."""
        del self._waiting[:num_notes]
        for answer in incompatible:
            self.incompatible_tokens += answer["num_tokens"]
            self._explain(answer)

    def tell_again(self) -> None:
        """The shard is another one: what it does not know is noted at its next use."""
        self._known = set()

    def counted(self, counters: dict[str, int], reason: str) -> dict[str, int]:
        """Return `counters` with what is incompatible taken from `reason` and counted by itself.

        The totals themselves stay the engine's thread's alone.
        """
        moved = min(self.incompatible_tokens, counters.get(reason, 0))
        if not moved:
            return counters
        return counters | {reason: counters[reason] - moved, INCOMPATIBLE: moved}

    def _note(self, opening: bytes, num_tokens: int) -> bool:
        if len(self._waiting) >= _WAITING_MAX:
            return False
        self._waiting.append((opening, num_tokens))
        return True

    def _explain(self, answer: dict[str, Any]) -> None:
        """Log the difference to a namespace, once."""
        difference = {name: (mine, theirs) for name, (mine, theirs) in answer["difference"].items()}
        if repr(difference) in self._explained or len(self._explained) >= _EXPLAINED_MAX:
            return
        self._explained.add(repr(difference))
        _log.warning("%s", explain(answer["num_tokens"], answer["replica"], difference))
