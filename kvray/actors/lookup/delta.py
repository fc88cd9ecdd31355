"""What a partition of the lookup and a shard say to each other: a poll, and its reply."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.errors import ConfigError

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
