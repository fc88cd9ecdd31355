"""The blocks that a publisher of KV events has, found by their tokens; pure.

Each publisher has hashes of its own. So a block is known by a digest of ours, chained over its
tokens and those before it, which a router makes of a prompt in the same way.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
from xxhash import xxh3_64_digest

from kvray.events.message import (
    GPU_MEDIUM,
    HOST_MEDIUM,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
)

_MEDIA = {GPU_MEDIUM: 1, HOST_MEDIUM: 2}
_OTHER = 4
_NEAR = _MEDIA[GPU_MEDIUM] | _MEDIA[HOST_MEDIUM]
"""Media that an engine reads far faster than it computes."""
TOKEN_BYTES = 4

_Key = tuple[int | None, int | None, int | bytes]
"""Data-parallel rank, layer group, and the publisher's hash."""


def chain_digests(packed: bytes, *, block_size: int, salt: str | None = None) -> list[bytes]:
    """Return a digest for each full block of a prompt; `packed` are its tokens as 32-bit numbers.

    Blocks of other salts have other digests, as far as their publisher tells salts apart: vLLM
    tells one with a prompt's first block.
    """
    return [*_chain(b"", packed, block_size, () if salt is None else (_extra(None, (salt,)),))]


class PoolContent:
    """A publisher's blocks, by what its batches say in order; of too many the oldest are forgotten.

    One thread applies batches. Others may read meanwhile, and see a state in between.
    """

    def __init__(self, *, blocks_max: int) -> None:
        self.is_whole = False
        """Whether nothing is missing: all batches since the publisher's start came."""
        self._blocks_max = blocks_max
        # The oldest first: digest, and a mask of the media that have the block.
        self._blocks: dict[_Key, tuple[bytes, int]] = {}
        self._near: Counter[bytes] = Counter()
        self._block_size = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def block_size(self) -> int:
        """Tokens in a block, as last heard; 0: nothing was stored yet."""
        return self._block_size

    @property
    def digests(self) -> frozenset[bytes]:
        """The digests of all blocks that an engine has in its own or its host's memory."""
        return frozenset(self._near)

    def leading(self, digests: Sequence[bytes]) -> int:
        """Return how many of a prompt's leading blocks are here.

        No engine keeps a block for long whose parent is gone: it cannot use it.
        """
        near = self._near
        if not digests or digests[0] not in near:
            return 0  # which is most often so
        return bisect_left(range(len(digests)), True, key=lambda at: digests[at] not in near)

    def apply(self, batch: Batch) -> None:
        """Take the next batch."""
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event, batch.dp_rank)
                case BlockRemoved():
                    for block in event.block_hashes:
                        self._change((batch.dp_rank, event.group_idx, block), event.medium)
                case AllBlocksCleared():
                    self.clear()
                    self.is_whole = True

    def clear(self) -> None:
        """Know nothing any more."""
        self.is_whole = False
        self._blocks.clear()
        self._near.clear()

    def _store(self, event: BlockStored, dp_rank: int | None) -> None:
        where = dp_rank, event.group_idx
        parent = b""
        if event.parent_block_hash is not None:
            known = self._blocks.get((*where, event.parent_block_hash))
            if known is None:
                return  # its tokens are not known, as a batch was lost
            parent = known[0]
        self._block_size = event.block_size
        packed = np.asarray(event.token_ids, dtype="<u4").tobytes()
        digests = _chain(parent, packed, event.block_size, _extras(event))
        for block, digest in zip(event.block_hashes, digests, strict=False):
            self._change((*where, block), event.medium, digest)

    def _change(self, key: _Key, medium: str | None, digest: bytes | None = None) -> None:
        """Note a block in a medium; without a digest, that it is there no longer."""
        bit = _MEDIA.get(medium or GPU_MEDIUM, _OTHER)
        before, mask = self._blocks.pop(key, (digest or b"", 0))
        self._count(before, mask, -1)
        mask = mask & ~bit if digest is None else mask | bit
        if mask:
            self._blocks[key] = (digest or before, mask)
            self._count(digest or before, mask, 1)
        if len(self._blocks) > self._blocks_max:
            self.is_whole = False
            self._count(*self._blocks.pop(next(iter(self._blocks))), -1)

    def _count(self, digest: bytes, mask: int, by: int) -> None:
        if mask & _NEAR:
            self._near[digest] += by
            if not self._near[digest]:
                del self._near[digest]


def _chain(
    parent: bytes, packed: bytes, block_size: int, extras: Sequence[bytes]
) -> Iterator[bytes]:
    size = block_size * TOKEN_BYTES
    for at, start in enumerate(range(0, len(packed) - size + 1, size)):
        extra = extras[at] if at < len(extras) else b""
        parent = xxh3_64_digest(parent + packed[start : start + size] + extra)
        yield parent


def _extras(event: BlockStored) -> Sequence[bytes]:
    """Return what else the hash of each block depends on, as bytes."""
    lora = event.lora_name if event.lora_name is not None else event.lora_id
    keys = event.extra_keys or ()
    if lora is None and not any(keys):
        return ()
    given = [*keys, *[None] * (len(event.block_hashes) - len(keys))]
    return [_extra(lora, one) for one in given]


def _extra(lora: str | int | None, keys: Any) -> bytes:
    if lora is None and not keys:
        return b""
    packed: bytes = msgpack.packb([lora, keys], default=str)
    return packed
