"""The key index of an arena: (key, part) -> slot, set-associative, vectorised over keys.

A key's bucket follows from its first 8 bytes (they are uniform, being sha256) and its part; a
bucket has 16 ways and nothing overflows into the next one, so a look-up reads exactly one
bucket, a removal leaves no tombstone, and the table never has to be rehashed.
"""

import numpy as np

from kvray.block import BlockKey
from kvray.store.tables import Array, Tables

_PART_STEP = 0x9E3779B97F4A7C15
"""Odd constant that sends the parts of one key to unrelated buckets."""


def pack_keys(keys: list[BlockKey]) -> Array:
    """Return `keys` as u64, shape [num_keys, 4]."""
    return np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 4)


def find(tables: Tables, keys: Array, part: int) -> Array:
    """Return the slot of each key, shape [num_keys], -1 where there is none."""
    bucket = _bucket(tables, keys, part)
    row, way = np.nonzero(tables.index_tag[bucket] == _tag(keys)[:, None])
    slot = tables.index_slot[bucket[row], way].astype(np.int64) - 1
    same = (tables.slot_key[slot] == keys[row]).all(axis=1)
    same &= (tables.slot_part[slot] == part) & (slot >= 0)
    found = np.full(len(keys), -1, dtype=np.int64)
    found[row[same]] = slot[same]
    return found


def insert(tables: Tables, slots: Array) -> Array:
    """Enter `slots` under their own keys; return a mask of those that found their bucket full."""
    keys, parts = tables.slot_key[slots], tables.slot_part[slots]
    bucket, tag = _bucket(tables, keys, parts), _tag(keys)
    full = np.zeros(len(slots), dtype=bool)
    left = np.arange(len(slots))
    while len(left):
        # Two keys of one batch may share a bucket: one of them is entered per round.
        _, first = np.unique(bucket[left], return_index=True)
        turn = left[first]
        empty = tables.index_slot[bucket[turn]] == 0
        way, fits = empty.argmax(axis=1), empty.any(axis=1)
        full[turn[~fits]] = True
        turn, way = turn[fits], way[fits]
        tables.index_tag[bucket[turn], way] = tag[turn]
        tables.index_slot[bucket[turn], way] = slots[turn] + 1
        left = np.delete(left, first)
    return full


def remove(tables: Tables, slots: Array) -> None:
    """Take `slots` out of the index; one that is not in it is passed over."""
    bucket = _bucket(tables, tables.slot_key[slots], tables.slot_part[slots])
    row, way = np.nonzero(tables.index_slot[bucket] == (slots + 1)[:, None])
    tables.index_slot[bucket[row], way] = 0
    tables.index_tag[bucket[row], way] = 0


def _bucket(tables: Tables, keys: Array, part: "int | Array") -> Array:
    step = np.asarray(part, dtype="<u8") * np.uint64(_PART_STEP)
    return ((keys[:, 0] ^ step) & np.uint64(tables.geometry.num_buckets - 1)).astype(np.int64)


def _tag(keys: Array) -> Array:
    return keys[:, 1].astype(np.uint32)
