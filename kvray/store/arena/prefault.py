"""Makes memory ready before its use: mapped in parallel, in huge pages where the mount has them.

A copy into untouched memory runs at a twentieth of its speed, and at a third where only other
processes have touched it. So the owner populates an arena when it makes it, and every process its
own mapping. `madvise` is called through `ctypes.CDLL`, which gives up the GIL meanwhile;
`mmap.madvise` keeps it.
"""

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvray.store.arena.layout import ALIGNMENT, LIVE, align
from kvray.store.arena.tables import Array, Tables

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

CHUNK_BYTES = 64 * 2**20
_QUIET_CHUNK_BYTES = 16 * 2**20
"""Smaller behind an engine, which cannot map anything while a chunk takes its 4 ms."""
_THREADS_MAX = 8
_HUGEPAGE, _POPULATE_WRITE = 14, 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def mapping_of(tables: Tables) -> Array:
    """Return the bytes of a whole arena with its tables; they keep it mapped."""
    mapping = tables.header.base
    assert mapping is not None
    return np.frombuffer(mapping, dtype=np.uint8)


def pieces_of(tables: Tables) -> list[Array]:
    """Return the parts of `mapping_of` that have memory: all but the slot rows still missing.

    The last row always has memory, as index -1 ("no slot") reads it.
    """
    memory, at, found = mapping_of(tables), 0, []
    missing = range(tables.num_backed, tables.geometry.num_slots - 1)
    for start, stop in tables.geometry.spans(missing) if missing else ():
        found.append(memory[at : align(start)])
        at = max(align(start), stop // ALIGNMENT * ALIGNMENT)
    return [*found, memory[at:]]


def rows_of(tables: Tables, rows: range) -> list[Array]:
    """Return the pages of `mapping_of` with the columns of these slot rows."""
    memory = mapping_of(tables)
    spans = tables.geometry.spans(rows)
    return [memory[start // ALIGNMENT * ALIGNMENT : align(stop)] for start, stop in spans]


def ask_for_huge_pages(memory: Array) -> None:
    """Ask for huge pages under `memory`, which nobody has touched."""
    _libc.madvise(memory.ctypes.data, memory.nbytes, _HUGEPAGE)  # a hint: it may be refused


def populate(
    *pieces: Array, threads: int | None = None, progress: Progress = lambda done, total: None
) -> bool:
    """Map every page of `pieces` for writing, and allocate those that do not exist yet.

    Contents stay. `threads` defaults to one a core, with a bound. `progress` is called in this
    thread as chunks are done; what it raises ends the work. Returns False on a kernel before 5.14,
    which cannot: it maps pages one by one at first use. OSError: some page cannot be had; ENOSPC:
    its mount is full.
    """
    chunks, done = _cut(pieces, CHUNK_BYTES), 0
    total = sum(chunk.nbytes for chunk in chunks)
    threads = threads or min(len(os.sched_getaffinity(0)), _THREADS_MAX)
    with ThreadPoolExecutor(threads, "kvray-populate") as pool:
        try:
            for chunk, populated in zip(chunks, pool.map(_populate, chunks), strict=True):
                if not populated:
                    return False
                done += chunk.nbytes
                progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    return True


class Populator:
    """Populates this process's mapping of an arena, in a thread beside its users.

    What crosses to the thread: the mapping, of which it changes nothing.
    """

    def __init__(self, tables: Tables) -> None:
        """Start; the thread ends when all is mapped, or when the arena is retired."""
        self._stopping = threading.Event()
        # The thread alone has the mapping, and lets it go when it ends.
        self._thread = threading.Thread(
            target=self._run, args=(tables,), name="kvray-populate", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, within milliseconds; twice is fine."""
        self._stopping.set()
        self._thread.join()

    def _run(self, tables: Tables) -> None:
        with contextlib.suppress(OSError):  # what cannot be mapped now is mapped at first use
            for chunk in _cut(pieces_of(tables), _QUIET_CHUNK_BYTES):
                is_wanted = not self._stopping.is_set() and tables.state[0] == LIVE
                if not is_wanted or not _populate(chunk):
                    return


def _cut(pieces: Sequence[Array], chunk_bytes: int) -> list[Array]:
    return [
        piece[at : at + chunk_bytes]
        for piece in pieces
        for at in range(0, piece.nbytes, chunk_bytes)
    ]


def _populate(chunk: Array) -> bool:
    """Populate `chunk` in one call; meanwhile no other thread can change the address space."""
    if _libc.madvise(chunk.ctypes.data, chunk.nbytes, _POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        return False
    if code == errno.EFAULT:  # a write would end in a SIGBUS
        code = errno.ENOSPC
    raise OSError(code, os.strerror(code))
