"""Key -> holders, for millions of blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvray.block import KEY_BYTES
from kvray.errors import ConfigError
from kvray.index.holdings import Holdings, Incarnation, Masks
from kvray.index.key_table import Array, KeyTable

PARTS_MAX = 1024
"""Parts of a block that the index can tell apart: far more than any replica has ranks."""

_PART_BITS = PARTS_MAX.bit_length() - 1
_HEAD = 512
"""Of so many leading keys all must be held before the others of a long prompt are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest run of leading keys that one lookup found."""

    num_blocks: int
    holders: dict[str, int]
    """Shard -> leading blocks of which it has every part by itself; those of others besides may be
    put together from the parts of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive blocks that the same shards have the same parts of."""

    stop: int
    """The first block after it; it begins where the run before ended."""
    holders: dict[str, int]
    """Shard -> mask of its parts, bit n for part n; not to be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Blocks of which a part has no holder any more, while others have other parts."""

    keys: bytes
    """32 bytes each, end to end."""
    parts: int
    """Mask of the parts that went."""
    shards: tuple[str, ...]
    """Those that have what is left."""


class Index:
    """Key -> holders; single-threaded, no clock, no I/O.

    A shard that is dropped, or that starts anew, is not found any more from that moment on. Its
    entries stay until `purge` has come by: that goes in slices, so that no call takes long.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._table = KeyTable()
        self._holdings = Holdings()
        self._shards: dict[str, Incarnation] = {}
        # Ended ones that still have entries.
        self._ended: list[Incarnation] = []
        self._purged = 0

    def __len__(self) -> int:
        """Return how many keys some shard has that was not dropped."""
        return sum(
            holding.num_keys
            for holding in self._holdings
            if not all(one.is_ended for one in holding.masks)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the entries take, those to be purged included."""
        return self._table.num_bytes

    @property
    def is_purged(self) -> bool:
        """Whether nothing is left of shards that were dropped or began anew."""
        return not any(one.numbers for one in self._ended)

    def entries(self) -> dict[str, int]:
        """Return shard -> parts it has announced."""
        entries = dict.fromkeys(self._shards, 0)
        for holding in self._holdings:
            for one, mask in holding.masks.items():
                if not one.is_ended:
                    entries[one.shard] += holding.num_keys * mask.bit_count()
        return entries

    def add(self, shard: str, keys: bytes, parts: Sequence[int]) -> None:
        """Enter parts of blocks that `shard` now has; `keys` end to end, 32 bytes each.

        Raises:
            ConfigError: there is not one part in range for each key; nothing was entered.
        """
        packed, numbers = _entries(keys, parts)
        one = self._shards.setdefault(shard, Incarnation(shard))
        for rows in _rounds(packed):
            self._change(
                packed[rows],
                numbers[rows],
                lambda masks, part: {**masks, one: masks.get(one, 0) | 1 << part},
            )

    def remove(self, shard: str, keys: bytes, parts: Sequence[int]) -> list[Loss]:
        """Take out parts that `shard` no longer has; unknown ones are passed over.

        Returns:
            The blocks of which a part has no holder any more.

        Raises:
            ConfigError: as `add`.
        """
        packed, numbers = _entries(keys, parts)
        one = self._shards.get(shard)
        if one is None:
            return []
        losses = []
        for rows in _rounds(packed):
            losses += self._change(
                packed[rows],
                numbers[rows],
                lambda masks, part: _with(masks, one, masks.get(one, 0) & ~(1 << part)),
            )
        return losses

    def drop(self, shard: str) -> None:
        """Forget all that `shard` has."""
        self._end(shard)
        self.settle(shard)

    def restart(self, shard: str) -> None:
        """Forget all that `shard` has, because it says anew what that is.

        Until it has said so, and `settle` is called, no block is a loss because of it.
        """
        self.settle(shard)
        one = self._end(shard)
        if one is not None:
            one.is_kept = True

    def settle(self, shard: str) -> None:
        """Note that `shard` has said all that it has: what it had before besides is gone."""
        for one in self._ended:
            if one.shard == shard:
                one.is_kept = False

    def silence(self, shard: str) -> None:
        """Leave `shard` out of what is found until it is heard; it still counts as a holder."""
        self._set_silent(shard, True)

    def hear(self, shard: str) -> None:
        """Have `shard` found again."""
        self._set_silent(shard, False)

    def purge(self, slots_max: int) -> list[Loss]:
        """Take out some of the entries of shards that were dropped or began anew.

        Args:
            slots_max: how many slots of the table to look at; there are some 3 for each key.

        Returns:
            As `remove`.
        """
        self._ended = [one for one in self._ended if one.numbers]
        chosen = self._to_purge()
        if not chosen.any():
            return []
        stop = min(self._purged + slots_max, self._table.num_slots)
        keys = self._table.keys_at(self._table.with_values(chosen, self._purged, stop))
        self._purged = stop
        if stop == self._table.num_slots:
            self._purged = 0
            keys = np.concatenate((keys, self._table.spilled_keys()))
        no_parts = np.zeros(len(keys), dtype=np.int64)
        return self._change(keys, no_parts, lambda masks, _: _without_ended(masks))

    def match(self, keys: bytes, num_parts: int) -> Match:
        """Return the longest run of leading `keys` of which all parts are there.

        The parts of a block may be with different shards, as those of ranks on several nodes are.

        Args:
            keys: keys in prefix order, 32 bytes each, end to end.
            num_parts: parts that make a block whole.

        Raises:
            ConfigError: no block has that many parts, or the last key is not whole.
        """
        if not 1 <= num_parts <= PARTS_MAX:
            raise ConfigError(f"num_parts must be 1 to {PARTS_MAX}, not {num_parts}.")
        packed = _pack(keys)
        whole = (1 << num_parts) - 1
        holders: dict[str, int] = {}
        for some in (slice(0, _HEAD), slice(_HEAD, None)):
            for start, stop, number in self._runs(packed[some], some.start):
                live = self._holdings.live(number)
                if not _has_all(live, whole):
                    return Match(num_blocks=start, holders=holders)
                for shard, parts in live.items():
                    if parts & whole == whole and holders.get(shard, 0) == start:
                        holders[shard] = stop
        return Match(num_blocks=len(packed), holders=holders)

    def locate(self, keys: bytes) -> list[Run]:
        """Return who has which parts of `keys`, 32 bytes each, end to end.

        Returns:
            Runs from the first key to the last one that somebody has; in between there may be some
            that nobody has.

        Raises:
            ConfigError: the last key is not whole.
        """
        found: list[tuple[int, dict[str, int]]] = []
        for _, stop, number in self._runs(_pack(keys), 0):
            holders = self._holdings.live(number)
            if found and found[-1][1] == holders:
                found.pop()
            found.append((stop, holders))
        if found and not found[-1][1]:
            found.pop()
        return [Run(stop=stop, holders=holders) for stop, holders in found]

    def still_lost(self, keys: bytes, parts: int) -> bytes:
        """Return those of `keys` that no shard has all of `parts` of, silent ones included."""
        packed = _pack(keys)
        numbers = self._table.values(packed, self._table.find(packed))
        different, which = np.unique(numbers, return_inverse=True)
        lost = [
            bool(parts & ~_union(_without_ended(self._holdings.masks(number))))
            for number in different.tolist()
        ]
        rows = np.flatnonzero(np.array(lost, dtype=bool)[which])
        return b"".join(keys[KEY_BYTES * row : KEY_BYTES * (row + 1)] for row in rows.tolist())

    def _runs(self, packed: Array, offset: int) -> Iterator[tuple[int, int, int]]:
        """Return start, stop and holding of each run of keys that are held alike."""
        if not len(packed):
            return
        numbers = self._table.values(packed, self._table.find(packed))
        stops = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(packed)]
        start = 0
        for stop in stops:
            yield offset + start, offset + stop, int(numbers[start])
            start = stop

    def _change(
        self, keys: Array, parts: Array, change: Callable[[Masks, int], Masks]
    ) -> list[Loss]:
        """Change who has `keys`, no two of which are equal; return what was lost by it."""
        places = self._table.find(keys)
        before = self._table.values(keys, places)
        # There are few different ones, however many keys.
        codes = before.astype(np.int64) << _PART_BITS | parts
        different, which, counts = np.unique(codes, return_inverse=True, return_counts=True)
        after, losses = np.zeros(len(different), dtype=np.uint32), []
        for at, code in enumerate(different.tolist()):
            masks = self._holdings.masks(code >> _PART_BITS)
            changed = change(masks, code & (PARTS_MAX - 1))
            after[at] = self._holdings.number_of(changed)
            self._holdings.count(int(after[at]), int(counts[at]))
            if lost := _lost(masks, changed):
                shards = tuple(sorted({one.shard for one in _without_ended(changed)}))
                gone = keys[which == at].tobytes()
                losses.append(Loss(keys=gone, parts=lost, shards=shards))
        # Only now: a number that was given up would be given again while keys still have it.
        for code, count in zip(different.tolist(), counts.tolist(), strict=True):
            self._holdings.count(code >> _PART_BITS, -count)
        self._table.put(keys, places, after[which])
        return losses

    def _end(self, shard: str) -> Incarnation | None:
        one = self._shards.pop(shard, None)
        if one is not None:
            one.is_ended = True
            self._ended.append(one)
            self._holdings.shards_changed()
        return one

    def _set_silent(self, shard: str, is_silent: bool) -> None:
        one = self._shards.get(shard)
        if one is not None and one.is_silent != is_silent:
            one.is_silent = is_silent
            self._holdings.shards_changed()

    def _to_purge(self) -> Array:
        """Return which holdings name somebody whose entries are to go."""
        chosen = np.zeros(len(self._holdings), dtype=bool)
        for one in self._ended:
            if _is_over(one):
                chosen[list(one.numbers)] = True
        return chosen


def _pack(keys: bytes) -> Array:
    if len(keys) % KEY_BYTES:
        raise ConfigError(f"{len(keys)} bytes are no whole number of keys of {KEY_BYTES}.")
    return np.frombuffer(keys, dtype="<u8").reshape(-1, 4)


def _entries(keys: bytes, parts: Sequence[int]) -> tuple[Array, Array]:
    packed = _pack(keys)
    if len(packed) != len(parts):
        raise ConfigError(f"{len(packed)} keys came with {len(parts)} parts; give one each.")
    if len(parts) and not 0 <= min(parts) <= max(parts) < PARTS_MAX:
        raise ConfigError(f"The parts of a block are 0 to {PARTS_MAX - 1}.")
    return packed, np.array(parts, dtype=np.int64)


def _rounds(packed: Array) -> Iterator[Array]:
    """Return rows such that no key is twice among those of one round."""
    order = np.argsort(packed[:, 0])
    words = packed[order, 0]
    same = np.flatnonzero(words[1:] == words[:-1]) + 1
    nth = np.zeros(len(words), dtype=np.int64)
    for at in same.tolist():
        nth[at] = nth[at - 1] + 1
    for number in range(int(nth.max(initial=-1)) + 1):
        yield np.sort(order[nth == number])


def _with(masks: Masks, one: Incarnation, mask: int) -> Masks:
    """Return `masks` with that of `one` replaced; what is empty is not in it."""
    others = {other: theirs for other, theirs in masks.items() if other is not one}
    return {**others, one: mask} if mask else others


def _is_over(one: Incarnation) -> bool:
    return one.is_ended and not one.is_kept


def _without_ended(masks: Masks) -> Masks:
    return {one: mask for one, mask in masks.items() if not _is_over(one)}


def _union(masks: Masks) -> int:
    union = 0
    for mask in masks.values():
        union |= mask
    return union


def _has_all(live: dict[str, int], whole: int) -> bool:
    for mask in live.values():
        whole &= ~mask
    return not whole


def _lost(before: Masks, after: Masks) -> int:
    """Return the parts that nobody has any more because a shard gave the whole block up.

    A shard that keeps other parts of the block has not given it up: it may have let go what lies
    outside a window, of which nobody is in need.
    """
    if not after:
        return 0
    stay = {one.shard for one in after}
    gone = {one: mask for one, mask in before.items() if one.shard not in stay}
    return _union(gone) & ~_union(after)
