"""Finds the blocks in a directory's segment files, after any failure.

It reads only headers and tables, each from end to end, and derives everything by vectors. Payloads
are checked when blocks are read.

A block whose parent is lost stays. It takes part in eviction like any other, and is found again as
soon as its parent is stored, without a second write. Otherwise one flipped bit in the record of a
chain's first block would cost the whole tree.
"""

from dataclasses import dataclass

import numpy as np

from kvray.store.arena import key_index, slabs
from kvray.store.arena.layout import PRIORITY_MAX, READY, Array
from kvray.store.arena.tables import Tables
from kvray.store.nvme.record import RECORD, heads_of, is_empty, is_valid
from kvray.store.nvme.record_table import RecordTable
from kvray.store.nvme.segment_files import SegmentFiles

_NUMBER_MAX = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """Results of a start: the blocks that can be served, and why others cannot."""

    blocks: int  # blocks in the index
    parentless: int  # blocks whose parent is lost: no match before it is stored again
    segments: int
    damaged: int  # records that were torn, flipped or copied from elsewhere
    truncated: int  # records of blocks beyond the end of a shortened file
    duplicates: int  # records of blocks that were stored again later, elsewhere
    crowded: int  # blocks that found no place in the index
    surplus: tuple[str, ...]
    """Segment files, unused longest, that a lowered capacity removed."""
    aside: tuple[str, ...]
    """Files that are not this tier's, renamed with the reason behind their name."""


def read_tables(files: SegmentFiles, record_table: RecordTable, tables: Tables) -> RecoveryReport:
    """Fill empty tables with the blocks of existing segments.

    CapacityError: a shortened file cannot be made whole again.
    """
    found: list[Array] = []
    counts = {"damaged": 0, "truncated": 0}
    for slab, segment in files.by_slab.items():
        records = record_table.table(slab)
        num_rows = segment.read_table(records)
        records[segment.shape.num_slots :] = np.zeros((), dtype=RECORD)
        valid = is_valid(records, segment_id=segment.segment_id, first_row=0)
        valid &= records["length"] == segment.shape.block_bytes
        # Numbers go on above the largest that was given: they must not run out.
        valid &= (records["sequence"] < _NUMBER_MAX) & (records["used"] < _NUMBER_MAX)
        counts["damaged"] += int(np.count_nonzero(~valid & ~is_empty(records)))
        has_payload = segment.offsets(np.arange(len(records)) + 1) <= segment.file.size()
        counts["truncated"] += int(np.count_nonzero(valid & ~has_payload))
        counts["truncated"] += segment.shape.num_slots - num_rows
        rows = np.flatnonzero(valid & has_payload)
        _clear_others(record_table, slab, records, rows)
        segment.file.allocate(segment.shape.file_bytes)
        if len(rows):
            slabs.serve(tables, np.array([slab]), segment.shape.block_bytes)
        found.append(tables.geometry.slots_at(slab, rows))
    slots = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    records = record_table.records(slots)
    youngest_first = np.argsort(records["sequence"])[::-1]
    is_older = np.zeros(len(records), dtype=bool)
    is_older[youngest_first] = key_index.repeated(
        records["key"][youngest_first], records["part"][youngest_first]
    )
    record_table.bury(slots[is_older])
    kept, records = slots[~is_older], records[~is_older]
    full = _fill(tables, kept, records)
    record_table.bury(kept[full])
    parentless = _link(tables, kept[~full], records[~full])
    slabs.recount(tables)
    tables.undo.settle()
    return RecoveryReport(
        blocks=int(np.count_nonzero(~full)),
        parentless=parentless,
        segments=len(files.by_slab),
        duplicates=int(np.count_nonzero(is_older)),
        crowded=int(np.count_nonzero(full)),
        surplus=files.surplus,
        aside=files.aside,
        **counts,
    )


def _clear_others(record_table: RecordTable, slab: int, records: Array, rows: Array) -> None:
    """Have all records but `rows` written as empty, so that each is reported only once."""
    others = ~is_empty(records)
    others[rows] = False
    lost = np.flatnonzero(others)
    if len(lost):
        records["sequence"][lost] = 1  # a torn record may say that there is none
        record_table.bury_rows(np.full(len(lost), slab), lost)


def _fill(tables: Tables, slots: Array, records: Array) -> Array:
    """Enter blocks into tables; return a mask of those without a place in the index."""
    tables.slot_key[slots] = records["key"]
    tables.slot_part[slots] = records["part"]
    tables.slot_depth[slots] = records["depth"]
    tables.slot_checksum[slots] = records["payload_checksum"]
    tables.slot_number[slots] = records["sequence"]
    tables.slot_tick[slots] = records["used"]
    tables.slot_namespace[slots] = records["namespace"]
    tables.slot_head[slots] = heads_of(records)
    tables.slot_priority[slots] = np.minimum(records["priority"], PRIORITY_MAX)
    tables.slot_parent[slots] = -1
    full = key_index.insert(tables, slots, records["key"], records["part"])
    tables.slot_state[slots[~full]] = READY
    tables.changed(slots[~full])
    # Numbers and times go on where they were, so that what comes is younger than all that was.
    tables.counts.tick = int(
        max(records["sequence"].max(initial=0), records["used"].max(initial=0), tables.counts.tick)
    )
    return full


def _link(tables: Tables, slots: Array, records: Array) -> int:
    """Link blocks to their parents; return how many are neither roots nor have a parent here."""
    below = records["parent"].any(axis=1)
    slots, records = slots[below], records[below]
    parents = key_index.find(tables, records["parent"], records["part"])
    here = parents >= 0
    here[here] = tables.slot_depth[parents[here]] + 1 == tables.slot_depth[slots[here]]
    tables.slot_parent[slots[here]] = parents[here]
    counted = np.bincount(parents[here], minlength=tables.geometry.num_slots)
    tables.slot_children[:] = counted
    return int(np.count_nonzero(~here))
