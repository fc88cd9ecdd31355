"""Key -> holders, for millions of blocks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES
from kvray.index.holdings import Holdings, Incarnation, Masks
from kvray.index.key_table import Array, KeyTable

PARTS_MAX = 1024
"""Parts of a block that the index can tell apart: far more than a replica has ranks."""

_PART_BITS = PARTS_MAX.bit_length() - 1
_WAYS_PURGED = 1000


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
    call takes long.
    """

    def __init__(self) -> None:
        self._table = KeyTable()
        self._holdings = Holdings()
        self._shards: dict[str, Incarnation] = {}
        # Ended incarnations that still have entries.
        self._ended: list[Incarnation] = []
        self._purged = 0

    def __len__(self) -> int:
        """Return the number of keys with a holder that was not dropped."""
        return sum(
            holding.num_keys
            for holding in self._holdings
            if not all(one.is_ended for one in holding.masks)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all entries, those to be purged included."""
        return self._table.num_bytes

    @property
    def is_purged(self) -> bool:
        """Whether no entries are left of shards that were dropped or started over."""
        return not any(one.numbers for one in self._ended)

    def entries(self) -> dict[str, int]:
        """Return shard -> number of its announced parts."""
        entries = dict.fromkeys(self._shards, 0)
        for holding in self._holdings:
            for one, mask in holding.masks.items():
                if not one.is_ended:
                    entries[one.shard] += holding.num_keys * mask.bit_count()
        return entries

    def add(self, shard: str, keys: bytes, parts: Sequence[int]) -> None:
        """Enter parts of blocks that `shard` now has, one part a key.

        ConfigError: keys and parts differ in number, or a part is out of range.
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
        """Remove parts that `shard` no longer has, if known; return the losses. Raises as `add`."""
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

    def settle(self, shard: str) -> None:
        """Note that `shard` has announced everything: its other former blocks are gone."""
        for one in self._ended:
            if one.shard == shard:
                one.is_kept = False

    def set_silent(self, shard: str, is_silent: bool) -> None:
        """Leave a silent `shard` out of answers; it still counts as a holder."""
        one = self._shards.get(shard)
        if one is not None:
            one.is_silent = is_silent

    def purge(self, slots_max: int) -> list[Loss]:
        """Remove some entries of shards that were dropped or started over; return the losses.

        Visits up to `slots_max` slots of the table; a key has about 3. It visits fewer while the
        entries to remove have many different holdings, each of which is work.
        """
        self._ended = [one for one in self._ended if one.numbers]
        # A mask of the holdings that name an incarnation to purge.
        chosen = np.zeros(len(self._holdings), dtype=bool)
        for one in self._ended:
            if _is_over(one):
                chosen[list(one.numbers)] = True
        if not chosen.any():
            return []
        slots_max = slots_max * _WAYS_PURGED // max(_WAYS_PURGED, int(np.count_nonzero(chosen)))
        stop = min(self._purged + slots_max, self._table.num_slots)
        keys = self._table.keys_with(chosen, self._purged, stop)
        self._purged = stop if stop < self._table.num_slots else 0
        no_parts = np.zeros(len(keys), dtype=np.int64)
        return self._change(keys, no_parts, lambda masks, _: _without_ended(masks))

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
            if whole & ~_union(run.holders.values()):
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
        numbers = self._table.values(packed, self._table.find(packed))
        stops = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(packed)]
        found: list[Run] = []
        for stop in stops if len(packed) else ():
            holders = self._holdings.live(int(numbers[stop - 1]))
            if found and found[-1].holders == holders:
                found.pop()
            found.append(Run(stop=stop, holders=holders))
        if found and not found[-1].holders:
            found.pop()
        return found

    def still_lost(self, keys: bytes, parts: int) -> bytes:
        """Return those of `keys` that lack a holder of `parts`; silent shards count."""
        packed = _pack(keys)
        numbers = self._table.values(packed, self._table.find(packed))
        different, which = np.unique(numbers, return_inverse=True)
        lost = [
            bool(parts & ~_union(_without_ended(self._holdings.masks(number)).values()))
            for number in different.tolist()
        ]
        still: bytes = packed[np.array(lost, dtype=bool)[which]].tobytes()
        return still

    def _change(
        self, keys: Array, parts: Array, change: Callable[[Masks, int], Masks]
    ) -> list[Loss]:
        """Change the holders of `keys`, no two of which are equal; return the losses."""
        places = self._table.find(keys)
        before = self._table.values(keys, places)
        # Keys are many, different pairs are few.
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
        # Last, so that no number is reused while keys still have it.
        for code, count in zip(different.tolist(), counts.tolist(), strict=True):
            self._holdings.count(code >> _PART_BITS, -count)
        self._table.put(keys, places, after[which])
        return losses

    def _end(self, shard: str) -> Incarnation | None:
        one = self._shards.pop(shard, None)
        if one is not None:
            one.is_ended = True
            self._ended.append(one)
        return one


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
    """Yield rows in rounds; no round has a key twice."""
    order = np.argsort(packed[:, 0])
    words = packed[order, 0]
    same = np.flatnonzero(words[1:] == words[:-1]) + 1
    nth = np.zeros(len(words), dtype=np.int64)
    for at in same.tolist():
        nth[at] = nth[at - 1] + 1
    for number in range(int(nth.max(initial=-1)) + 1):
        yield np.sort(order[nth == number])


def _with(masks: Masks, one: Incarnation, mask: int) -> Masks:
    """Return `masks` with the mask of `one` replaced; an empty mask is left out."""
    others = {other: theirs for other, theirs in masks.items() if other is not one}
    return {**others, one: mask} if mask else others


def _is_over(one: Incarnation) -> bool:
    return one.is_ended and not one.is_kept


def _without_ended(masks: Masks) -> Masks:
    return {one: mask for one, mask in masks.items() if not _is_over(one)}


def _union(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)


def _lost(before: Masks, after: Masks) -> int:
    """Return the parts without holders because a shard dropped the whole block.

    A shard that keeps other parts has not dropped the block: it may have evicted parts outside a
    window, which no engine needs.
    """
    if not after:
        return 0
    stay = {one.shard for one in after}
    gone = {one: mask for one, mask in before.items() if one.shard not in stay}
    return _union(gone.values()) & ~_union(after.values())
