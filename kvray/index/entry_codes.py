"""Codes of entries: a number for each shard and mask of parts, with its properties in arrays."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from kvray.index.holder_rows import Array, union

PARTS_MAX = 1024
"""Parts of a block that the index can tell apart: far more than a replica has ranks."""

_WORD_BITS = 64
_CODES_MIN = 64


@dataclass(slots=True, eq=False)
class Incarnation:
    """The announced blocks of one shard, from one full announcement to the next."""

    shard: str
    is_ended: bool = False
    is_kept: bool = False
    """It has ended, but its entries stay until the shard has announced everything again."""
    is_silent: bool = False
    num_parts: int = 0
    """Announced parts of all its blocks."""
    codes: dict[int, int] = field(default_factory=dict)
    """Mask of parts -> its code, of the masks that some block has."""

    @property
    def is_over(self) -> bool:
        """Whether its entries are to be purged."""
        return self.is_ended and not self.is_kept


class EntryCodes:
    """The codes that some key has. Code 0 stands for no entry; a code without keys is reused.

    Shards are few and so are the masks of one shard, so Python objects are few, however the blocks
    are spread over shards. Each property is an array by code, for whole announcements at once.
    """

    def __init__(self) -> None:
        self.is_over: Array = np.zeros(_CODES_MIN, dtype=bool)
        self._asked: Array = np.zeros(_CODES_MIN, dtype=np.uint32)
        self._words: Array = np.zeros((_CODES_MIN, PARTS_MAX // _WORD_BITS), dtype=np.uint64)
        self._num_keys: Array = np.zeros(_CODES_MIN, dtype=np.int64)
        # Of them those with no other entry.
        self._num_sole: Array = np.zeros(_CODES_MIN, dtype=np.int64)
        self._num_words = 1
        self._owners: list[Incarnation | None] = [None]
        self._shards, self._masks = [""], [0]
        self._free: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self._arrays())

    def changed(
        self, one: Incarnation, codes: Array, parts: Array, change: Callable[[int, int], int]
    ) -> Array:
        """Return the code of `one` for each entry after a change: (mask, part) -> mask.

        Codes of other incarnations stand for no parts. Pairs of code and part are few.
        """
        pairs = codes.astype(np.int64) * PARTS_MAX + parts
        if len(pairs) and (pairs == pairs[0]).all():
            different, which = pairs[:1], np.zeros(len(pairs), dtype=np.int64)
        else:
            different, which = np.unique(pairs, return_inverse=True)
        after = np.zeros(len(different), dtype=np.uint32)
        for at, pair in enumerate(different.tolist()):
            code, part = divmod(pair, PARTS_MAX)
            mask = self._masks[code] if self._owners[code] is one else 0
            after[at] = self._code(one, change(mask, part))
        taken: Array = after[which]
        return taken

    def count_sole(self, added: Array, removed: Array) -> None:
        """Count the keys that have one code alone, or had before a change."""
        self._num_sole += self._counted(added) - self._counted(removed)

    def num_sole(self, chosen: Array) -> int:
        """Return the number of keys that have one of the `chosen` codes alone."""
        return int(self._num_sole[chosen].sum())

    def count(self, added: Array, removed: Array) -> None:
        """Count the keys that codes were added to and removed from; unused codes end."""
        num_added, num_removed = self._counted(added), self._counted(removed)
        change = num_added - num_removed
        self._num_keys += change
        for code in np.flatnonzero(change).tolist():
            if code:
                self._owner(code).num_parts += int(change[code]) * self._masks[code].bit_count()
        for code in np.flatnonzero(num_added + num_removed).tolist():
            if code and not self._num_keys[code]:
                self._end(code)

    def note_status(self, one: Incarnation) -> None:
        """Take over that `one` has ended, is kept or is silent."""
        codes = list(one.codes.values())
        self.is_over[codes] = one.is_over
        self._asked[codes] = 0 if one.is_ended or one.is_silent else codes

    def chosen(self, incarnations: Iterable[Incarnation]) -> Array:
        """Return a mask of all codes that is set for those of `incarnations`."""
        chosen: Array = np.zeros(len(self.is_over), dtype=bool)
        for one in incarnations:
            chosen[list(one.codes.values())] = True
        return chosen

    def asked(self, codes: Array) -> Array:
        """Return `codes` with 0 for those of shards that cannot be asked."""
        asked: Array = self._asked.take(codes)
        return asked

    def holders(self, codes: Iterable[int]) -> dict[str, int]:
        """Return shard -> mask of its parts."""
        shards, masks = self._shards, self._masks
        return {shards[code]: masks[code] for code in codes if code}

    def words(self, codes: Array) -> Array:
        """Return the parts of each row of `codes` together, u64 of shape [num_rows, num_words]."""
        columns = (self._words[:, word].take(codes) for word in range(self._num_words))
        return np.stack([union(column) for column in columns], axis=1)

    def lacking(self, mask: int, codes: Array) -> Array:
        """Return which rows of `codes` lack some parts of `mask`."""
        if mask.bit_length() > self._num_words * _WORD_BITS:
            return np.ones(len(codes), dtype=bool)
        lacks = _words(mask)[: self._num_words] & ~self.words(codes)
        return np.asarray(lacks.any(axis=1))

    def _code(self, one: Incarnation, mask: int) -> int:
        if not mask:
            return 0
        code = one.codes.get(mask)
        if code is None:
            code = one.codes[mask] = self._free.pop() if self._free else self._new()
            self._owners[code], self._shards[code], self._masks[code] = one, one.shard, mask
            self.is_over[code] = one.is_over
            self._asked[code] = 0 if one.is_ended or one.is_silent else code
            words = -(-mask.bit_length() // _WORD_BITS)
            self._words[code] = _words(mask)
            self._num_words = max(self._num_words, words)
        return code

    def _new(self) -> int:
        code = len(self._masks)
        self._owners.append(None)
        self._shards.append("")
        self._masks.append(0)
        if code == len(self.is_over):
            self.is_over, self._asked, self._words, self._num_keys, self._num_sole = (
                np.concatenate((array, np.zeros_like(array))) for array in self._arrays()
            )
        return code

    def _arrays(self) -> tuple[Array, ...]:
        return self.is_over, self._asked, self._words, self._num_keys, self._num_sole

    def _counted(self, codes: Array) -> Array:
        return np.bincount(codes, minlength=len(self._num_keys))

    def _end(self, code: int) -> None:
        del self._owner(code).codes[self._masks[code]]
        self._owners[code] = None
        self._free.append(code)

    def _owner(self, code: int) -> Incarnation:
        owner = self._owners[code]
        assert owner is not None
        return owner


def _words(mask: int) -> Array:
    return np.frombuffer(mask.to_bytes(PARTS_MAX // 8, "little"), dtype="<u8")
