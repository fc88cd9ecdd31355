"""Rows of entry codes: the holders of a key, in arrays of four sizes."""

from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

HOLDERS_MAX = 64
"""Holders of a block that the index knows; a plan to fetch it chooses from 16.

A further holder is not entered, and its later removal changes nothing. So a query never finds a
wrong holder, only fewer. When all 64 have dropped the block, others may still hold it: queries miss
it, and the engine computes it again, until one of them announces it again. Likewise a part that
only a further holder has is missed. Both are rare, as nodes drop cold blocks at similar times and
announce the parts of a block together. To ask the others to repeat themselves would make traffic
for blocks that go anyway.
"""

_WIDTHS = (1, 4, 16, HOLDERS_MAX)
_KIND_BITS = 30
_NUMBER = (1 << _KIND_BITS) - 1
_ROWS_MIN = 64
_NARROW = 17


class HolderRows:
    """Value of a key -> its codes.

    A value below 2**30 is the only code itself. Else its two upper bits choose the size and the
    others number the row, which has the codes in ascending order after zeros. So equal rows have
    equal holders.
    """

    def __init__(self) -> None:
        self._pools = [_Pool(width) for width in _WIDTHS[1:]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(pool.num_bytes for pool in self._pools)

    @property
    def num_codes_max(self) -> int:
        """Room for codes in all rows in use: the work to visit them all."""
        return sum(pool.num_used * pool.rows.shape[1] for pool in self._pools)

    def num_only(self, chosen: Array) -> int:
        """Return how many rows have no codes but `chosen` ones, a mask of codes.

        It looks at one code of each row, and at all of those that it may mean.
        """
        return sum(pool.num_only(chosen) for pool in self._pools)

    @staticmethod
    def sole(values: Array) -> Array:
        """Return those of `values` that are the only code of their keys."""
        sole: Array = values[(values != 0) & (values <= _NUMBER)]
        return sole

    def read(self, values: Array) -> Array:
        """Return the codes, u32 of shape [num_values, width], as wide as the widest."""
        widest = int(values.max(initial=0)) >> _KIND_BITS
        if not widest:
            return values[:, None]
        if widest == int(values.min()) >> _KIND_BITS:
            return self._pools[widest - 1].take(values)
        kinds = values >> np.uint32(_KIND_BITS)
        codes: Array = np.zeros((len(values), _WIDTHS[widest]), dtype=np.uint32)
        codes[:, -1] = np.where(kinds == 0, values, 0)
        for kind in range(1, widest + 1):
            here = np.flatnonzero(kinds == kind)
            codes[here, -_WIDTHS[kind] :] = self._pools[kind - 1].take(values[here])
        return codes

    def write(self, values: Array, codes: Array) -> Array:
        """Replace the codes of the keys with `values`; return the new values.

        No row has more than HOLDERS_MAX codes. It sorts `codes` in place.
        """
        counts = np.count_nonzero(codes, axis=1)
        if counts.max(initial=0) <= 1 and values.max(initial=0) <= _NUMBER:
            return union(codes)  # the most common case: no key has had two holders
        codes.sort(axis=1)
        kinds = np.searchsorted(_WIDTHS, counts)
        was = values >> np.uint32(_KIND_BITS)
        after: Array = np.where(kinds == 0, codes[:, -1], 0).astype(np.uint32)
        for kind, pool in enumerate(self._pools, 1):
            pool.free(values[(was == kind) & (kinds != kind)] & np.uint32(_NUMBER))
            here = np.flatnonzero(kinds == kind)
            numbers = values[here] & np.uint32(_NUMBER)
            moves = np.flatnonzero(was[here] != kind)
            numbers[moves] = pool.allocate(len(moves))
            width = min(_WIDTHS[kind], codes.shape[1])
            # A row that was just allocated may have codes of its last key.
            pool.rows[numbers[moves]] = 0
            pool.rows[numbers, -width:] = codes[here, -width:]
            after[here] = numbers | np.uint32(kind << _KIND_BITS)
        return after


def union(rows: Array) -> Array:
    """Return the bitwise or of each row: column by column, as numpy is slow at many short rows."""
    if rows.shape[1] <= _NARROW:
        return reduce(np.bitwise_or, rows.T)
    return np.asarray(np.bitwise_or.reduce(rows, axis=1))


class _Pool:
    """Rows of one width; a freed row is the next to be used."""

    def __init__(self, width: int) -> None:
        self.rows: Array = np.zeros((_ROWS_MIN, width), dtype=np.uint32)
        self._free: Array = np.zeros(_ROWS_MIN, dtype=np.uint32)
        self._num_free = self._num_new = 0

    @property
    def num_bytes(self) -> int:
        return int(self.rows.nbytes + self._free.nbytes)

    @property
    def num_used(self) -> int:
        return self._num_new - self._num_free

    def take(self, values: Array) -> Array:
        """Return the rows that `values` number."""
        rows: Array = self.rows.take(values & np.uint32(_NUMBER), axis=0)
        return rows

    def num_only(self, chosen: Array) -> int:
        """Return how many rows have no codes but `chosen` ones."""
        may = np.flatnonzero(chosen.take(self.rows[: self._num_new, -1]))
        codes = self.rows.take(may, axis=0)
        return int(np.count_nonzero((chosen.take(codes) | (codes == 0)).all(axis=1)))

    def allocate(self, count: int) -> Array:
        """Return the numbers of `count` rows, whose codes are arbitrary."""
        old = min(count, self._num_free)
        self._num_free -= old
        new = np.arange(self._num_new, self._num_new + count - old, dtype=np.uint32)
        self._num_new += len(new)
        if self._num_new > len(self.rows):
            # No view of them lives between two calls; the system remaps their pages.
            rows = self._num_new + self._num_new // 8
            self.rows.resize((rows, self.rows.shape[1]), refcheck=False)
            self._free.resize(rows, refcheck=False)
        return np.concatenate((self._free[self._num_free : self._num_free + old], new))

    def free(self, numbers: Array) -> None:
        """Take back rows."""
        self.rows[numbers, -1] = 0
        self._free[self._num_free : self._num_free + len(numbers)] = numbers
        self._num_free += len(numbers)
