"""The parts of an open store that its reader and its writer share."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvray.store.arena.tables import Tables
from kvray.store.nvme.book import RecordBook
from kvray.store.nvme.io_threads import IoThreads
from kvray.store.nvme.segment_files import SegmentFiles


class StoreParts(NamedTuple):
    """The tables, the records and the files of one store, and the lock of the first two."""

    tables: Tables
    book: RecordBook
    files: SegmentFiles
    threads: IoThreads
    section: Callable[[], AbstractContextManager[bool]]
    """The store's lock, held for moments and never over I/O."""
