"""Maps millions of keys to small numbers, in arrays; vectorised over keys.

The first 8 bytes of a key, uniform as part of a sha256, choose its bucket. A bucket has 16 ways;
the few keys that find none free spill into a dict. The table grows by linear hashing: it splits a
few buckets at a time, so that no call has to rehash the whole, and growing copies rows. It has no
objects for Python's garbage collector to walk.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import numpy as np

from kvray.identity.block import KEY_BYTES
from kvray.index.holder_rows import Array

NOWHERE = -1
"""Place of a key that is not in the table."""

_SPILLED = -2
"""Place of a key that spilled."""

_WAYS = 16
_WAY_BITS = _WAYS.bit_length() - 1
_MEAN_KEYS = 5
"""Average keys of a bucket; those to be split next have up to twice as many."""

_BUCKETS_MIN = 1024
_SPLIT = 1024
"""Buckets that are split at a time."""


class KeyTable:
    """Key -> number from 1 to 2**32 - 1.

    It never shrinks. Keys are rows of four u64. A key's place from `find` is valid until the next
    `put`.
    """

    def __init__(self) -> None:
        self._num_buckets = _BUCKETS_MIN
        self._level = _BUCKETS_MIN.bit_length() - 1
        # A tag of 0 marks a free way: its value is 0, its key arbitrary.
        self._tags: Array = np.zeros((_BUCKETS_MIN, _WAYS), dtype=np.uint32)
        self._values: Array = np.zeros((_BUCKETS_MIN, _WAYS), dtype=np.uint32)
        self._keys: Array = np.zeros((_BUCKETS_MIN, _WAYS, 4), dtype="<u8")
        self._has_spilled: Array = np.zeros(_BUCKETS_MIN, dtype=bool)
        # Bucket -> its spilled keys.
        self._spilled: dict[int, dict[bytes, int]] = {}
        self._free_ways = _free_ways()
        self._len = 0

    def __len__(self) -> int:
        return self._len

    @property
    def num_slots(self) -> int:
        """Ways of all buckets, the unit of `keys_with`."""
        return self._num_buckets * _WAYS

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = self._tags, self._values, self._keys, self._has_spilled
        return sum(array.nbytes for array in arrays)

    def find(self, keys: Array) -> Array:
        """Return the place of each of `keys`, i64 of shape [num_keys]."""
        bucket = self._buckets(keys)
        hits = np.flatnonzero(self._tags.take(bucket, axis=0) == _tag(keys)[:, None])
        row = hits >> _WAY_BITS
        place = (bucket.take(row) << _WAY_BITS) | (hits & (_WAYS - 1))
        wrong = self._keys.reshape(-1, 4).take(place, axis=0)
        wrong ^= keys.take(row, axis=0)
        same = (wrong[:, 0] | wrong[:, 1] | wrong[:, 2] | wrong[:, 3]) == 0
        places = np.full(len(keys), NOWHERE, dtype=np.int64)
        places[row[same]] = place[same]
        if self._spilled:
            rows = np.flatnonzero((places < 0) & self._has_spilled.take(bucket))
            for at, where, key in self._named(keys, rows):
                if key in self._spilled[where]:
                    places[at] = _SPILLED
        return places

    def values(self, keys: Array, places: Array) -> Array:
        """Return the number of each key at its place; 0 where there is none."""
        values: Array = self._values.reshape(-1).take(np.maximum(places, 0))
        values[places < 0] = 0
        for at, bucket, key in self._named(keys, np.flatnonzero(places == _SPILLED)):
            values[at] = self._spilled[bucket][key]
        return values

    def put(self, keys: Array, places: Array, values: Array) -> None:
        """Give each key a new number; 0 removes it.

        No two `keys` are equal; `places` are from `find`, and `values` are u32 [num_keys].
        """
        here = places >= 0
        gone = places[here & (values == 0)]
        self._values.reshape(-1)[places[here]] = values[here]
        self._tags.reshape(-1)[gone] = 0
        self._len -= len(gone)
        for at, bucket, key in self._named(keys, np.flatnonzero(places == _SPILLED)):
            self._put_spilled(bucket, key, int(values[at]))
        new = (places == NOWHERE) & (values != 0)
        if count := np.count_nonzero(new):
            while self._len + count > _MEAN_KEYS * self._num_buckets:
                self._split()
            self._insert(keys[new], values[new])

    def keys_with(self, chosen: Callable[[Array], Array], start: int, stop: int) -> Array:
        """Return the keys whose number is `chosen`, from slot `start` to before `stop`.

        `chosen` returns a mask of numbers. The last slot brings all keys that spilled, whatever
        their numbers.
        """
        values = self._values[: self._num_buckets].reshape(-1)[start:stop]
        places = start + np.flatnonzero(chosen(values))
        keys: Array = self._keys.reshape(-1, 4).take(places, axis=0)
        if stop >= self.num_slots:
            keys = np.concatenate((keys, _joined(self._spilled.values())))
        return keys

    def _buckets(self, keys: Array) -> Array:
        """Return each key's bucket; a split bucket uses one bit more."""
        split = (keys[:, 0] & np.uint64((2 << self._level) - 1)).astype(np.int64)
        return np.where(split < self._num_buckets, split, split & ((1 << self._level) - 1))

    def _split(self) -> None:
        half, new = 1 << self._level, self._num_buckets
        count = min(_SPLIT, 2 * half - new)
        self._reserve(new + count)
        old = slice(new - half, new - half + count)
        spilled = [
            self._spilled.pop(bucket)
            for bucket in (old.start + np.flatnonzero(self._has_spilled[old])).tolist()
        ]
        self._has_spilled[old] = False
        moves = (self._keys[old, :, 0] >> np.uint64(self._level)) & np.uint64(1) == 1
        for array in (self._tags, self._values):
            array[new : new + count] = np.where(moves, array[old], 0)
            array[old][moves] = 0
        self._keys[new : new + count] = self._keys[old]
        self._num_buckets += count
        if self._num_buckets == 2 * half:
            self._level += 1
        values = [value for each in spilled for value in each.values()]
        self._len -= len(values)
        self._insert(_joined(spilled), np.array(values, dtype=np.uint32))

    def _reserve(self, num_buckets: int) -> None:
        """Lengthen the arrays; the system remaps their pages and copies no bytes."""
        rows = num_buckets + 8 * _SPLIT
        for array in (self._tags, self._values, self._keys, self._has_spilled):
            if num_buckets > len(array):
                # No view of it lives between two calls.
                array.resize((rows, *array.shape[1:]), refcheck=False)

    def _insert(self, keys: Array, values: Array) -> None:
        """Enter keys that are not here."""
        bucket = self._buckets(keys)
        order = np.argsort(bucket)
        keys, values, bucket = (one.take(order, axis=0) for one in (keys, values, bucket))
        at = np.arange(len(keys))
        is_first = np.ones(len(keys), dtype=bool)
        is_first[1:] = bucket[1:] != bucket[:-1]
        nth = at - np.maximum.accumulate(np.where(is_first, at, 0))
        is_free = self._tags.take(bucket, axis=0) == 0
        # The n-th newcomer of a bucket takes its n-th free way.
        mask = np.packbits(is_free.reshape(-1), bitorder="little").view("<u2").astype(np.int64)
        way = self._free_ways.take(mask << _WAY_BITS | np.minimum(nth, _WAYS - 1)).astype(np.int64)
        fits = (way < _WAYS) & (nth < _WAYS)
        for late, where, key in self._named(keys, np.flatnonzero(~fits)):
            self._put_spilled(where, key, int(values[late]))
        fit = np.flatnonzero(fits)
        place, keys = (bucket << _WAY_BITS | way).take(fit), keys.take(fit, axis=0)
        # As items of 32 bytes, and by `put`: an index of rows takes four times as long.
        np.put(self._keys.view("V32"), place, keys.view("V32"))
        np.put(self._values, place, values.take(fit))
        np.put(self._tags, place, _tag(keys))
        self._len += len(place)

    def _put_spilled(self, bucket: int, key: bytes, value: int) -> None:
        spilled = self._spilled.setdefault(bucket, {})
        self._len -= len(spilled)
        if value:
            spilled[key] = value
        else:
            del spilled[key]
        self._len += len(spilled)
        self._has_spilled[bucket] = bool(spilled)
        if not spilled:
            del self._spilled[bucket]

    def _named(self, keys: Array, rows: Array) -> Iterator[tuple[int, int, bytes]]:
        """Yield row, bucket and key as plain values; only full buckets have such keys."""
        keys = keys[rows]
        joined, buckets = keys.tobytes(), self._buckets(keys).tolist()
        for nth, (row, bucket) in enumerate(zip(rows.tolist(), buckets, strict=True)):
            yield row, bucket, joined[nth * KEY_BYTES : (nth + 1) * KEY_BYTES]


@cache
def _free_ways() -> Array:
    """Return for each mask of free ways the n-th of them, end to end; _WAYS where there is none."""
    is_free = np.arange(1 << _WAYS)[:, None] >> np.arange(_WAYS) & 1
    ways = np.argsort(1 - is_free, axis=1, kind="stable").astype(np.uint8)
    ways[np.arange(_WAYS) >= is_free.sum(axis=1)[:, None]] = _WAYS
    return ways.reshape(-1)


def _joined(spilled: Iterable[dict[bytes, int]]) -> Array:
    keys = b"".join(key for each in spilled for key in each)
    return np.frombuffer(keys, dtype="<u8").reshape(-1, 4)


def _tag(keys: Array) -> Array:
    tags: Array = keys[:, 1].astype(np.uint32) | np.uint32(1)
    return tags
