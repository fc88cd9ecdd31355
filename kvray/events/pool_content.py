"""The blocks that a publisher of KV events has, found by their tokens; pure.

Each publisher has hashes of its own. So a block is known by a digest of ours, chained over its
tokens and those before it, which a router makes of a prompt in the same way.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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

_FULL_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
"""What a layer group keeps that every prompt can begin with; None: a publisher that tells no kinds.

Of a window or a state an engine keeps some places of a prompt, so their blocks say little.
"""
_GROUPS_MAX = 64

_Key = tuple[int | None, int | None, int | bytes]
"""Data-parallel rank, layer group, and the publisher's hash."""
_Group = tuple[int | None, int]
"""Layer group and tokens in a block."""


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
        # The oldest first: digest, a mask of the media that have the block, and its tokens.
        self._blocks: dict[_Key, tuple[bytes, int, int]] = {}
        self._near: dict[_Group, Counter[bytes]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def block_sizes(self) -> frozenset[int]:
        """Tokens in a block, of each layer group that has stored some."""
        return frozenset(size for _, size in tuple(self._near))

    @property
    def digests(self) -> frozenset[bytes]:
        """The digests of all blocks that an engine has in its own or its host's memory."""
        return frozenset(one for near in self._near.values() for one in near)

    def num_tokens(self, digests: Mapping[int, Sequence[bytes]]) -> int:
        """Return how many of a prompt's leading tokens every layer group has here.

        `digests` are the prompt's for each of `block_sizes`. No engine keeps a block for long whose
        parent is gone: it cannot use it.
        """
        groups = tuple(self._near.items())
        known = (size * _leading(near, digests.get(size, ())) for (_, size), near in groups)
        return min(known, default=0)

    def apply(self, batch: Batch) -> None:
        """Take the next batch."""
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event, batch.dp_rank)
                case BlockRemoved():
                    bit = _bit(event)
                    for block in event.block_hashes:
                        key = batch.dp_rank, event.group_idx, block
                        if (known := self._blocks.get(key)) is not None:
                            self._put(key, known[0], known[1] & ~bit, known[2])
                case AllBlocksCleared():
                    self.clear()
                    self.is_whole = True

    def clear(self) -> None:
        """Know nothing any more."""
        self.is_whole = False
        self._blocks.clear()
        self._near.clear()

    def _store(self, event: BlockStored, dp_rank: int | None) -> None:
        """Take blocks, if each has its tokens: a group that keeps places names other tokens too."""
        size = event.block_size
        if event.kv_cache_spec_kind not in _FULL_KINDS:
            return
        if len(event.token_ids) != size * len(event.block_hashes):
            return
        where = dp_rank, event.group_idx
        parent = b""
        if event.parent_block_hash is not None:
            known = self._blocks.get((*where, event.parent_block_hash))
            if known is None:
                return  # its tokens are not known, as a batch was lost
            parent = known[0]
        group = event.group_idx, size
        if group not in self._near and len(self._near) >= _GROUPS_MAX:
            self.is_whole = False
            return
        self._near.setdefault(group, Counter())
        packed = np.asarray(event.token_ids, dtype="<u4").tobytes()
        digests = _chain(parent, packed, size, _extras(event))
        bit = _bit(event)
        for block, digest in zip(event.block_hashes, digests, strict=True):
            key = *where, block
            _, mask, _ = self._blocks.get(key, (b"", 0, 0))
            self._put(key, digest, mask | bit, size)

    def _put(self, key: _Key, digest: bytes, mask: int, size: int) -> None:
        """Note what media have a block; none: it is gone."""
        self._forget(key)
        if mask:
            self._blocks[key] = digest, mask, size
            if mask & _NEAR:
                self._near[key[1], size][digest] += 1
        if len(self._blocks) > self._blocks_max:
            self.is_whole = False
            self._forget(next(iter(self._blocks)))

    def _forget(self, key: _Key) -> None:
        digest, mask, size = self._blocks.pop(key, (b"", 0, 0))
        if mask & _NEAR:
            near = self._near[key[1], size]
            near[digest] -= 1
            if not near[digest]:
                del near[digest]


def _bit(event: BlockStored | BlockRemoved) -> int:
    """Return a medium's bit; what is elsewhere is far, whatever it is."""
    if event.locality not in (None, "LOCAL"):
        return _OTHER
    return _MEDIA.get(event.medium or GPU_MEDIUM, _OTHER)


def _leading(near: Mapping[bytes, int], digests: Sequence[bytes]) -> int:
    if not digests or digests[0] not in near:
        return 0  # which is most often so
    return bisect_left(range(len(digests)), True, key=lambda at: digests[at] not in near)


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
    packed: bytes = msgpack.packb([lora, keys], default=str, unicode_errors="surrogatepass")
    return packed
