"""Key -> holders, for millions of blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES
from kvray.index.entry_codes import PARTS_MAX, EntryCodes, Incarnation
from kvray.index.holder_rows import HOLDERS_MAX, Array, HolderRows, union
from kvray.index.key_table import KeyTable

_CODES_PURGED = 4
"""Codes a key up to which a purge visits all the slots that it may."""
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest run of leading keys that one lookup found."""

    num_blocks: int
    holders: dict[str, int]
    """Shard -> leading blocks that it has whole. Several shards may share the parts of further
    blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive blocks with the same holders of the same parts."""

    stop: int
    """The first block after it; it begins where the run before ended."""
    holders: dict[str, int]
    """Shard -> mask of its parts, bit n for part n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Partial blocks: one part has lost its last holder, other parts still have holders."""

    keys: bytes
    """32 bytes each, end to end."""
    parts: int
    """Mask of the lost parts."""
    shards: tuple[str, ...]
    """The holders of the other parts."""


class Index:
    """Key -> holders; single-threaded, no clock, no I/O.

    Keys come as bytes: 32 each, end to end, in prefix order. A shard that is dropped or restarts is
    not found from that moment on. Its entries stay until `purge` removes them, in slices so that no
    call takes long. The work for a key depends on its own holders alone, and there is no Python
    object for a key or a set of holders.
    """

    def __init__(self) -> None:
        self._table = KeyTable()
        self._rows = HolderRows()
        self._codes = EntryCodes()
        self._shards: dict[str, Incarnation] = {}
        # Ended incarnations that still have entries.
        self._ended: list[Incarnation] = []
        self._purged = 0

    def __len__(self) -> int:
        """Return the number of keys with a holder that was not dropped.

        Rows of holders are visited only while several shards that ended are not purged.
        """
        ended = [one for one in self._ended if one.codes]
        chosen = self._codes.chosen(ended)
        num_left = len(self._table) - self._codes.num_sole(chosen)
        return num_left if len(ended) < 2 else num_left - self._rows.num_only(chosen)

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, those to be purged included."""
        return self._table.num_bytes + self._rows.num_bytes + self._codes.num_bytes

    def entries(self) -> dict[str, int]:
        """Return shard -> number of its announced parts."""
        return {shard: one.num_parts for shard, one in self._shards.items()}

    def add(self, shard: str, keys: bytes, parts: Sequence[int] | Array) -> None:
        """Enter parts of blocks that `shard` now has, one part a key.

        A block with HOLDERS_MAX holders gets no further one. ConfigError: keys and parts differ in
        number, or a part is out of range.
        """
        packed, numbers = _entries(keys, parts)
        one = self._shards.setdefault(shard, Incarnation(shard))
        for rows in _rounds(packed):
            # With what is left of its former announcements: a key has one entry of a shard.
            earlier = (other for other in self._ended if other.shard == shard)
            replaced = [one, *earlier]
            self._announce(
                packed[rows], numbers[rows], replaced, lambda mask, part: mask | 1 << part
            )

    def remove(self, shard: str, keys: bytes, parts: Sequence[int] | Array) -> list[Loss]:
        """Remove parts that `shard` no longer has, if known; return the losses. Raises as `add`."""
        packed, numbers = _entries(keys, parts)
        one = self._shards.get(shard)
        if one is None:
            return []
        losses = []
        for rows in _rounds(packed):
            losses += self._announce(
                packed[rows], numbers[rows], [one], lambda mask, part: mask & ~(1 << part)
            )
        return losses

    def drop(self, shard: str) -> None:
        """Forget all blocks of `shard`."""
        self._end(shard)
        self.settle(shard)

    def restart(self, shard: str) -> None:
        """Forget all blocks of `shard`, because it announces them again.

        Until it has done so and `settle` is called, its blocks are no losses.
        """
        self.settle(shard)
        one = self._end(shard)
        if one is not None:
            one.is_kept = True
            self._codes.note_status(one)

    def settle(self, shard: str) -> None:
        """Note that `shard` has announced everything: its other former blocks are gone."""
        for one in self._ended:
            if one.shard == shard:
                one.is_kept = False
                self._codes.note_status(one)

    def set_silent(self, shard: str, is_silent: bool) -> None:
        """Leave a silent `shard` out of answers; it still counts as a holder."""
        one = self._shards.get(shard)
        if one is not None and one.is_silent != is_silent:
            one.is_silent = is_silent
            self._codes.note_status(one)

    def purge(self, slots_max: int) -> list[Loss]:
        """Remove some entries of shards that were dropped or started over; return the losses.

        Visits up to `slots_max` slots of the table; a key has about 3. It visits fewer where blocks
        have many holders.
        """
        self._ended = [one for one in self._ended if one.codes]
        if not any(one.is_over for one in self._ended):
            return []
        codes_a_key = self._rows.num_codes_max // max(1, len(self._table))
        slots_max = slots_max * _CODES_PURGED // max(_CODES_PURGED, codes_a_key)
        stop = min(self._purged + slots_max, self._table.num_slots)
        keys = self._table.keys_with(self._has_ended, self._purged, stop)
        self._purged = stop if stop < self._table.num_slots else 0
        places, values, before = self._find(keys)
        gone = np.where(self._codes.is_over.take(before), before, 0)
        nothing = np.zeros((len(keys), 1), dtype=np.uint32)
        return self._change(_Change(keys, places, values, before - gone, gone, nothing))

    def match(self, keys: bytes, num_parts: int) -> Match:
        """Return the longest run of leading `keys` with holders of all parts.

        Different shards may hold the parts of a block, as with ranks on several nodes. ConfigError:
        no block has that many parts, or the last key is not whole.
        """
        if not 1 <= num_parts <= PARTS_MAX:
            raise ConfigError(f"num_parts must be 1 to {PARTS_MAX}, not {num_parts}.")
        whole = (1 << num_parts) - 1
        num_blocks, holders = 0, dict[str, int]()
        for run in self.locate(keys):
            if whole & ~reduce(or_, run.holders.values(), 0):
                break
            for shard, parts in run.holders.items():
                if parts & whole == whole and holders.get(shard, 0) == num_blocks:
                    holders[shard] = run.stop
            num_blocks = run.stop
        return Match(num_blocks=num_blocks, holders=holders)

    def locate(self, keys: bytes) -> list[Run]:
        """Return runs from the first key to the last one with a holder.

        Keys in between may have none. Raises ConfigError if the last key is not whole.
        """
        packed = _pack(keys)
        if not len(packed):
            return []
        codes = self._find(packed)[2]
        differ: Array = np.flatnonzero(codes[1:] != codes[:-1]) // codes.shape[1] + 1
        if len(differ):
            differ = differ[np.append(True, differ[1:] != differ[:-1])]
        stops = [*differ.tolist(), len(packed)]
        ends = codes.take([stop - 1 for stop in stops], axis=0)
        found: list[Run] = []
        for stop, row in zip(stops, self._codes.asked(ends).tolist(), strict=True):
            holders = self._codes.holders(row)
            if found and found[-1].holders == holders:
                found.pop()
            found.append(Run(stop=stop, holders=holders))
        if not found[-1].holders:
            found.pop()
        return found

    def still_lost(self, keys: bytes, parts: int) -> bytes:
        """Return those of `keys` that lack a holder of `parts`; silent shards count."""
        packed = _pack(keys)
        codes = self._find(packed)[2]
        codes = np.where(self._codes.is_over.take(codes), 0, codes)
        still: bytes = packed[self._codes.lacking(parts, codes)].tobytes()
        return still

    def _find(self, keys: Array) -> tuple[Array, Array, Array]:
        """Return the place, value and codes of each of `keys`."""
        places = self._table.find(keys)
        values = self._table.values(keys, places)
        return places, values, self._rows.read(values)

    def _has_ended(self, values: Array) -> Array:
        return union(self._codes.is_over.take(self._rows.read(values)))

    def _announce(
        self,
        keys: Array,
        parts: Array,
        replaced: Sequence[Incarnation],
        change: Callable[[int, int], int],
    ) -> list[Loss]:
        """Change what a shard has of `keys`, no two of which are equal; return the losses.

        The first of its incarnations has the entries from now on, instead of all `replaced`.
        """
        one = replaced[0]
        places, values, before = self._find(keys)
        mine = np.where(self._codes.chosen(replaced).take(before), before, 0)
        old = mine.max(axis=1)
        new = np.zeros(len(keys), dtype=np.uint32)
        enters = (old != 0) | (np.count_nonzero(before, axis=1) < HOLDERS_MAX)
        new[enters] = self._codes.changed(one, old[enters], parts[enters], change)
        return self._change(
            _Change(keys, places, values, before - mine, old[:, None], new[:, None])
        )

    def _change(self, change: "_Change") -> list[Loss]:
        kept, gone, new = change.kept, change.gone, change.new
        losses = self._losses(change)
        after = self._rows.write(change.values, np.concatenate((kept, new), axis=1))
        self._table.put(change.keys, change.places, after)
        self._codes.count_sole(self._rows.sole(after), self._rows.sole(change.values))
        # Last, so that no code is reused while keys still have it.
        self._codes.count(new[new != 0], gone[gone != 0])
        return losses

    def _losses(self, change: "_Change") -> list[Loss]:
        """Return the parts without holders because a shard dropped the whole block.

        A shard that keeps other parts has not dropped the block: it may have evicted parts outside
        a window, which no engine needs. A block without any holder is no loss, either.
        """
        dropped = (union(change.gone) != 0) & (union(change.new) == 0) & (union(change.kept) != 0)
        rows = np.flatnonzero(dropped)
        if not len(rows):
            return []
        kept = change.kept[rows]
        lost = self._codes.words(change.gone[rows]) & ~self._codes.words(kept)
        is_lost = union(lost) != 0
        rows, kept, lost = rows[is_lost], kept[is_lost], lost[is_lost]
        kept = np.where(self._codes.is_over.take(kept), 0, kept)
        # Blocks that are lost alike, sorted together by a hash, make one loss.
        words: Array = np.concatenate((kept.astype(np.uint64), lost), axis=1)
        factors: Array = np.cumprod(np.full(words.shape[1], _GOLDEN, dtype=np.uint64))
        order = np.argsort(words @ factors)
        words = words[order]
        stops = np.flatnonzero((words[1:] != words[:-1]).any(axis=1)) + 1
        return [
            Loss(
                keys=change.keys[rows[alike]].tobytes(),
                parts=int.from_bytes(lost[alike[0]].tobytes(), "little"),
                shards=tuple(sorted(self._codes.holders(kept[alike[0]].tolist()))),
            )
            for alike in np.split(order, stops)
            if len(alike)
        ]

    def _end(self, shard: str) -> Incarnation | None:
        one = self._shards.pop(shard, None)
        if one is not None:
            one.is_ended = True
            self._ended.append(one)
            self._codes.note_status(one)
        return one


@dataclass(slots=True)
class _Change:
    """Entries that keys lose and get; codes are u32 of shape [num_keys, width], 0 for none."""

    keys: Array
    places: Array
    values: Array
    kept: Array
    gone: Array
    new: Array


def _pack(keys: bytes) -> Array:
    if len(keys) % KEY_BYTES:
        raise ConfigError(f"{len(keys)} bytes are no whole number of keys of {KEY_BYTES}.")
    return np.frombuffer(keys, dtype="<u8").reshape(-1, 4)


def _entries(keys: bytes, parts: Sequence[int] | Array) -> tuple[Array, Array]:
    packed, numbers = _pack(keys), np.asarray(parts)
    if len(packed) != len(numbers):
        raise ConfigError(f"{len(packed)} keys came with {len(numbers)} parts; give one each.")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < PARTS_MAX:
        raise ConfigError(f"The parts of a block are 0 to {PARTS_MAX - 1}.")
    return packed, numbers.astype(np.int64)


def _rounds(packed: Array) -> Iterator[Array | slice]:
    """Yield rows in rounds; no round has a key twice."""
    words = np.sort(packed[:, 0])
    if not (words[1:] == words[:-1]).any():
        yield slice(None)
        return
    order = np.argsort(packed[:, 0])
    words = packed[order, 0]
    at = np.arange(len(words))
    is_first = np.append(True, words[1:] != words[:-1])[: len(words)]
    nth = at - np.maximum.accumulate(np.where(is_first, at, 0))
    for number in range(int(nth.max(initial=-1)) + 1):
        yield np.sort(order[nth == number])
