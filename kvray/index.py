"""The lookup's index: which shards hold which parts of which block."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvray.block import KEY_BYTES, BlockKey
from kvray.errors import ConfigError

PARTS_MAX = 1024
"""Parts of a block that the index can tell apart: far more than any replica has ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest run of leading keys that one lookup found."""

    num_blocks: int
    holders: dict[str, int]
    """Shard -> leading blocks of which it has every part by itself."""


class Index:
    """Key -> holders; single-threaded, no clock, no I/O."""

    def __init__(self) -> None:
        """Start empty."""
        self._parts: dict[BlockKey, dict[str, int]] = {}
        self._entries: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def entries(self) -> dict[str, int]:
        """Return shard -> parts it has announced."""
        return dict(self._entries)

    def add(self, shard: str, keys: bytes, parts: Sequence[int]) -> None:
        """Enter parts of blocks that `shard` now has; `keys` end to end, 32 bytes each.

        Raises:
            ConfigError: there is not one part in range for each key; nothing was entered.
        """
        for key, part in _entries(keys, parts):
            holders = self._parts.setdefault(key, {})
            before = holders.get(shard, 0)
            holders[shard] = before | 1 << part
            self._entries[shard] = self._entries.get(shard, 0) + (before != holders[shard])

    def remove(self, shard: str, keys: bytes, parts: Sequence[int]) -> None:
        """Take out parts that `shard` no longer has; unknown ones are passed over.

        Raises:
            ConfigError: as `add`.
        """
        for key, part in _entries(keys, parts):
            holders = self._parts.get(key, {})
            before = holders.get(shard, 0)
            after = before & ~(1 << part)
            if after == before:
                continue
            self._entries[shard] -= 1
            if after:
                holders[shard] = after
                continue
            del holders[shard]
            if not holders:
                del self._parts[key]

    def drop(self, shard: str) -> None:
        """Forget all that `shard` has."""
        for key in [key for key, holders in self._parts.items() if shard in holders]:
            holders = self._parts[key]
            del holders[shard]
            if not holders:
                del self._parts[key]
        self._entries.pop(shard, None)

    def match(self, keys: Sequence[BlockKey], num_parts: int) -> Match:
        """Return the longest run of leading `keys` of which some shard has all parts.

        Args:
            keys: keys in prefix order.
            num_parts: parts that make a block whole.

        Raises:
            ConfigError: no block has that many parts.
        """
        if not 1 <= num_parts <= PARTS_MAX:
            raise ConfigError(f"num_parts must be 1 to {PARTS_MAX}, not {num_parts}.")
        whole = (1 << num_parts) - 1
        holders: dict[str, int] = {}
        for run, key in enumerate(keys):
            here = [s for s, parts in self._parts.get(key, {}).items() if parts & whole == whole]
            if not here:
                return Match(num_blocks=run, holders=holders)
            for shard in here:
                if holders.get(shard, 0) == run:
                    holders[shard] = run + 1
        return Match(num_blocks=len(keys), holders=holders)


def split_keys(keys: bytes) -> list[BlockKey]:
    """Return the keys that lie end to end in `keys`.

    Raises:
        ConfigError: the last one is not whole.
    """
    if len(keys) % KEY_BYTES:
        raise ConfigError(f"{len(keys)} bytes are no whole number of keys of {KEY_BYTES}.")
    return [BlockKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]


def _entries(keys: bytes, parts: Sequence[int]) -> Iterable[tuple[BlockKey, int]]:
    split = split_keys(keys)
    if len(split) != len(parts):
        raise ConfigError(f"{len(split)} keys came with {len(parts)} parts; give one each.")
    if parts and not 0 <= min(parts) <= max(parts) < PARTS_MAX:
        raise ConfigError(f"The parts of a block are 0 to {PARTS_MAX - 1}.")
    return zip(split, parts, strict=True)
