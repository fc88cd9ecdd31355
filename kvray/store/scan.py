"""The walk over an arena's READY blocks that checks each of them, while others go on using it.

Blocks are leased a batch at a time: what is being summed cannot go, all else may. A block that is
evicted before the walk comes to it is passed over, and one that is stored behind the walk is not
looked at; its own writer has just summed it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvray.errors import ShardUnavailable
from kvray.store import payload
from kvray.store.arena import Arena
from kvray.store.layout import READY
from kvray.store.lease import Lease
from kvray.store.tables import Array, Tables

BATCH_BYTES = 64 * 2**20
_PATIENT_S = 5.0
"""How long a batch's lease and its release are tried for."""

_RETRY_S = 0.01

Report = Callable[[int, int], None]
"""Called between batches, when nothing is leased, with (bytes walked, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a walk found."""

    blocks: int
    """Blocks whose bytes were checked."""
    num_bytes: int
    """Bytes of those."""
    corrupt: tuple[str, ...]
    """The first 8 hex digits of the key of each block that had not its checksum."""
    skipped: int
    """Blocks that could not be leased: they went meanwhile, or the arena stayed busy."""


def scan(arena: Arena, report: Report, *, batch_bytes: int = BATCH_BYTES) -> Scan:
    """Check the bytes of every READY block; quarantine those that are wrong.

    Args:
        arena: the arena, of which this process is a holder.
        report: how far the walk is; what it raises ends the walk, and nothing stays leased.
        batch_bytes: bytes that are leased at once; always at least one block.

    Raises:
        LeaseExpired: this process is no holder.
        ShardUnavailable: the arena was retired meanwhile.
    """
    total = arena.stats()["resident_bytes"]
    blocks = num_bytes = walked = skipped = 0
    corrupt: list[str] = []
    report(0, total)
    wait_s = _PATIENT_S
    for chosen, block_bytes in _batches(arena.tables, batch_bytes):
        held = _lease(arena, chosen, wait_s)
        # An arena that stays busy, as one without a shard may, is not waited for at each batch.
        wait_s = 0.0 if held is None else _PATIENT_S
        if held is not None:
            blocks += held.num_slots
            num_bytes += held.num_slots * _block_bytes(arena.tables, chosen)
            corrupt += _check(arena, held)
        skipped += len(chosen) - (held.num_slots if held else 0)
        walked += len(chosen) * block_bytes
        report(min(walked, total), total)
    report(total, total)
    return Scan(blocks=blocks, num_bytes=num_bytes, corrupt=tuple(corrupt), skipped=skipped)


def _batches(tables: Tables, batch_bytes: int) -> Iterator[tuple[Array, int]]:
    """Yield (slots that are READY as the walk comes to them, their block size), slab by slab."""
    per_slab = tables.geometry.slots_per_slab
    for slab in range(tables.geometry.num_slabs):
        block_bytes = int(tables.slab_block_bytes[slab])
        if not block_bytes:
            continue
        start = slab * per_slab
        ready = start + np.flatnonzero(tables.slot_state[start : start + per_slab] == READY)
        at_once = max(1, batch_bytes // block_bytes)
        for first in range(0, len(ready), at_once):
            yield ready[first : first + at_once], block_bytes


def _lease(arena: Arena, chosen: Array, wait_s: float) -> Lease | None:
    """Lease those of `chosen` that are still READY; None if the arena stays busy."""
    deadline = time.monotonic() + wait_s
    while (held := arena.lease_slots(chosen)) is None and time.monotonic() < deadline:
        if arena.retired:
            raise ShardUnavailable(
                f"The arena in {arena.directory} was given up while it was read; run the same"
                " command again."
            )
        time.sleep(_RETRY_S)
    return held


def _check(arena: Arena, held: Lease) -> list[str]:
    """Check leased blocks and end the lease; return the names of those that are wrong."""
    tables = arena.tables
    try:
        chosen = arena.leased_slots(held)
        if not len(chosen):
            return []
        bad = chosen[~payload.verify(tables, chosen)]
        names = [tables.slot_key[slot].tobytes().hex()[:8] for slot in bad]
        if names:
            arena.leased_slots(held)  # raises if it ended: then what was read is void
            arena.quarantine(bad, wait_s=_PATIENT_S)
        return names
    finally:
        arena.release(held, wait_s=_PATIENT_S)


def _block_bytes(tables: Tables, chosen: Array) -> int:
    """Return the block size of a batch; only while it is leased does its slab keep it."""
    return int(tables.slab_block_bytes[chosen[0] // tables.geometry.slots_per_slab])
