"""Ends the file in an arena's place, even if this code cannot map it."""

import contextlib
import mmap
import os
from pathlib import Path

from kvray.store.arena.layout import MAGIC, RETIRED

STATE_BYTES = slice(12, 16)
"""Place of an arena's state in the file, in every version of the format."""


def retire_file(path: Path) -> None:
    """Have the processes that map the arena at `path` leave it, then unlink it.

    An arena of any format, even with a torn header behind the magic, is marked RETIRED, and those
    who map it look for its successor. Their mappings stay: the file is never truncated. Any other
    file is only unlinked.

    Raises:
        OSError: it cannot be unlinked; it is a directory, for example.
    """
    with contextlib.suppress(OSError, ValueError):
        _mark_retired(path)
    path.unlink(missing_ok=True)


def _mark_retired(path: Path) -> None:
    # Follows no link, and does not wait at a FIFO.
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        # Mapped, because hugetlbfs knows no write.
        with mmap.mmap(fd, 0) as mapping:
            if mapping[: len(MAGIC)] == MAGIC and len(mapping) >= STATE_BYTES.stop:
                mapping[STATE_BYTES] = RETIRED.to_bytes(4, "little")
    finally:
        os.close(fd)
