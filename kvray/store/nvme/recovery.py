"""Finds the blocks in a directory of segment files, after any failure.

It reads only headers and tables, each from end to end, and derives everything by vectors. Payloads
are checked when blocks are read.

A block whose parent is lost stays. It takes part in eviction like any other, and is found again as
soon as its parent is stored, without a second write. Otherwise one flipped bit in the record of a
chain's first block would cost the whole tree.
"""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvray.store.arena import key_index
from kvray.store.arena.layout import PRIORITY_MAX, READY, Array, Geometry
from kvray.store.arena.tables import Tables
from kvray.store.nvme.book import RecordBook
from kvray.store.nvme.disk import Disk, device_errors
from kvray.store.nvme.memory import aligned
from kvray.store.nvme.record import RECORD, is_empty, is_sound
from kvray.store.nvme.segment import Segment, number_of, open_segment, unfinished

_log = logging.getLogger("kvray.nvme")

_NUMBER_MAX = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """Results of a start: the blocks that can be served, and why others cannot."""

    blocks: int
    """Blocks in the index."""
    parentless: int
    """Blocks whose parent is lost: no match before it is stored again."""
    segments: int
    damaged: int
    """Records that were torn, flipped or copied from elsewhere."""
    truncated: int
    """Records of blocks beyond the end of a shortened file."""
    duplicates: int
    """Records of blocks that were stored again later, elsewhere."""
    crowded: int
    """Blocks that found no place in the index."""
    surplus: tuple[str, ...]
    """Segment files, unused longest, that a lowered capacity removed."""
    aside: tuple[str, ...]
    """Files that are not this tier's, renamed with the reason behind their name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The segment files of a directory."""

    segments: list[Segment]
    surplus: tuple[str, ...]
    aside: tuple[str, ...]
    next_number: int


def survey(disk: Disk, directory: Path, *, cluster_name: str, geometry: Geometry) -> Survey:
    """Open the segment files in `directory` that this tier can use, and clear the others away.

    A file of another tier, version or geometry, or with a damaged header, is renamed and never
    removed: it may be somebody's. Unfinished files are removed.

    Raises:
        TierError: the device failed.
    """
    with contextlib.ExitStack() as on_failure:
        for path in unfinished(directory):
            disk.remove(path)
        segments: list[Segment] = []
        aside, last = [], -1
        with device_errors(directory, "listed"):
            paths = sorted(directory.iterdir())
        for path in paths:
            number = number_of(path)
            if number is None:
                continue
            last = max(last, number)
            opened = open_segment(disk, path, cluster_name=cluster_name, geometry=geometry)
            if isinstance(opened, Segment):
                segments.append(opened)
                on_failure.callback(opened.close)
            else:
                aside.append(_put_aside(disk, path, opened))
        surplus = _drop_surplus(disk, segments, geometry.num_slabs)
        if aside or surplus:
            disk.sync_directory(directory)
        on_failure.pop_all()
    return Survey(segments=segments, surplus=surplus, aside=tuple(aside), next_number=last + 1)


def read_tables(survey: Survey, book: RecordBook, tables: Tables) -> RecoveryReport:
    """Fill empty tables with the blocks of the surveyed segments, segment i in slab i.

    Raises:
        CapacityError: a shortened file cannot be made whole again.
        TierError: the device failed.
    """
    found: list[Array] = []
    counts = {"damaged": 0, "truncated": 0}
    for slab, segment in enumerate(survey.segments):
        records = book.table(slab)
        num_rows = segment.read_table(records)
        records[segment.shape.num_slots :] = np.zeros((), dtype=RECORD)
        sound = is_sound(records, segment_id=segment.segment_id, first_row=0)
        sound &= records["length"] == segment.shape.block_bytes
        # Numbers go on above the largest that was given: they must not run out.
        sound &= (records["sequence"] < _NUMBER_MAX) & (records["used"] < _NUMBER_MAX)
        counts["damaged"] += int(np.count_nonzero(~sound & ~is_empty(records)))
        has_payload = segment.offsets(np.arange(len(records)) + 1) <= segment.file.size()
        counts["truncated"] += int(np.count_nonzero(sound & ~has_payload))
        counts["truncated"] += segment.shape.num_slots - num_rows
        rows = np.flatnonzero(sound & has_payload)
        _clear_others(book, slab * tables.geometry.slots_per_slab, records, rows)
        segment.file.allocate(segment.shape.file_bytes)
        if len(rows):
            tables.slab_block_bytes[slab] = segment.shape.block_bytes
        found.append(slab * tables.geometry.slots_per_slab + rows)
    slots = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    records = book.records(slots)
    latest = _latest(records)
    book.bury(slots[~latest])
    kept, records = slots[latest], records[latest]
    full = _fill(tables, kept, records)
    book.bury(kept[full])
    parentless = _link(tables, kept[~full], records[~full])
    # Slabs that lost all their blocks become spare.
    is_used = tables.slot_state.reshape(tables.geometry.num_slabs, -1).any(axis=1)
    tables.slab_block_bytes[~is_used] = 0
    tables.undo.settle()
    return RecoveryReport(
        blocks=int(np.count_nonzero(~full)),
        parentless=parentless,
        segments=len(survey.segments),
        duplicates=int(np.count_nonzero(~latest)),
        crowded=int(np.count_nonzero(full)),
        surplus=survey.surplus,
        aside=survey.aside,
        **counts,
    )


def _put_aside(disk: Disk, path: Path, reason: str) -> str:
    target = path.with_name(f"{path.name}.{reason}")
    attempt = 1
    while target.exists():
        attempt += 1
        target = path.with_name(f"{path.name}.{reason}-{attempt}")
    disk.rename(path, target)
    _log.warning(
        "%s is no segment that this tier can use (%s): it is left as %s, which you may delete",
        path,
        reason,
        target.name,
    )
    return target.name


def _drop_surplus(disk: Disk, segments: list[Segment], num_slabs: int) -> tuple[str, ...]:
    """Remove the segments beyond a lowered capacity; return their names."""
    if len(segments) <= num_slabs:
        return ()
    segments.sort(key=_last_use, reverse=True)
    surplus = segments[num_slabs:]
    del segments[num_slabs:]
    segments.sort(key=lambda one: one.number)
    for segment in surplus:
        segment.close()
        disk.remove(segment.file.path)
        _log.warning("%s is removed: nvme.capacity was lowered", segment.file.path)
    return tuple(segment.file.path.name for segment in surplus)


def _last_use(segment: Segment) -> int:
    records = aligned(segment.shape.table_bytes).view(RECORD)
    segment.read_table(records)
    sound = is_sound(records, segment_id=segment.segment_id, first_row=0)
    return int(records["used"][sound].max(initial=0))


def _clear_others(book: RecordBook, first_slot: int, records: Array, rows: Array) -> None:
    """Have all records but `rows` written as empty, so that each is reported only once."""
    others = ~is_empty(records)
    others[rows] = False
    lost = np.flatnonzero(others)
    if len(lost):
        records["sequence"][lost] = 1  # a torn record may say that there is none
        book.bury(first_slot + lost)


def _latest(records: Array) -> Array:
    """Return a mask of the records that are the youngest of their block."""
    latest = np.ones(len(records), dtype=bool)
    # Digests: two of one block are among those with one first word, and hardly any others.
    word = key_index.words(records["key"][:, 0], records["part"])
    order = np.argsort(word, kind="stable")
    same = word[order][1:] == word[order][:-1]
    alike = np.zeros(len(records), dtype=bool)
    alike[order[1:][same]] = alike[order[:-1][same]] = True
    rows = np.flatnonzero(alike)
    rows = rows[np.argsort(records["sequence"][rows])[::-1]]
    seen: set[tuple[bytes, int]] = set()
    for row in rows.tolist():
        block = records["key"][row].tobytes(), int(records["part"][row])
        latest[row] = block not in seen
        seen.add(block)
    return latest


def _fill(tables: Tables, slots: Array, records: Array) -> Array:
    """Enter blocks into tables; return a mask of those without a place in the index."""
    tables.slot_key[slots] = records["key"]
    tables.slot_part[slots] = records["part"]
    tables.slot_depth[slots] = records["depth"]
    tables.slot_checksum[slots] = records["payload_checksum"]
    tables.slot_number[slots] = records["sequence"]
    tables.slot_tick[slots] = records["used"]
    tables.slot_namespace[slots] = records["namespace"]
    tables.slot_priority[slots] = np.minimum(records["priority"], PRIORITY_MAX)
    tables.slot_parent[slots] = -1
    full = key_index.insert(tables, slots, records["key"], records["part"])
    tables.slot_state[slots[~full]] = READY
    tables.changed(slots[~full])
    # Numbers and times go on where they were, so that what comes is younger than all that was.
    tables.tick = int(
        max(records["sequence"].max(initial=0), records["used"].max(initial=0), tables.tick)
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
