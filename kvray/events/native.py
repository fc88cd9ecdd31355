"""TensorRT-LLM's own events of its pool, as events that every router reads; pure.

docs/kv_events.md has the shapes, which differ by version. An engine tells of partial blocks, of
each attention window, and of each rank for itself; a router wants full blocks, of the widest
window, that some rank has. Prompts with a salt, an adapter or media stay inside, as the engine
tells of them: no router could find them by their tokens.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvray.events.message import (
    DISK_MEDIUM,
    GPU_MEDIUM,
    HOST_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)

_LEVELS = (GPU_MEDIUM, HOST_MEDIUM)
_Hash = int | bytes


@dataclass(slots=True, kw_only=True)
class _Block:
    parent: _Hash | None
    tokens: tuple[int, ...]
    holders: dict[int, str] = field(default_factory=dict)
    """Rank -> the medium in which it has the block."""


class NativePool:
    """What the engine has, by its events; as large as the engine's own pool."""

    def __init__(self, *, block_size: int) -> None:
        self.num_gaps = 0
        self.num_unread = 0
        self._block_size = block_size
        self._blocks: dict[_Hash, _Block] = {}  # parents first
        self._window = 0
        self._last: dict[int, int] = {}
        """Rank -> the number of its latest event."""

    def num_blocks(self) -> int:
        """Return how many blocks there are."""
        return len(self._blocks)

    def stored(self, step: int) -> Iterator[Sequence[Event]]:
        """Yield events that store everything, about `step` blocks at a time."""
        hashes = [*self._blocks]
        for start in range(0, len(hashes), step):
            part = [one for one in hashes[start : start + step] if one in self._blocks]
            yield [*self._runs(part)]

    def take(self, items: Iterable[Any]) -> list[Event]:
        """Return what the engine's next events mean: maps, lists of them, or either as JSON.

        Events that were lost take all that was known with them: some of it may be gone.
        """
        made: list[Event] = []
        for event in _flat(items):
            try:
                made += self._take(event)
            except (KeyError, TypeError, ValueError, AttributeError):
                self.num_unread += 1
        return made

    def _take(self, event: Mapping[str, Any]) -> Iterator[Event]:
        data, rank = event["data"], event.get("attention_dp_rank") or 0
        yield from self._follow(rank, event["event_id"], event.get("window_size") or 0)
        if (event.get("window_size") or 0) < self._window:
            return
        match data["type"]:
            case "stored":
                yield from self._store(rank, data)
            case "removed":
                yield from self._remove(rank, map(_hash, data["block_hashes"]))
            case "updated" if data.get("cache_level") is not None:
                block = _hash(data["block_hash"])
                if block in self._blocks and rank in self._blocks[block].holders:
                    medium = _medium(data["cache_level"]["new_value"])
                    yield from self._put(rank, [block], medium)

    def _follow(self, rank: int, number: int, window: int) -> Iterator[Event]:
        """Begin again after a gap, or with a wider window than those before."""
        is_gap = number != self._last.get(rank, number - 1) + 1
        self._last[rank] = number
        self.num_gaps += is_gap
        if self._blocks and (is_gap or window > self._window):
            self._blocks.clear()
            yield AllBlocksCleared()
        self._window = max(window, self._window)

    def _store(self, rank: int, data: Mapping[str, Any]) -> Iterator[Event]:
        parent = _hash(data["parent_hash"]) or None
        if data.get("lora_name") or (parent is not None and parent not in self._blocks):
            return
        hashes: dict[str, list[_Hash]] = {}
        for one in data["blocks"]:
            block = _Block(parent=parent, tokens=tuple(map(_token, one["tokens"])))
            parent = _hash(one["block_hash"])
            if parent is None or len(block.tokens) != self._block_size or not _is_plain(one):
                break  # only the last one is partial, and what follows another is none of ours
            self._blocks.setdefault(parent, block)
            hashes.setdefault(_medium(one.get("cache_level", 0)), []).append(parent)
        for medium, found in hashes.items():
            yield from self._put(rank, found, medium)

    def _put(self, rank: int, hashes: Sequence[_Hash], medium: str) -> Iterator[Event]:
        """Note that a rank has blocks in a medium, and no longer in another."""
        new = [one for one in hashes if medium not in self._blocks[one].holders.values()]
        left: dict[str, list[_Hash]] = {}
        for one in hashes:
            holders = self._blocks[one].holders
            before, holders[rank] = holders.get(rank, medium), medium
            if before not in holders.values():
                left.setdefault(before, []).append(one)
        yield from self._runs(new, medium)
        for before, found in left.items():
            yield BlockRemoved(block_hashes=found, medium=before)

    def _remove(self, rank: int, hashes: Iterable[_Hash | None]) -> Iterator[Event]:
        gone: dict[str, list[_Hash]] = {}
        for one in hashes:
            if one is None or (block := self._blocks.get(one)) is None:
                continue  # a partial one
            medium = block.holders.pop(rank, None)
            if medium is not None and medium not in block.holders.values():
                gone.setdefault(medium, []).append(one)
            if not block.holders:
                del self._blocks[one]
        for medium, found in gone.items():
            yield BlockRemoved(block_hashes=found, medium=medium)

    def _runs(self, hashes: Iterable[_Hash], medium: str | None = None) -> Iterator[BlockStored]:
        """Yield events that store blocks in a medium, or in all that have them, a chain in each."""
        run: list[_Hash] = []
        media: set[str] = set()
        for one in hashes:
            block = self._blocks[one]
            own = {medium} if medium else {*block.holders.values()}
            if run and (block.parent != run[-1] or own != media):
                yield from (self._event(run, where) for where in media)
                run = []
            run.append(one)
            media = own
        yield from (self._event(run, where) for where in media)

    def _event(self, run: Sequence[_Hash], medium: str) -> BlockStored:
        blocks = [self._blocks[one] for one in run]
        return BlockStored(
            block_hashes=tuple(run),
            parent_block_hash=blocks[0].parent,
            token_ids=[token for block in blocks for token in block.tokens],
            block_size=self._block_size,
            medium=medium,
        )


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, str | bytes):
            yield from _flat([json.loads(item)])
        elif isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


def _hash(given: Any) -> _Hash | None:
    """Return a block's hash; text becomes bytes, as a message has numbers and bytes."""
    if given is None or isinstance(given, int | bytes):
        return given
    return str(given).encode()


def _token(given: Any) -> int:
    return int(given["token_id"] if isinstance(given, Mapping) else given)


def _medium(level: int) -> str:
    return _LEVELS[level] if level < len(_LEVELS) else DISK_MEDIUM


def _is_plain(block: Mapping[str, Any]) -> bool:
    """Whether a block hangs on tokens alone, as far as the engine says."""
    extras = (one.get("token_extra_id") for one in block["tokens"] if isinstance(one, Mapping))
    is_salted = block.get("cache_salt") is not None
    return not (is_salted or block.get("lora_id") or block.get("mm_keys") or any(extras))
