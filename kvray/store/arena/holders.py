"""Holders of an arena: processes that are attached; a byte lock for each row tells who lives.

Every function that changes something expects the arena's lock.
"""

import os

import numpy as np

from kvray.store.arena import lease, slots
from kvray.store.arena.layout import LABEL_BYTES
from kvray.store.arena.tables import Tables
from kvray.store.machine.side_file import HOLDER_BYTES, SideFile


def enter(tables: Tables, side_file: SideFile, label: str, *, now: float) -> int | None:
    """Give this process a row that no living process has; None if there is none."""
    name = label.encode(errors="replace")[:LABEL_BYTES]
    for row in range(tables.geometry.holders_max):
        if side_file.try_lock(HOLDER_BYTES + row):
            try:
                # Marked live, but nobody had its byte: it belonged to a dead process.
                if tables.holder_live[row]:
                    bury(tables, row, now=now)
                tables.holder_generation[row] = (int(tables.holder_generation[row]) + 1) % 2**32
                tables.holder_pid[row] = os.getpid()
                tables.holder_since[row] = now
                tables.holder_label[row] = name
                tables.put(np.array([row]), holder_live=1)
            except BaseException:
                side_file.unlock(HOLDER_BYTES + row)
                raise
            return row
    return None


def leave(tables: Tables, row: int) -> None:
    """End a holder that no longer reads or writes; its byte is unlocked afterwards."""
    slots.abort_holder(tables, row)
    lease.release_holder(tables, row)
    tables.put(np.array([row]), holder_live=0)


def bury(tables: Tables, row: int, *, now: float) -> str:
    """End what a dead holder had, whose copies may still land; return its label."""
    lease.release_holder(tables, row)
    slots.strand(tables, row, now=now)
    tables.put(np.array([row]), holder_live=0)
    return shown(tables.holder_label[row])


def shown(label: bytes) -> str:
    """Return a holder's label for logs and terminals: any process may have written it."""
    text = bytes(label).decode(errors="replace")
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def dead_rows(tables: Tables, side_file: SideFile) -> list[int]:
    """Return the rows that are marked live and whose process is gone; needs no lock."""
    # Compared first: numpy objects to what changes under a search.
    rows = np.flatnonzero(tables.holder_live != 0).tolist()
    return [row for row in rows if not side_file.is_locked(HOLDER_BYTES + row)]
