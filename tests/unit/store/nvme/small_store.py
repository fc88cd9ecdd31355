"""Small NVMe stores, and an arena to demote from and promote to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvray.identity.block import BlockKey
from kvray.store.arena import key_index, payload, slots
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables
from kvray.store.nvme import Demotion, NvmeSpec, NvmeStore
from kvray.store.nvme.disk import aligned
from kvray.store.nvme.record import PAGE_BYTES, RECORD, SegmentShape
from tests.unit.store.small_arena import SLOT, content, reserve, victims
from tests.unit.store.small_arena import spec as arena_spec

SEGMENT = 16 * SLOT

Block = tuple[BlockKey, int]
"""A key and its part."""

Reopen = Callable[..., NvmeStore]


def spec(*, num_segments: int = 4, segment: int = SEGMENT, **more: Any) -> NvmeSpec:
    slots_per_segment = segment // SLOT
    table_bytes = -(-slots_per_segment * 128 // 4096) * 4096
    capacity = num_segments * (4096 + table_bytes + segment)
    asked = {"cluster_name": "test", "free_reserve": 0, "io_threads": 3, **more}
    return NvmeSpec(capacity=capacity, segment=segment, slot_min=SLOT, **asked)


SHAPE = SegmentShape.of(spec().geometry(), SLOT)


def table_of(path: Path) -> "np.memmap[tuple[int], np.dtype[np.void]]":
    """Return the records of a segment file, a row for each of its slots."""
    return np.memmap(path, RECORD, "r+", PAGE_BYTES, (SHAPE.num_slots,))


def open_store(directory: Path, asked: NvmeSpec | None = None, **more: Any) -> NvmeStore:
    return NvmeStore(directory, asked or spec(), **more)


def arena_tables(*, num_slabs: int = 8) -> Tables:
    """Return an arena in this process's own memory, where direct I/O can reach it."""
    geometry = arena_spec(num_slabs=num_slabs, slots_per_slab=64, holders_max=1).geometry()
    return Tables(aligned(geometry.file_bytes), geometry)


def put_in_arena(
    arena: Tables, keys: list[BlockKey], *, part: int = 0, block_bytes: int = SLOT, **place: Any
) -> Array:
    """Store `keys`, each with its own content; return their slots."""
    made = reserve(arena, keys, part=part, block_bytes=block_bytes, **place)
    for row, slot in zip(made.rows.tolist(), made.slots.tolist(), strict=True):
        wanted = content(keys[row], part, block_bytes=block_bytes)
        payload.slot_bytes(arena, slot)[:block_bytes] = wanted
    slots.commit(arena, made, payload.sum_slots(arena, made.slots))
    return key_index.find(arena, key_index.pack_keys(keys), part)


def chain_for(
    store: NvmeStore,
    arena: Tables,
    keys: list[BlockKey],
    *,
    parent: BlockKey | None = None,
    depth: int = 0,
    **kind: Any,
) -> Demotion:
    """Put `keys` into an arena, and reserve slots of the store for those that it lacks."""
    if parent is not None:
        put_in_arena(arena, [parent], depth=depth - 1, **kind)
    return store.reserve(arena, put_in_arena(arena, keys, parent=parent, depth=depth, **kind))


def demote(store: NvmeStore, keys: list[BlockKey], **place: Any) -> Array:
    """Store `keys` with their content; return a mask of those that were written."""
    arena = arena_tables()
    return store.write([chain_for(store, arena, keys, **place)], arena)[0]


def evict(store: NvmeStore, count: int) -> int:
    """Evict those that go first; return how many went."""
    return len(store.evict(np.array(victims(store.tables, count), dtype=np.int64)))


def blocks_of(store: NvmeStore) -> set[Block]:
    """Return the blocks that are READY."""
    tables = store.tables
    slots = tables.slots_in(READY)
    keys = [BlockKey(key.tobytes()) for key in tables.slot_key[slots]]
    return set(zip(keys, tables.slot_part[slots].tolist(), strict=True))


def present(store: NvmeStore, keys: list[BlockKey], part: int = 0) -> int:
    return int(np.count_nonzero(store.present(key_index.pack_keys(keys), part)))


def promote(
    store: NvmeStore, keys: list[BlockKey], *, part: int = 0, block_bytes: int = SLOT
) -> Array:
    """Read `keys`; return a mask of those that are valid, which have the bytes of their keys."""
    arena = arena_tables(num_slabs=max(8, 2 + len(keys) * block_bytes // (32 * SLOT)))
    made = reserve(arena, keys, part=part, block_bytes=block_bytes)
    assert len(made.slots) == len(keys)
    valid, checksums = store.read(key_index.pack_keys(keys), part, arena, made.slots)
    for key, slot, is_valid in zip(keys, made.slots.tolist(), valid.tolist(), strict=True):
        if is_valid:
            found = payload.slot_bytes(arena, slot)[:block_bytes]
            assert (found == content(key, part, block_bytes=block_bytes)).all(), "wrong bytes"
    sums = payload.sum_slots(arena, made.slots)
    assert (sums == checksums)[valid].all()
    return valid
