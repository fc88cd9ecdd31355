"""What the tests of the arena build: small tables and files, chains of keys, bytes for each key."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaSpec, Held, Lease, PartRequest, Reservation
from kvray.store.arena import key_index, lease, slots
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.layout import Geometry
from kvray.store.arena.tables import Array, Tables
from kvray.store.machine.lock import ArenaLock

SLOT = 4096
PLACE: dict[str, Any] = {"parent": None, "depth": 0, "part": 0, "block_bytes": SLOT}
"""Where keys are reserved unless a test says otherwise."""
PATIENT_S = 5.0
NOBODY = np.empty(0, dtype=np.int64)


def make_tables(*, num_slabs: int = 8, slots_per_slab: int = 8) -> Tables:
    """Return the tables of an empty arena in this process's own memory."""
    slab = slots_per_slab * SLOT
    geometry = Geometry(capacity=num_slabs * slab, slab_bytes=slab, slot_min=SLOT, holders_max=8)
    return Tables(bytearray(geometry.file_bytes), geometry)


def spec(*, num_slabs: int = 8, slots_per_slab: int = 8, holders_max: int = 8) -> ArenaSpec:
    slab, capacity = slots_per_slab * SLOT, num_slabs * slots_per_slab * SLOT
    return ArenaSpec(
        cluster_name="test", capacity=capacity, slab=slab, slot_min=SLOT, holders_max=holders_max
    )


def chain(length: int, *, seed: str = "", head: BlockKey | None = None) -> list[BlockKey]:
    """Return `length` keys, each chained to the one before, the first to `head`."""
    keys, parent = [], head or BlockKey(hashlib.sha256(seed.encode()).digest())
    for _ in range(length):
        parent = BlockKey(hashlib.sha256(parent + seed.encode()).digest())
        keys.append(parent)
    return keys


def conversations(turns: int, *, seed: int) -> Iterator[list[BlockKey]]:
    """Yield the prompts of conversations that go on in turns: soon each slab has blocks of many."""
    chance, lengths = Random(seed), dict[int, int]()
    for turn in range(turns):
        one = chance.choice(list(lengths)[-4:]) if lengths and turn % 3 else turn
        lengths[one] = lengths.get(one, 0) + chance.randint(1, 3)
        yield chain(lengths[one], seed=f"conversation {one}")


def content(key: BlockKey, part: int = 0, *, block_bytes: int = SLOT) -> Array:
    """Return the bytes that a test stores under `key`: no two keys or parts have equal ones."""
    pattern = hashlib.sha256(key + part.to_bytes(8, "little")).digest()
    return np.resize(np.frombuffer(pattern, dtype=np.uint8), block_bytes)


def pool_of(keys: list[BlockKey], part: int = 0, *, block_bytes: int = SLOT) -> Array:
    """Return the content of `keys` as an engine's pool, one row a key."""
    blocks = [content(key, part, block_bytes=block_bytes) for key in keys]
    return np.array(blocks, dtype=np.uint8).reshape(len(keys), block_bytes)


# -- over bare tables -----------------------------------------------------------------------------


def reserve(
    tables: Tables,
    keys: list[BlockKey],
    *,
    parent: BlockKey | None = None,
    part: int = 0,
    block_bytes: int = SLOT,
    **more: Any,
) -> Reservation:
    packed, above = key_index.pack_keys(keys), parent and key_index.pack_keys([parent])
    place: dict[str, Any] = {"parent": above, "part": part, "block_bytes": block_bytes}
    candidates = slots.find_candidates(tables, packed, **place)
    rest = {"depth": 0, "holder": 0, **more}
    made = slots.reserve(tables, packed, **place, candidates=candidates, **rest)
    assert made is not None
    return made


def commit(tables: Tables, reservation: Reservation) -> int:
    """Commit with the slots' first key word as checksum, so that a test can tell what is whose."""
    sums = tables.slot_key[reservation.slots, 0]
    return slots.commit(tables, reservation, sums)


def put(tables: Tables, keys: list[BlockKey], **place: Any) -> Reservation:
    """Reserve and commit `keys`."""
    made = reserve(tables, keys, **place)
    commit(tables, made)
    return made


def find(tables: Tables, keys: list[BlockKey], part: int = 0) -> list[int]:
    return list(key_index.find(tables, key_index.pack_keys(keys), part).tolist())


def matched(tables: Tables, keys: list[BlockKey], *, num_parts: int = 1) -> int:
    parts = map(lease.PartRequest, range(num_parts))
    return lease.match(tables, key_index.pack_keys(keys), parts)[0]


def take(tables: Tables, keys: list[BlockKey], *, holder: int = 0, now: float = 0.0) -> Lease:
    """Lease all of `keys`, which are there."""
    found = key_index.find(tables, key_index.pack_keys(keys), 0)
    assert (found >= 0).all()
    taken = lease.take(tables, [found], holder=holder, now=now)
    assert taken is not None
    return taken[0]


def victims(tables: Tables, count: int, *, protect: Array = NOBODY, **options: Any) -> list[int]:
    """Return who goes first of the whole arena."""
    within = np.arange(tables.geometry.num_slots)
    return list(choose_victims(tables, count, within=within, protect=protect, **options).tolist())


def slots_named(tables: Tables, held: Lease) -> list[int]:
    found = lease.leased_slots(tables, held)
    assert found is not None, "a lease was broken"
    return list(found.tolist())


def evict(tables: Tables, count: int) -> int:
    chosen = victims(tables, count)
    slots.evict(tables, np.array(chosen, dtype=np.int64))
    return len(chosen)


def overwrite(tables: Tables, seed: int = 0) -> None:
    """Fill every table, but not the header, with bytes of nothing."""
    chance = np.random.default_rng(seed)
    for name, _, _ in tables.geometry.tables():
        column = getattr(tables, name)
        column.reshape(-1).view("u1")[:] = chance.integers(0, 256, column.nbytes)


# -- over a real arena ----------------------------------------------------------------------------


def make_arena(
    directory: Path, *, lock_wait_s: float = PATIENT_S, asked: ArenaSpec | None = None
) -> Arena:
    return Arena.create(directory, asked or spec(), lock_wait_s=lock_wait_s)


def reserved(arena: Arena, keys: list[BlockKey], **place: Any) -> Reservation:
    made = arena.reserve(keys, **PLACE | place)
    assert made is not None
    return made


def store(
    arena: Arena, keys: list[BlockKey], *, part: int = 0, block_bytes: int = SLOT, **place: Any
) -> Reservation:
    """Reserve, write and commit `keys`, each with its own content."""
    made = reserved(arena, keys, part=part, block_bytes=block_bytes, **place)
    pool = pool_of([keys[row] for row in made.rows], part, block_bytes=block_bytes)
    assert arena.commit(made, arena.write(made, pool, np.arange(len(pool))))
    return made


def leased(arena: Arena, keys: list[BlockKey], **wanted: Any) -> Lease:
    """Lease what there is of `keys`; there is some."""
    leases = arena.lease(keys, **wanted)
    assert leases
    return leases[0]


def leased_for(
    arena: Arena, keys: list[BlockKey], readers: list[list[PartRequest]], **wanted: Any
) -> Held:
    """Lease what there is of `keys` for several readers, maybe nothing."""
    held = arena.lease_for(keys, readers, **wanted)
    assert held is not None
    return held


def fetch(
    arena: Arena, keys: list[BlockKey], held: Lease, *, part: int = 0, block_bytes: int = SLOT
) -> bool:
    """Read a lease on a head of `keys` with verification; return whether every byte is right."""
    pool = np.zeros((held.num_slots, block_bytes), dtype=np.uint8)
    arena.read(held, pool, np.arange(held.num_slots), verify=True)
    expected = pool_of(keys[: held.num_slots], part, block_bytes=block_bytes)
    return bool((pool == expected).all())


def num_here(arena: Arena, keys: list[BlockKey]) -> int:
    """Return how many leading `keys` have part 0 here now."""
    (here,) = arena.present(keys, [0])
    return len(keys) if here.all() else int(here.argmin())


def served(arena: Arena, keys: list[BlockKey], **size: Any) -> int:
    """Lease, read and give back what there is of `keys`, each byte of it right; return how many."""
    leases = arena.lease(keys)
    assert leases is not None
    for held in leases:
        assert fetch(arena, keys, held, **size)
    assert arena.release(*leases, wait_s=PATIENT_S)
    return sum(held.num_slots for held in leases)


_sections: dict[tuple[int, Path], AbstractContextManager[bool]] = {}
"""Thread and side file -> the section that it keeps open. A thread's own storage is cleared in a
fork, which would end the section of its parent."""


def acquire(lock: ArenaLock, wait_s: float) -> bool:
    """Keep an arena's lock until `release`; False: somebody else has it."""
    section = lock.section(wait_s, lambda: True, lambda error: None)
    if not section.__enter__():
        return False
    _sections[threading.get_ident(), lock._side_file.path] = section
    return True


def release(lock: ArenaLock) -> None:
    """Give up what this thread has acquired, if it has."""
    section = _sections.pop((threading.get_ident(), lock._side_file.path), None)
    if section is not None:
        section.__exit__(None, None, None)
