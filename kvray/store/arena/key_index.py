"""The key index of an arena: (key, part) -> slot, set-associative, vectorised over keys.

The first 8 bytes of a key, uniform as part of a sha256, and its part choose a bucket. A bucket has
16 ways and never overflows into the next one. So a look-up reads one bucket, a removal leaves no
tombstone, and the table never has to be rehashed.
"""

from collections.abc import Sequence

import numpy as np

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.store.arena.layout import BUCKET_WAYS, READY
from kvray.store.arena.tables import Array, Tables

_PART_STEP = 0x9E3779B97F4A7C15
"""An odd constant: it sends the parts of one key to unrelated buckets."""

_PART_STEP_U8 = np.uint64(_PART_STEP)

_WORD = np.dtype("<u8")
"""Made once: numpy reads a type's name at each call."""

_FIRST_KEYS = 512
"""All of these leading keys must be here before the rest of a long prompt is looked up."""

_READY = bytes([READY])

_FEW = 4
"""So few keys are looked up one by one."""

_WAY_BITS = BUCKET_WAYS.bit_length() - 1


def pack_keys(keys: Sequence[BlockKey]) -> Array:
    """Return `keys` as u64, shape [num_keys, 4]; ConfigError: they are not 32 bytes each."""
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise ConfigError(f"Keys must have {KEY_BYTES} bytes each; give what chain_keys returns.")
    return np.frombuffer(joined, _WORD).reshape(-1, 4)


def words(first: Array, part: "int | Array") -> Array:
    """Return 64 bits for each block, from `first`, the first word of its key, and its part.

    They choose its bucket, seed its checksum, and tell what a lease was asked for.
    """
    if not isinstance(part, int):
        if part.tobytes() != bytes(part.nbytes):
            found: Array = first ^ part.astype("<u8") * _PART_STEP_U8
            return found
        part = 0  # as mostly; bytes are compared at a fraction of numpy's price
    return first ^ np.uint64(part * _PART_STEP & 2**64 - 1) if part else first


def words_in(tables: Tables, slots: Array) -> Array:
    """Return the `words` of the blocks that `slots` claim to have."""
    return words(tables.slot_key.take(slots, axis=0)[:, 0], tables.slot_part.take(slots))


def find(tables: Tables, keys: Array, part: "int | Array") -> Array:
    """Return the slot of each key, -1 where there is none; i8 [num_keys].

    `keys` are u64 [num_keys, 4]; `part` is one for all, or one a key.
    """
    if len(keys) <= _FEW and isinstance(part, int):
        return np.array([_find_one(tables, key, part) for key in keys.tolist()], dtype=np.int64)
    row, slot = _candidates(tables, keys, part)
    found = np.full(len(keys), -1, dtype=np.int64)
    if not len(row):
        return found
    wrong = tables.slot_key.take(slot, axis=0) ^ keys.take(row, axis=0)
    same = (wrong[:, 0] | wrong[:, 1] | wrong[:, 2] | wrong[:, 3]) == 0
    same &= tables.slot_part.take(slot) == (part if isinstance(part, int) else part[row])
    same &= slot >= 0
    found[row[same]] = slot[same]
    return found


def _find_one(tables: Tables, key: list[int], part: int) -> int:
    """Return the slot of a key of four words, -1: none. Lists cost a tenth of a look by arrays."""
    bucket = (key[0] ^ part * _PART_STEP) & len(tables.index_tag) - 1
    tag = key[1] & 2**32 - 1
    if tag in (tags := tables.index_tag[bucket].tolist()):
        slots = tables.index_slot[bucket].tolist()
        for slot in [slot - 1 for slot, one in zip(slots, tags, strict=True) if one == tag]:
            # A damaged entry may name a slot that is not there.
            inside = 0 <= slot < len(tables.slot_part)
            if inside and tables.slot_part[slot] == part and tables.slot_key[slot].tolist() == key:
                return int(slot)
    return -1


def find_run(tables: Tables, keys: Array, parts: Sequence[int]) -> Array:
    """Return the slots [num_parts, run] of the longest run of leading keys with all parts READY.

    It equals the head of `find` for each part, at half the price or less: a chain is mostly here
    from its root on, and then all its keys are compared at once.
    """
    found = list[Array]()
    for some in (keys[:_FIRST_KEYS], keys[_FIRST_KEYS:]):
        rows = list[Array]()
        for one in parts if len(some) else ():
            row = _find_row(tables, some, one)
            if row is None:
                break
            rows.append(row)
            if not row.size:  # without one part nothing is here, whatever the others have
                rows = [row] * len(parts)
                break
        if len(rows) == len(parts):
            found.append(rows[0] if len(rows) == 1 else np.concatenate(rows))
        else:
            found.append(_find_scattered(tables, some, parts))
        if found[0].shape[1] < _FIRST_KEYS:
            return found[0]
    return np.concatenate(found, axis=1)


def _find_scattered(tables: Tables, keys: Array, parts: Sequence[int]) -> Array:
    """Return what `find_run` does of keys that do not lie in a row."""
    part: int | Array = parts[0]
    num_parts = len(parts)
    if num_parts > 1:
        part = np.repeat(np.array(parts, dtype=np.int64), len(keys))
        keys = np.tile(keys, (num_parts, 1))
    _, slot = _candidates(tables, keys, part)
    # The slots in question are the right ones, each in its place, if their keys are `keys`. Bytes
    # are compared at a fifth of the price of arrays.
    if num_parts == 1 or len(slot) == len(keys):
        same = tables.slot_key.take(slot, axis=0).tobytes() == keys[: len(slot)].tobytes()
        if same and not np.count_nonzero(tables.slot_part.take(slot) != part):
            return _ready_head(tables, slot.reshape(num_parts, -1))
    return _ready_head(tables, find(tables, keys, part).reshape(num_parts, -1))


def _ready_head(tables: Tables, slots: Array) -> Array:
    """Return the leading columns of `slots` in which all are READY; -1 stands for none."""
    ready = (slots >= 0) & (tables.slot_state.take(slots, mode="clip") == READY)
    here = ready.all(axis=0)
    return slots if here.all() else slots[:, : here.argmin()]


def _find_row(tables: Tables, keys: Array, part: int) -> "Array | None":
    """Return the slots of `keys`, shape [1, num_keys], if they are READY and lie in a row.

    Where there was room, those of a chain do; a row goes on in the next slab. One look into the
    index finds the first slot, or that there is none. The slots themselves, which lie close
    together, tell the rest. A FREE slot may still have the key of a block that is elsewhere now.

    Returns no slots if the first key is not here, and None if the keys lie in no row.
    """
    word, tag, *_ = keys[0].tolist()
    bucket = (word ^ part * _PART_STEP) & len(tables.index_tag) - 1
    tags = tables.index_tag[bucket].tolist()
    tag &= 2**32 - 1
    if tag not in tags:
        return np.empty((1, 0), dtype=np.int64)
    first, count = int(tables.index_slot[bucket, tags.index(tag)]) - 1, len(keys)
    if not 0 <= first < tables.num_backed:
        return None
    geometry = tables.geometry
    here: Array | slice = slice(first, first + count)
    slab, position = geometry.place_of(first)
    stop, run = position + count, geometry.run_slots
    in_slab = max(1, geometry.slab_bytes // geometry.stride(int(tables.slab_block_bytes[slab])))
    if stop > in_slab or position // run != (stop - 1) // run:
        slabs, positions = divmod(np.arange(position, stop), in_slab) + np.array([[slab], [0]])
        if slabs[-1] >= geometry.num_slabs:
            return None
        here = geometry.slots_at(slabs, positions)
    # Bytes are compared by far fewer calls than arrays, each of which is dear to a cold cache.
    if (
        tables.slot_key[here].tobytes() != keys.tobytes()
        or tables.slot_part[here].tobytes() != part.to_bytes(4, "little") * count
        or tables.slot_state[here].tobytes() != _READY * count
    ):
        return None
    return (np.arange(first, first + count) if isinstance(here, slice) else here)[None]


def insert(tables: Tables, slots: Array, keys: Array, part: "int | Array") -> Array:
    """Enter `slots`, none of which is in the index; return a mask of those whose bucket was full.

    `keys` are u64 [num_slots, 4]; `part` is one for all, or one a slot.
    """
    if len(slots) == 1:
        word, name, *_ = keys[0].tolist()
        one_part = part if isinstance(part, int) else int(part[0])
        only = (word ^ one_part * _PART_STEP) & len(tables.index_tag) - 1
        ways = tables.index_slot[only].tolist()
        if 0 not in ways:
            return np.ones(1, dtype=bool)
        way = ways.index(0)
        tables.index_tag[only, way] = name & 2**32 - 1
        tables.put(np.array([only * BUCKET_WAYS + way]), index_slot=slots + 1)
        return np.zeros(1, dtype=bool)
    bucket, tag = _bucket(tables, keys, part), _tag(keys)
    empty = tables.index_slot.take(bucket, axis=0) == 0
    way, nth = empty.argmax(axis=1), _nth(bucket)
    if nth.any():  # slots of one batch that share a bucket take its empty ways in turn
        way = (np.cumsum(empty, axis=1, dtype=np.uint8) > nth[:, None]).argmax(axis=1)
    full: Array = np.count_nonzero(empty, axis=1) <= nth
    entry = (bucket << _WAY_BITS) + way
    if full.any():
        entry, tag, slots = entry[~full], tag[~full], slots[~full]
    tables.columns["index_tag"][entry] = tag  # means nothing beside an empty entry
    tables.put(entry, index_slot=slots + 1)
    return full


def remove(tables: Tables, slots: Array) -> None:
    """Take `slots` out of the index; one that is not in it is passed over.

    Like the slots, the emptied entries must not be filled in the same step.
    """
    bucket = _bucket(tables, tables.slot_key.take(slots, axis=0), tables.slot_part.take(slots))
    row, way = np.nonzero(tables.index_slot.take(bucket, axis=0) == (slots + 1)[:, None])
    tables.put(bucket[row] * BUCKET_WAYS + way, index_slot=0, index_tag=0)


def repeated(keys: Array, parts: Array) -> Array:
    """Return a mask of the rows whose key and part an earlier row has too."""
    # Digests: two rows of one block are among those with one word, and hardly any others. Sorting
    # plain numbers releases the GIL: with millions of rows other threads would stand still.
    word = words(keys[:, 0], parts)
    order = np.argsort(word, kind="stable")
    same = word[order][1:] == word[order][:-1]
    rows = np.unique(np.concatenate((order[1:][same], order[:-1][same])))
    rows = rows[np.lexsort((parts[rows], *keys[rows].T))]  # stable: the first in `keys` comes first
    is_equal = (keys[rows[1:]] == keys[rows[:-1]]).all(axis=1) & (
        parts[rows[1:]] == parts[rows[:-1]]
    )
    mask = np.zeros(len(keys), dtype=bool)
    mask[rows[1:][is_equal]] = True
    return mask


def place(tables: Tables, slots: Array) -> tuple[Array, Array]:
    """Return (bucket, tag) under which the blocks that `slots` claim belong into the index."""
    keys = tables.slot_key[slots]
    return _bucket(tables, keys, tables.slot_part[slots]), _tag(keys)


def _candidates(tables: Tables, keys: Array, part: "int | Array") -> tuple[Array, Array]:
    """Return (row in `keys`, slot) of every entry with a key's tag; rows ascend."""
    bucket = _bucket(tables, keys, part)
    # `take` gathers rows several times faster than an index does.
    same_tag = tables.index_tag.take(bucket, axis=0) == _tag(keys)[:, None]
    hit = same_tag.ravel().nonzero()[0]
    row = hit >> _WAY_BITS
    entry = (bucket.take(row) << _WAY_BITS) | (hit & BUCKET_WAYS - 1)
    slot: Array = tables.columns["index_slot"].take(entry).astype(np.int64) - 1
    # An entry is a hint, whatever it says: what counts is the key in the slot.
    return row, np.minimum(slot, tables.num_backed - 1, out=slot)


def _nth(values: Array) -> Array:
    """Return for each value how many equal ones come before it."""
    nth, ascending = np.zeros(len(values), dtype=np.int64), np.sort(values)
    if (ascending[1:] == ascending[:-1]).any():  # mostly not
        order, places = np.argsort(values, kind="stable"), np.arange(len(values))
        is_new = np.append(True, ascending[1:] != ascending[:-1])
        nth[order] = places - np.maximum.accumulate(places * is_new)
    return nth


def _bucket(tables: Tables, keys: Array, part: "int | Array") -> Array:
    bucket: Array = (words(keys[:, 0], part) & tables.bucket_mask).view(np.int64)
    return bucket


def _tag(keys: Array) -> Array:
    return keys[:, 1].astype(np.uint32)
