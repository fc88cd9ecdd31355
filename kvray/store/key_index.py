"""The key index of an arena: (key, part) -> slot, set-associative, vectorised over keys.

A key's bucket follows from its first 8 bytes (they are uniform, being sha256) and its part; a
bucket has 16 ways and nothing overflows into the next one, so a look-up reads exactly one
bucket, a removal leaves no tombstone, and the table never has to be rehashed.
"""

from collections.abc import Sequence

import numpy as np

from kvray.block import KEY_BYTES, BlockKey
from kvray.errors import ConfigError
from kvray.store.layout import BUCKET_WAYS
from kvray.store.tables import Array, Tables

_PART_STEP = 0x9E3779B97F4A7C15
"""Odd constant that sends the parts of one key to unrelated buckets."""


def pack_keys(keys: Sequence[BlockKey]) -> Array:
    """Return `keys` as u64, shape [num_keys, 4].

    Raises:
        ConfigError: they are not keys of 32 bytes.
    """
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise ConfigError(
            f"Keys must have {KEY_BYTES} bytes each; give what kvray.keys.chain_keys returns."
        )
    return np.frombuffer(joined, dtype="<u8").reshape(-1, 4)


def find(tables: Tables, keys: Array, part: int) -> Array:
    """Return the slot of each key, shape [num_keys], -1 where there is none."""
    bucket = _bucket(tables, keys, part)
    # `take` gathers rows several times faster than an index does.
    same_tag = tables.index_tag.take(bucket, axis=0) == _tag(keys)[:, None]
    hit = np.flatnonzero(same_tag)
    row = hit // BUCKET_WAYS
    entry = bucket.take(row) * BUCKET_WAYS + hit % BUCKET_WAYS
    slot = tables.index_slot.reshape(-1).take(entry).astype(np.int64) - 1
    wrong = tables.slot_key.take(slot, axis=0) ^ keys.take(row, axis=0)
    same = (wrong[:, 0] | wrong[:, 1] | wrong[:, 2] | wrong[:, 3]) == 0
    same &= (tables.slot_part.take(slot) == part) & (slot >= 0)
    found = np.full(len(keys), -1, dtype=np.int64)
    found[row[same]] = slot[same]
    return found


def insert(tables: Tables, slots: Array) -> Array:
    """Enter `slots` under their own keys; return a mask of those that found their bucket full."""
    keys, parts = tables.slot_key[slots], tables.slot_part[slots]
    bucket, tag = _bucket(tables, keys, parts), _tag(keys)
    empty = tables.index_slot[bucket] == 0
    # Slots of one batch that share a bucket take its empty ways in turn.
    turn = _occurrence(bucket)[:, None] + 1
    chosen = empty & (np.cumsum(empty, axis=1, dtype=np.int64) == turn)
    way, fits = chosen.argmax(axis=1), chosen.any(axis=1)
    tables.index_tag[bucket[fits], way[fits]] = tag[fits]
    tables.index_slot[bucket[fits], way[fits]] = slots[fits] + 1
    full: Array = ~fits
    return full


def remove(tables: Tables, slots: Array) -> None:
    """Take `slots` out of the index; one that is not in it is passed over."""
    bucket = _bucket(tables, tables.slot_key[slots], tables.slot_part[slots])
    row, way = np.nonzero(tables.index_slot[bucket] == (slots + 1)[:, None])
    tables.index_slot[bucket[row], way] = 0
    tables.index_tag[bucket[row], way] = 0


def _occurrence(values: Array) -> Array:
    """Return for each value how many equal ones stand before it."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    before = np.empty(len(values), dtype=np.int64)
    before[order] = np.arange(len(values)) - np.searchsorted(ascending, ascending)
    return before


def _bucket(tables: Tables, keys: Array, part: "int | Array") -> Array:
    step = np.asarray(part, dtype="<u8") * np.uint64(_PART_STEP)
    mask = np.uint64(tables.geometry.num_buckets - 1)
    bucket: Array = ((keys[:, 0] ^ step) & mask).astype(np.int64)
    return bucket


def _tag(keys: Array) -> Array:
    return keys[:, 1].astype(np.uint32)
