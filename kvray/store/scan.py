"""The walk over an arena's READY blocks that checks each of them, while others use the arena.

Blocks are leased a batch at a time, so that no block goes while it is summed. The walk passes over
blocks that are evicted before it comes to them. It does not check blocks stored behind it, whose
writers have just summed them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvray.errors import ShardUnavailable
from kvray.store.arena import audit, payload, slabs
from kvray.store.arena.arena import Arena
from kvray.store.arena.layout import READY
from kvray.store.arena.lease import Lease
from kvray.store.arena.tables import Array, Tables

BATCH_BYTES = 64 * 2**20
_PATIENT_S = 5.0  # how long it tries for a batch's lease and its release

_RETRY_S = 0.01

Report = Callable[[int, int], None]
"""Called between batches, when nothing is leased, with (bytes walked, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The result of a walk."""

    blocks: int
    num_bytes: int
    corrupt: tuple[str, ...]
    """The first 8 hex digits of the key of each block without its checksum."""
    damage: Mapping[str, int]
    """Damage of the tables -> in how many rows; see docs/arena_format.md."""
    skipped: int
    """Blocks that could not be leased: they went meanwhile, or the arena stayed busy."""


def scan(arena: Arena, report: Report, *, batch_bytes: int = BATCH_BYTES) -> Scan:
    """Check the bytes of every READY block; quarantine those that are wrong.

    This process is a holder of `arena`. `report` hears how far the walk is; an exception in it ends
    the walk and its leases. `batch_bytes` are leased at once, at least one block.
    ShardUnavailable: the arena was retired meanwhile.
    """
    damage = _audit(arena)
    total = arena.stats()["resident_bytes"]
    blocks = num_bytes = walked = skipped = 0
    corrupt: list[str] = []
    report(0, total)
    wait_s = _PATIENT_S
    for chosen, block_bytes in _batches(arena.tables, batch_bytes):
        held = _lease(arena, chosen, wait_s)
        # An arena without a shard may stay busy: do not wait for it at each batch.
        wait_s = 0.0 if held is None else _PATIENT_S
        if held is not None:
            blocks += held.num_slots
            # Only while it is leased does its slab keep its block size.
            num_bytes += held.num_slots * int(arena.tables.block_bytes(chosen[:1])[0])
            corrupt += _check(arena, held)
        skipped += len(chosen) - (held.num_slots if held else 0)
        walked += len(chosen) * block_bytes
        report(min(walked, total), total)
    report(total, total)
    return Scan(
        blocks=blocks, num_bytes=num_bytes, corrupt=tuple(corrupt), damage=damage, skipped=skipped
    )


def _audit(arena: Arena) -> dict[str, int]:
    """Return the damage of the tables; a second look under the lock confirms it."""
    damage: Counter[str] = Counter()
    for share in audit.shares(arena.tables):
        found = audit.lasting(arena.tables, share)
        if found:
            with arena.section(_PATIENT_S) as entered:
                if entered:
                    found = audit.both(found, audit.find(arena.tables, share))
        damage.update({name: len(rows) for name, rows in found.items()})
    return dict(damage)


def _batches(tables: Tables, batch_bytes: int) -> Iterator[tuple[Array, int]]:
    """Yield (slots that are READY now, their block size), slab by slab."""
    for slab in range(tables.geometry.num_slabs):
        block_bytes = tables.size_of(slab)
        if not block_bytes:
            continue
        # A slot outside of its slab has no bytes to check.
        inside = np.arange(slabs.usable(tables, block_bytes))
        own = tables.geometry.slots_at(slab, inside)
        ready = own[tables.slot_state[own] == READY]
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
        names = [tables.name(slot) for slot in bad]
        if names:
            arena.leased_slots(held)  # raises if it ended: then what was read is void
            arena.quarantine(bad, wait_s=_PATIENT_S)
        return names
    finally:
        arena.release(held, wait_s=_PATIENT_S)
