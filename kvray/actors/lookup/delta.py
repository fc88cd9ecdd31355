"""What a partition of the lookup and a shard say to each other: a poll, and its reply; pure.

All blocks of a chain have the number of its first key (`head_number`), so one partition is told of
them all and a request asks that one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.errors import ConfigError
from kvray.identity.block import BlockKey, head_number

Array = npt.NDArray[Any]

Cursor = tuple[str, int]
"""The name of a shard's log, and how many of its changes the partition has taken."""

_PART = np.dtype("<u2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """A partition asks a shard for its changes, and says what the shard is to know."""

    partition: int = 0
    cursor: Cursor | None = None
    """None: it knows nothing of the shard's blocks."""
    most: int
    """Changes that it takes at once; 0: none now, and it wants an answer without delay."""
    pace_s: float = 0.0
    """Time between two polls; a shard without news keeps a poll for as long."""
    num_shards: int = 1
    """Shards that the partition hears, the asked one included."""
    namespaces: tuple[int, ...] = ()
    """Those of all shards, as arenas number them."""
    partial_keys: bytes = b""
    """Keys of partial blocks, end to end: their parts at the shard are useless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The changes after a cursor; removals are applied first."""

    since: Cursor | None
    """The cursor of the poll."""
    cursor: Cursor | None
    """The cursor of the next one, which acknowledges this."""
    is_full: bool = False
    """It begins a list of all blocks, because the shard's log does not go back to the cursor."""
    more: bool = True
    """The next poll is answered at once."""
    added_keys: bytes = b""
    added_parts: bytes = b""
    """One for each key, as `packed_parts` makes them: lists would cost as much as the index."""
    removed_keys: bytes = b""
    removed_parts: bytes = b""
    ranks: tuple[tuple[str, int], ...] = ()
    """Replica and rank of all ranks registered with the shard."""
    namespaces: tuple[int, ...] = ()
    """The namespaces, as arenas number them, of its blocks and engines."""
    is_leaving: bool = False
    """Its node is being drained: nothing is brought there for later."""


def packed_parts(parts: Sequence[int] | Array) -> bytes:
    """Return parts, all below PARTS_MAX, as little-endian u16, end to end."""
    return np.asarray(parts, dtype=_PART).tobytes()


def unpacked_parts(parts: bytes) -> Array:
    """Return the parts of `packed_parts`."""
    if len(parts) % _PART.itemsize:
        raise ConfigError(f"{len(parts)} bytes are no whole number of parts.")
    return np.frombuffer(parts, dtype=_PART)


def partition_of(first_key: BlockKey, num_partitions: int) -> int:
    """Return the partition to ask for the blocks of a chain that begins with `first_key`."""
    return head_number(first_key) % num_partitions


def shares(heads: Array, num_partitions: int) -> Iterator[Array | None]:
    """Yield for each partition which blocks it is told of: a mask, or None for all of them.

    `heads` are the numbers of their chains. A node that does not have the start of a chain does not
    know its number (0): all partitions are told of the block, so that a query finds it at any.
    """
    if num_partitions == 1:
        yield None
        return
    is_for_all, owners = heads == 0, heads % num_partitions
    for partition in range(num_partitions):
        yield is_for_all | (owners == partition)
