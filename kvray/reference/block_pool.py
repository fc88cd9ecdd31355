"""The owners and the tokens of each block of the pool: pure bookkeeping.

A block is in use (its reference count is above zero), or kept (unreferenced, but its tokens can
still be reused), or blank. Blank blocks are taken first, then kept ones, least recently used first.
Events have the shape in which TensorRT-LLM's `get_kv_cache_events` has them.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from xxhash import xxh3_64_intdigest

from kvray.errors import CapacityError

_PRIORITY = 35  # TensorRT-LLM's default


class KvCacheEvents:
    """A buffer of events: of too many the oldest go, which shows as a gap in their numbers.

    The executor's thread adds, any other takes.
    """

    def __init__(self, events_max: int, *, window_size: int) -> None:
        self._ids = itertools.count()
        self._window_size = window_size
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque(maxlen=events_max)

    def created(self, num_blocks: int) -> None:
        self._add({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})

    def stored(
        self,
        parent_hash: int | None,
        blocks: Sequence[tuple[int, Sequence[int]]],
        *,
        salt: Hashable,
    ) -> None:
        """Tell of new blocks of one chain: their hashes and tokens."""
        told: list[dict[str, Any]] = [
            {
                "type": "stored_block",
                "block_hash": block_hash,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in tokens
                ],
                "cache_level": 0,
                "priority": _PRIORITY,
                "mm_keys": [],
                "cache_salt": salt,
            }
            for block_hash, tokens in blocks
        ]
        self._add({"type": "stored", "parent_hash": parent_hash, "blocks": told})

    def removed(self, block_hashes: Sequence[int]) -> None:
        self._add({"type": "removed", "block_hashes": [*block_hashes]})

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        with self._lock:
            events = [*self._events]
            self._events.clear()
        return events

    def _add(self, data: dict[str, Any]) -> None:
        event = {"event_id": next(self._ids), "data": data, "window_size": self._window_size}
        with self._lock:
            self._events.append(event)


def block_hash(parent_hash: int | None, tokens: Sequence[int], *, salt: Hashable) -> int:
    """Return the hash of a block, which depends on all before it and on the salt."""
    return xxh3_64_intdigest(repr((parent_hash, tokens, salt)).encode())


Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A block with reusable content; its parent holds the tokens before it."""

    tokens: Tokens
    block_id: int
    parent: _Node | None
    hash: int | None = None
    children: dict[Tokens, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMatch:
    """Full blocks at the head of a prompt, and perhaps one more that shares some tokens."""

    block_ids: tuple[int, ...] = ()
    partial_block_id: int | None = None
    num_partial_tokens: int = 0


class BlockPool:
    """Reference counts of `num_blocks` blocks and a prefix tree over the reusable ones.

    A child is never kept longer than its parent. The owner of a block owns all blocks before it,
    and evicting a block forgets all that follow it.
    """

    def __init__(
        self, num_blocks: int, *, tokens_per_block: int, events: KvCacheEvents | None = None
    ) -> None:
        """`events` hears of each block that becomes findable, and of its end."""
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._events = events
        if events is not None:
            events.created(num_blocks)
        self._references = [0] * num_blocks
        self._blank: deque[int] = deque(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._nodes: dict[int, _Node] = {}
        self._roots: dict[Hashable, _Node] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that nobody references."""
        return len(self._blank) + len(self._kept)

    def match(
        self, tokens: Sequence[int], *, namespace: Hashable, allow_partial: bool
    ) -> LocalMatch:
        """Return the blocks that hold the leading tokens; references are not counted yet."""
        node = self._roots.get(namespace)
        if node is None:
            return LocalMatch()
        block_ids: list[int] = []
        for chunk in self._full_chunks(tokens):
            child = node.children.get(chunk)
            if child is None:
                break
            block_ids.append(child.block_id)
            node = child
        rest = tokens[len(block_ids) * self.tokens_per_block :]
        best, length = _best_child(node, rest) if allow_partial else (None, 0)
        return LocalMatch(
            block_ids=tuple(block_ids),
            partial_block_id=None if best is None else best.block_id,
            num_partial_tokens=length,
        )

    def allocate(self, count: int) -> list[int]:
        """Reference `count` blocks and forget their content; CapacityError changes nothing."""
        if count > self.num_free:
            raise CapacityError(
                f"The pool has {self.num_free} free blocks of {self.num_blocks}, {count} are "
                "needed; give the engine more blocks or fewer requests at a time."
            )
        return [self._take() for _ in range(count)]

    def reference(self, block_ids: Sequence[int]) -> None:
        """Count one more owner of each block."""
        for block_id in block_ids:
            self._references[block_id] += 1
            self._kept.pop(block_id, None)

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """Count one owner less and return the blocks that became blank.

        The tail is evicted first, since nothing behind a gap can be reused.
        """
        blank: list[int] = []
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, "a block is released as often as referenced"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                if block_id in self._nodes:
                    self._kept[block_id] = None
                else:
                    self._blank.append(block_id)
                    blank.append(block_id)
        return blank

    def remember(
        self,
        tokens: Sequence[int],
        block_ids: Sequence[int],
        *,
        namespace: Hashable,
        keep_tail: bool,
    ) -> None:
        """Make the blocks of `tokens` findable; equal blocks that are findable already stay."""
        node = self._roots.setdefault(namespace, _Node((), -1, None))
        chunks = list(self._full_chunks(tokens))
        new: list[_Node] = []
        tail = tuple(tokens[len(chunks) * self.tokens_per_block :])
        if keep_tail and tail:
            chunks.append(tail)
        for chunk, block_id in zip(chunks, block_ids, strict=False):
            child = node.children.get(chunk)
            if child is None:
                if block_id in self._nodes:
                    self._forget(self._nodes[block_id])
                child = _Node(chunk, block_id, node)
                if self._events is not None:
                    child.hash = block_hash(node.hash, chunk, salt=namespace)
                node.children[chunk] = self._nodes[block_id] = child
                new.append(child)
            node = child
        if new and self._events is not None:
            assert new[0].parent is not None, "only a root has no parent"
            told = [(one.hash or 0, one.tokens) for one in new]
            self._events.stored(new[0].parent.hash, told, salt=namespace)

    def forget_all(self) -> list[int]:
        """Let no block be found any more, and return the blocks that became blank."""
        blank = list(self._kept)
        for root in self._roots.values():
            for node in list(root.children.values()):
                self._forget(node)
        return blank

    def _full_chunks(self, tokens: Sequence[int]) -> Iterator[Tokens]:
        size = self.tokens_per_block
        for start in range(0, len(tokens) - size + 1, size):
            yield tuple(tokens[start : start + size])

    def _take(self) -> int:
        if self._blank:
            block_id = self._blank.popleft()
        else:
            block_id, _ = self._kept.popitem(last=False)
            self._forget(self._nodes[block_id])
        self._references[block_id] = 1
        return block_id

    def _forget(self, node: _Node) -> None:
        """Take a node and all below it out of the tree; kept blocks below become blank."""
        assert node.parent is not None, "a root has no block"
        if node.parent.children.get(node.tokens) is node:
            del node.parent.children[node.tokens]
        stack, hashes = [node], []
        while stack:
            gone = stack.pop()
            hashes.append(gone.hash or 0)
            stack.extend(gone.children.values())
            gone.children.clear()
            del self._nodes[gone.block_id]
            if gone.block_id in self._kept:
                del self._kept[gone.block_id]
                self._blank.append(gone.block_id)
        if self._events is not None:
            self._events.removed(hashes[::-1])


def _best_child(node: _Node, tokens: Sequence[int]) -> tuple[_Node | None, int]:
    """Return the child that shares the most leading tokens, and how many."""
    best: _Node | None = None
    length = 0
    for child in node.children.values():
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(tokens, child.tokens, strict=False))
        shared = sum(1 for _ in alike)
        if shared > length:
            best, length = child, shared
    return best, length
