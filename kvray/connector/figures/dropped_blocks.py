"""Computed blocks that are not saved: counted by reason; each reason is logged once."""

import logging
import threading
from collections import Counter

from kvray.trace.reasons import DROP_PREFIX, DropReason

_log = logging.getLogger("kvray.connector")


SENTENCES = {
    DropReason.STORE_DOWN: "the tier is not there",
    DropReason.ARENA_BUSY: "the arena stayed locked",
    DropReason.NO_ROOM: "everything else in the arena is leased, or their parent block is missing",
    DropReason.TOO_MANY: "too many saves wait",
    DropReason.TOO_SLOW: "the copy took too long",
    DropReason.SHUT_DOWN: "the connector was shut down",
    DropReason.KEYS_LOST: "their keys did not reach this rank",
    DropReason.NO_PAGE: "the engine names no page for a block before them",
    DropReason.NO_POOL: "this rank does not have the pool that they were planned for",
    DropReason.VOID: "their pass did not get the blocks it was promised, so they may be wrong",
    DropReason.ERROR: "an error, which the log shows",
}


class DroppedBlocks:
    """One engine's counts; any thread may count.

    `dropped_blocks` counts all of them, `dropped_blocks_<reason>` those of one reason. Each rank
    counts the blocks of its own parts; the leader alone counts blocks that are never planned.
    """

    def __init__(self, totals: Counter[str]) -> None:
        self._totals = totals
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def count(self, num_blocks: int, reason: DropReason) -> None:
        """Count blocks that are not saved, and log the first loss for each reason."""
        if num_blocks <= 0:
            return
        with self._lock:
            self._totals["dropped_blocks"] += num_blocks
            self._totals[f"{DROP_PREFIX}{reason.value}"] += num_blocks
            is_new = reason not in self._logged
            self._logged.add(reason)
        if is_new:
            _log.warning(
                "kvray: %d blocks were not saved, nor will be what follows them in their prompts:"
                " %s (said once)",
                num_blocks,
                SENTENCES[reason],
            )
