"""The paged KV pool, with the interface and the order of calls of TensorRT-LLM's `KVCacheManager`.

The pool is one contiguous tensor [num_blocks, num_layers, 2, kv_heads * tokens_per_block *
head_dim]: keys then values, and inside each heads x tokens x dim. A block id is a row.

A block is in use (its reference count is above zero), or kept (unreferenced, but its tokens can
still be reused), or blank. Blank blocks are taken first, then kept ones, least recently used first.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any
from weakref import WeakValueDictionary

import torch
from xxhash import xxh3_64_intdigest

from kvray.errors import CapacityError, KVRayError
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.engine_options import EngineOptions
from kvray.reference.model import KVGeometry
from kvray.reference.request import LlmRequest, LlmRequestState, ScheduledRequests

_PRIORITY = 35  # TensorRT-LLM's default
_FIRST_DUMMY_ID = 1 << 62


class KVCacheManager:
    """Gives requests their blocks and asks the connector which of them it can fill.

    With the option `poison`, every block that holds nobody's data is NaN. So a read of bytes that
    were never written or loaded shows in the answer. On a GPU only new ones are: the connector may
    read freed blocks until the next pass begins, and no engine writes them before.
    """

    def __init__(self, geometry: KVGeometry, options: EngineOptions) -> None:
        self.geometry = geometry
        self.tokens_per_block = size = options.tokens_per_block
        self.enable_block_reuse = options.enable_block_reuse
        self.enable_partial_reuse = options.enable_block_reuse and options.enable_partial_reuse
        self.connector: KvCacheConnectorManager | None = None
        self._max_draft_len = options.max_draft_len
        self._poison = options.poison
        self._events: KvCacheEvents | None = None
        if options.event_buffer_max_size:
            self._events = KvCacheEvents(
                options.event_buffer_max_size, window_size=options.num_blocks * size
            )
        self._blocks = BlockPool(options.num_blocks, tokens_per_block=size, events=self._events)
        shape = (options.num_blocks, geometry.num_layers, 2, geometry.block_size(size))
        # Zeros make every page real before the first request; NaN does it too.
        fill = float("nan") if options.poison else 0.0
        self._pool = torch.full(shape, fill, dtype=geometry.dtype, device=geometry.device)
        self._sequences: dict[int, list[int]] = {}
        self._pinned: dict[int, list[int]] = {}
        self._next_dummy_id = _FIRST_DUMMY_ID

    def get_unique_primary_pool(self) -> torch.Tensor:
        """Return the whole pool, the tensor that `register_kv_caches` takes."""
        return self._pool

    def get_buffers(self, layer_idx: int) -> torch.Tensor:
        """Return one layer as a view [num_blocks, 2, kv_heads, tokens_per_block, head_dim]."""
        shape = (self.geometry.num_kv_heads, self.tokens_per_block, self.geometry.head_dim)
        return self._pool[:, layer_idx].view(-1, 2, *shape)

    def get_max_resource_count(self) -> int:
        return self._blocks.num_blocks

    def get_num_free_blocks(self) -> int:
        """Return how many blocks no request and no save holds."""
        return self._blocks.num_free

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Return the blocks of prompt, longest answer and drafts, those already held included."""
        return self._num_blocks(
            request.orig_prompt_len + request.max_new_tokens + self._max_draft_len
        )

    def get_needed_beyond_held(self, request: LlmRequest) -> int:
        """Return the blocks that the request may still ask for."""
        held = len(self._sequences.get(request.request_id, ()))
        return max(self.get_needed_resource_to_completion(request) - held, 0)

    def get_cache_indices(self, request: LlmRequest) -> list[int]:
        """Return the ids of the request's blocks in the order of its tokens; KVRayError if none."""
        try:
            return list(self._sequences[request.request_id])
        except KeyError:
            raise KVRayError(f"Request {request.request_id} holds no blocks.") from None

    def get_latest_events(self) -> list[dict[str, Any]]:
        """Return the pool's events since the last call; any thread may ask."""
        return [] if self._events is None else self._events.take()

    def prepare_resources(self, batch: ScheduledRequests) -> None:
        """Give every request of the batch the blocks of its coming pass.

        A request that begins is matched locally, then the connector is asked for more and told the
        blocks.
        """
        for request in batch.context_requests:
            if request.is_first_context_chunk:
                self._add_sequence(request)
        for request in batch.generation_requests:
            # Room for the KV of the newest token and of the drafts after it.
            block_ids = self._sequences[request.request_id]
            num_tokens = request.num_computed_tokens + 1 + len(request.py_draft_tokens)
            block_ids.extend(self._allocate(max(self._num_blocks(num_tokens) - len(block_ids), 0)))
        if self.connector is not None:
            self.connector.build_scheduler_output(batch, self.get_cache_indices)

    def update_resources(self, batch: ScheduledRequests) -> None:
        """Let others find the prompts that the pass has computed to their end, and rewind.

        Source: `KVCacheManager::rewindKVCache`, which releases the last block while it is unused.
        """
        for request in batch.context_requests:
            if request.context_remaining_length == 0 and request.request_id in self._sequences:
                self._remember(request, request.get_tokens(0)[: request.prompt_len])
        for request in batch.generation_requests:
            # Blocks that only rejected drafts have used go to others.
            block_ids = self._sequences.get(request.request_id, [])
            num_kept = self._num_blocks(request.num_computed_tokens)
            self._release(block_ids[num_kept:])
            del block_ids[num_kept:]

    def store_blocks_for_reuse(self, request: LlmRequest, *, pin: bool = False) -> None:
        """Let other requests find the request's blocks; with `pin`, hold them until `unpin`."""
        self._remember(request, self._computed_tokens(request))
        if pin:
            block_ids = self.get_cache_indices(request)
            self._blocks.reference(block_ids)
            self._pinned[request.request_id] = block_ids

    def unpin(self, request: LlmRequest) -> None:
        """Release the blocks that an asynchronous save has read."""
        self._release(self._pinned.pop(request.request_id, []))

    def reset_reuse_state(self) -> None:
        """Let no request find the blocks of earlier ones; those that requests hold stay theirs."""
        self._fill(self._blocks.forget_all())

    def free_resources(self, request: LlmRequest) -> None:
        """Take the request's blocks back. Doing it twice is fine."""
        block_ids = self._sequences.get(request.request_id)
        if block_ids is None:
            return
        if request.finish_reason not in {"cancelled", "error"}:
            self._remember(request, self._computed_tokens(request))
        del self._sequences[request.request_id]
        self._release(block_ids)

    def add_padding_request(self) -> LlmRequest | None:
        """Return a dummy that generates; None without free blocks.

        A connector never hears of it, and `free_resources` takes its block back.
        """
        request = LlmRequest(self._next_dummy_id, [0], max_new_tokens=1, is_dummy=True)
        try:
            self._sequences[request.request_id] = self._allocate(1)
        except CapacityError:
            return None
        self._next_dummy_id += 1
        request.state = LlmRequestState.GENERATION_IN_PROGRESS
        return request

    def _add_sequence(self, request: LlmRequest) -> None:
        """Source: `KVCacheManager::addSequence`; the blocks are allocated before the question."""
        match = LocalMatch()
        if self.enable_block_reuse:
            match = self._blocks.match(
                request.get_tokens(0)[: request.prompt_len - 1],
                namespace=request.cache_salt,
                allow_partial=self.enable_partial_reuse,
            )
        local = self._allocate_sequence(request, match)
        matched = 0
        if self.connector is not None:
            matched = self.connector.get_num_new_matched_tokens(request, local)
        if self.enable_block_reuse:
            request.reused_tokens = local
            request.set_prepopulated_prompt_len(local + matched, self.tokens_per_block)
        if self.connector is not None:
            self.connector.update_state_after_alloc(request, self.get_cache_indices(request))

    def _allocate_sequence(self, request: LlmRequest, match: LocalMatch) -> int:
        """Give the request all blocks of its prompt and return how many tokens they hold."""
        held = list(match.block_ids)
        num_tokens = len(held) * self.tokens_per_block
        num_fresh = self._num_blocks(request.prompt_len) - len(held)
        source = [] if match.partial_block_id is None else [match.partial_block_id]
        self._blocks.reference(held + source)
        if source and num_fresh > self._blocks.num_free:
            self._release(source)  # the block to copy from is one of those that are needed
            source = []
        try:
            fresh = self._allocate(num_fresh)
        except CapacityError:
            self._release(held)
            raise
        if source:
            for layer_index in range(self.geometry.num_layers):
                rows = self.get_buffers(layer_index)[:, :, :, : match.num_partial_tokens]
                rows[fresh[0]] = rows[source[0]]
            num_tokens += match.num_partial_tokens
            self._release(source)
        self._sequences[request.request_id] = [*held, *fresh]
        return num_tokens

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_block)

    def _allocate(self, count: int) -> list[int]:
        block_ids = self._blocks.allocate(count)
        self._fill(block_ids)
        return block_ids

    def _release(self, block_ids: Sequence[int]) -> None:
        self._fill(self._blocks.release(block_ids))

    def _fill(self, block_ids: Sequence[int]) -> None:
        if self._poison and block_ids and self._pool.device.type == "cpu":
            self._pool[list(block_ids)] = float("nan")

    def _computed_tokens(self, request: LlmRequest) -> list[int]:
        """Source: `releaseBlocks` assumes that the last token has no KV yet."""
        tokens = request.get_tokens(0)
        return tokens[: min(request.num_computed_tokens, len(tokens) - 1)]

    def _remember(self, request: LlmRequest, tokens: list[int]) -> None:
        if self.enable_block_reuse and not request.is_dummy:
            self._blocks.remember(
                tokens,
                self._sequences[request.request_id],
                namespace=request.cache_salt,
                keep_tail=self.enable_partial_reuse,
            )


class KvCacheEvents:
    """A buffer of events, in the shape in which TensorRT-LLM's `get_kv_cache_events` has them.

    Of too many the oldest go, which shows as a gap in their numbers. The executor's thread adds,
    any other takes.
    """

    def __init__(self, events_max: int, *, window_size: int) -> None:
        self._ids = itertools.count()
        self._window_size = window_size
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque(maxlen=events_max)

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
        self.add({"type": "stored", "parent_hash": parent_hash, "blocks": told})

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        with self._lock:
            events = [*self._events]
            self._events.clear()
        return events

    def add(self, data: dict[str, Any]) -> None:
        """Enter an event."""
        event = {"event_id": next(self._ids), "data": data, "window_size": self._window_size}
        with self._lock:
            self._events.append(event)


def block_hash(parent_hash: int | None, tokens: Sequence[int], *, salt: Hashable) -> int:
    """Return the hash of a block, which depends on all before it and on the salt."""
    return xxh3_64_intdigest(repr((parent_hash, tokens, salt)).encode())


Tokens = tuple[int, ...]


@dataclass(eq=False)
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
            events.add({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})
        self._references = [0] * num_blocks
        self._blank: deque[int] = deque(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._nodes: dict[int, _Node] = {}
        self._roots: WeakValueDictionary[Hashable, _Node] = WeakValueDictionary()
        """The root of each namespace; the blocks below keep it."""

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
            self._events.add({"type": "removed", "block_hashes": hashes[::-1]})


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
