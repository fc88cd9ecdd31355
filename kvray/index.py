"""The lookup's index: which shards hold which parts of which block."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvray.block import KEY_BYTES, BlockKey


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
        self._parts: dict[bytes, dict[str, int]] = {}
        self._entries: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def entries(self) -> dict[str, int]:
        """Return shard -> parts it has announced."""
        return dict(self._entries)

    def add(self, shard: str, keys: bytes, parts: Iterable[int]) -> None:
        """Enter parts of blocks that `shard` now has; `keys` end to end, 32 bytes each."""
        for key, part in zip(split_keys(keys), parts, strict=True):
            holders = self._parts.setdefault(key, {})
            before = holders.get(shard, 0)
            holders[shard] = before | 1 << part
            self._entries[shard] = self._entries.get(shard, 0) + (before != holders[shard])

    def remove(self, shard: str, keys: bytes, parts: Iterable[int]) -> None:
        """Take out parts that `shard` no longer has; unknown ones are passed over."""
        for key, part in zip(split_keys(keys), parts, strict=True):
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
        """
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


def split_keys(keys: bytes) -> list[bytes]:
    """Return the keys that lie end to end in `keys`."""
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
