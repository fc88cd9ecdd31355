"""TensorRT-LLM's own events of its pool, as events that every router reads; pure.

docs/kv_events.md has the shapes, which differ by version. An engine tells of partial blocks, of
each attention window, and of each rank for itself; a router wants full blocks, of the widest
window, that some rank has. Prompts with a salt, an adapter or media stay inside, as the engine
tells of them: no router could find them by their tokens.

A log has the batches that a publisher has sent, numbered, the latest kept for replay.
"""

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvray.events.message import (
    DISK_MEDIUM,
    GPU_MEDIUM,
    HASH_BYTES_MAX,
    HOST_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
)

_LEVELS = (GPU_MEDIUM, HOST_MEDIUM)
_Hash = int | bytes
_BLOCKS_MAX = 1_000_000
"""Of blocks beyond them nothing is said; no engine has as many."""
_RANKS_MAX = 4096
_DEPTH_MAX = 4  # of lists in lists
_BAD = (KeyError, TypeError, ValueError, AttributeError, RecursionError)
"""What reading an event raises that is in no form that is known."""


@dataclass(slots=True, kw_only=True)
class _Block:
    number: int
    """Of blocks in the order in which they came: parents first."""
    parent: _Hash | None
    tokens: tuple[int, ...]
    holders: dict[int, str] = field(default_factory=dict)
    """Rank -> the medium in which it has the block."""


class NativePool:
    """What the engine has, by its events; as large as the engine's own pool.

    An event that cannot be read costs itself only.
    """

    def __init__(self, *, block_size: int) -> None:
        self.num_gaps = 0
        self.num_unread = 0
        self._block_size = block_size
        self._blocks: dict[_Hash, _Block] = {}
        # Numbers and hashes of blocks as they came, with some that have gone since.
        self._numbers: list[int] = []
        self._hashes: list[_Hash] = []
        self._window = 0
        self._last: dict[int, int] = {}
        """Rank -> the number of its latest event."""

    def num_blocks(self) -> int:
        """Return how many blocks there are."""
        return len(self._blocks)

    def clear(self) -> None:
        """Know of no block any more."""
        for kept in (self._blocks, self._numbers, self._hashes):
            kept.clear()

    def page(self, after: int, step: int) -> tuple[Sequence[Event], int | None]:
        """Return events that store the next `step` blocks or so; see `Content.page`."""
        start = bisect_right(self._numbers, after)
        end = start + step
        here = zip(self._numbers[start:end], self._hashes[start:end], strict=True)
        part = [
            one
            for number, one in here
            if (block := self._blocks.get(one)) is not None and block.number == number
        ]
        more = self._numbers[end - 1] if end < len(self._numbers) else None
        return [*self._runs(part)], more

    def take(self, items: Iterable[Any]) -> list[Event]:
        """Return what the engine's next events mean: maps, lists of them, or either as JSON.

        Events that were lost take all that was known with them: some of it may be gone.
        """
        made: list[Event] = []
        for event in _flat(items, _DEPTH_MAX):
            try:
                made += self._take(event)
            except _BAD:
                self.num_unread += 1
        return made

    def _take(self, event: Mapping[str, Any]) -> Iterator[Event]:
        data, window = event["data"], _number(event.get("window_size") or 0, 2**63)
        rank = _number(event.get("attention_dp_rank") or 0, _RANKS_MAX)
        yield from self._follow(rank, _number(event["event_id"], 2**63), window)
        if window < self._window:
            return
        match data["type"]:
            case "stored":
                yield from self._store(rank, data)
            case "removed":
                yield from self._remove(rank, [*data["block_hashes"]])
            case "updated" if data.get("cache_level") is not None:
                block = _hash(data["block_hash"])
                medium = _medium(data["cache_level"]["new_value"])
                if block in self._blocks and rank in self._blocks[block].holders:
                    yield from self._put(rank, [block], medium)

    def _follow(self, rank: int, number: int, window: int) -> Iterator[Event]:
        """Begin again after a gap, or with a wider window than those before."""
        is_gap = number != self._last.get(rank, -1) + 1
        self._last[rank] = number
        self.num_gaps += is_gap
        if self._blocks and (is_gap or window > self._window):
            self.clear()
            yield AllBlocksCleared()
        self._window = max(window, self._window)

    def _store(self, rank: int, data: Mapping[str, Any]) -> Iterator[Event]:
        parent = _hash(data["parent_hash"]) or None
        if data.get("lora_name") or (parent is not None and parent not in self._blocks):
            return
        hashes: dict[str, list[_Hash]] = {}
        for own, tokens, medium in self._plain(data["blocks"]):
            if own not in self._blocks:
                if len(self._blocks) >= _BLOCKS_MAX:
                    break
                self._add(own, parent, tokens)
            hashes.setdefault(medium, []).append(own)
            parent = own
        for medium, found in hashes.items():
            yield from self._put(rank, found, medium)

    def _plain(self, blocks: Iterable[Any]) -> Iterator[tuple[_Hash, tuple[int, ...], str]]:
        """Yield hash, tokens and medium of blocks, up to one that is no full and plain one.

        Only the last one is partial, and what follows another is none of ours.
        """
        for one in blocks:
            try:
                own, tokens = _hash(one["block_hash"]), tuple(map(_token, one["tokens"]))
                medium = _medium(one.get("cache_level", 0))
                if own is None or len(tokens) != self._block_size or not _is_plain(one):
                    return
            except _BAD:
                self.num_unread += 1
                return
            yield own, tokens, medium

    def _add(self, own: _Hash, parent: _Hash | None, tokens: tuple[int, ...]) -> None:
        """Enter a new block, in no medium yet."""
        if len(self._numbers) > 2 * len(self._blocks) + 1000:
            held = [(block.number, one) for one, block in self._blocks.items()]
            self._numbers[:] = [number for number, _ in held]
            self._hashes[:] = [one for _, one in held]
        number = self._numbers[-1] + 1 if self._numbers else 1
        self._blocks[own] = _Block(number=number, parent=parent, tokens=tokens)
        self._numbers.append(number)
        self._hashes.append(own)

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

    def _remove(self, rank: int, hashes: Iterable[Any]) -> Iterator[Event]:
        gone: dict[str, list[_Hash]] = {}
        for given in hashes:
            try:
                one = _hash(given)
            except ValueError:
                continue
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


def _flat(items: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield events one by one; None for what is none."""
    for item in items:
        if isinstance(item, str | bytes):
            try:
                item = json.loads(item)  # noqa: PLW2901 - the same in another form
            except (ValueError, RecursionError):
                item = None  # noqa: PLW2901
        if isinstance(item, list | tuple) and depth:
            yield from _flat(item, depth - 1)
        else:
            yield item


def _hash(given: Any) -> _Hash | None:
    """Return a block's hash; text becomes bytes, as a message has numbers and bytes."""
    if given is None:
        return None
    own = given if isinstance(given, int | bytes) else str(given).encode()
    if len(own) > HASH_BYTES_MAX if isinstance(own, bytes) else not -(2**63) <= own < 2**64:
        raise ValueError("a hash has 64 bits, or some bytes")
    return own


def _number(given: Any, end: int) -> int:
    """Return a number from 0 to below `end`; ValueError: it is none."""
    if not isinstance(given, int) or not 0 <= given < end:
        raise ValueError(f"{given!r:.40} is no number below {end}")
    return given


def _token(given: Any) -> int:
    return _number(given["token_id"] if isinstance(given, Mapping) else given, 2**32)


def _medium(level: Any) -> str:
    level = _number(level, 2**31)
    return _LEVELS[level] if level < len(_LEVELS) else DISK_MEDIUM


def _is_plain(block: Mapping[str, Any]) -> bool:
    """Whether a block hangs on tokens alone, as far as the engine says."""
    extras = (one.get("token_extra_id") for one in block["tokens"] if isinstance(one, Mapping))
    is_salted = block.get("cache_salt") is not None
    return not (is_salted or block.get("lora_id") or block.get("mm_keys") or any(extras))


class EventLog:
    """Of one publisher; batches are packed."""

    def __init__(self, first: int, *, batches_max: int, bytes_max: int) -> None:
        """Number batches from `first` on.

        A publisher that starts again begins above its last number: what is below the number that a
        subscriber has seen is nothing new to it.
        """
        self._batches: deque[bytes] = deque()
        self._bytes = 0
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self.oldest = first
        """The first number that is kept, or the next one."""

    @property
    def last(self) -> int:
        """The number of the latest batch; before the first one, the number below it."""
        return self.oldest + len(self._batches) - 1

    def add(self, payload: bytes) -> int:
        """Keep a batch and return its number; the oldest go beyond the bounds."""
        self._batches.append(payload)
        self._bytes += len(payload)
        while len(self._batches) > self._batches_max or self._bytes > self._bytes_max:
            self._bytes -= len(self._batches.popleft())
            self.oldest += 1
        return self.last

    def __getitem__(self, number: int) -> bytes:
        """Return the batch of a number from `oldest` to `last`."""
        return self._batches[number - self.oldest]
