"""What the tests of the arena build: small tables and files, chains of keys, bytes for each key."""

import hashlib
from pathlib import Path

import numpy as np

from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaSpec, Lease, Reservation
from kvray.store.arena import key_index, lease, slots
from kvray.store.arena.eviction import choose_victims
from kvray.store.arena.layout import DEFAULT_PRIORITY, Geometry
from kvray.store.arena.tables import Array, Tables

SLOT = 4096
PATIENT_S = 5.0
NOBODY = np.empty(0, dtype=np.int64)


def make_tables(*, num_slabs: int = 8, slots_per_slab: int = 8) -> Tables:
    """Return the tables of an empty arena in this process's own memory."""
    slab = slots_per_slab * SLOT
    geometry = Geometry(capacity=num_slabs * slab, slab_bytes=slab, slot_min=SLOT, holders_max=8)
    return Tables(bytearray(geometry.file_bytes), geometry)


def spec(*, num_slabs: int = 8, slots_per_slab: int = 8, holders_max: int = 8) -> ArenaSpec:
    slab = slots_per_slab * SLOT
    return ArenaSpec(
        cluster_name="test",
        capacity=num_slabs * slab,
        slab=slab,
        slot_min=SLOT,
        holders_max=holders_max,
    )


def chain(length: int, *, seed: str = "", head: BlockKey | None = None) -> list[BlockKey]:
    """Return `length` keys, each chained to the one before, the first to `head`."""
    keys, parent = [], head or BlockKey(hashlib.sha256(seed.encode()).digest())
    for _ in range(length):
        parent = BlockKey(hashlib.sha256(parent + seed.encode()).digest())
        keys.append(parent)
    return keys


def content(key: BlockKey, part: int = 0, *, block_bytes: int = SLOT) -> Array:
    """Return the bytes that a test stores under `key`: no two keys or parts have equal ones."""
    pattern = hashlib.sha256(key + part.to_bytes(8, "little")).digest()
    return np.resize(np.frombuffer(pattern, dtype=np.uint8), block_bytes)


def pool_of(keys: list[BlockKey], part: int = 0, *, block_bytes: int = SLOT) -> Array:
    """Return the content of `keys` as an engine's pool, one row a key."""
    if not keys:
        return np.empty((0, block_bytes), dtype=np.uint8)
    return np.stack([content(key, part, block_bytes=block_bytes) for key in keys])


# -- over bare tables ---------------------------------------------------------------------------


def reserve(
    tables: Tables,
    keys: list[BlockKey],
    *,
    parent: BlockKey | None = None,
    depth: int = 0,
    part: int = 0,
    block_bytes: int = SLOT,
    holder: int = 0,
    namespace: int = 0,
    priority: int | Array = DEFAULT_PRIORITY,
) -> Reservation:
    packed = key_index.pack_keys(keys)
    before = None if parent is None else key_index.pack_keys([parent])
    candidates = slots.find_candidates(
        tables, packed, parent=before, part=part, block_bytes=block_bytes
    )
    made = slots.reserve(
        tables,
        packed,
        parent=before,
        depth=depth,
        part=part,
        block_bytes=block_bytes,
        holder=holder,
        candidates=candidates,
        namespace=namespace,
        priority=priority,
    )
    assert made is not None
    return made


def commit(tables: Tables, reservation: Reservation) -> int:
    """Commit with the slots' first key word as checksum, so that a test can tell what is whose."""
    sums = tables.slot_key[reservation.slots, 0]
    return slots.commit(tables, reservation, sums)


def put(
    tables: Tables,
    keys: list[BlockKey],
    *,
    parent: BlockKey | None = None,
    depth: int = 0,
    part: int = 0,
    block_bytes: int = SLOT,
    namespace: int = 0,
    priority: int | Array = DEFAULT_PRIORITY,
) -> Reservation:
    """Reserve and commit `keys`."""
    made = reserve(
        tables,
        keys,
        parent=parent,
        depth=depth,
        part=part,
        block_bytes=block_bytes,
        namespace=namespace,
        priority=priority,
    )
    commit(tables, made)
    return made


def find(tables: Tables, keys: list[BlockKey], part: int = 0) -> list[int]:
    return list(key_index.find(tables, key_index.pack_keys(keys), part).tolist())


def matched(tables: Tables, keys: list[BlockKey], *, num_parts: int = 1) -> int:
    return lease.match(tables, key_index.pack_keys(keys), map(lease.PartRequest, range(num_parts)))[
        0
    ]


def take(tables: Tables, keys: list[BlockKey], *, holder: int = 0, now: float = 0.0) -> Lease:
    """Lease all of `keys`, which are there."""
    found = key_index.find(tables, key_index.pack_keys(keys), 0)
    assert (found >= 0).all()
    taken = lease.take(tables, [found], holder=holder, now=now)
    assert taken is not None
    return taken[0]


def evict(tables: Tables, count: int, *, protect: Array = NOBODY) -> int:
    within = np.arange(tables.geometry.num_slots)
    victims = choose_victims(tables, count, within=within, protect=protect)
    slots.evict(tables, victims)
    return len(victims)


def overwrite(tables: Tables, seed: int = 0) -> None:
    """Fill every table, but not the header, with bytes of nothing."""
    chance = np.random.default_rng(seed)
    for name, _, _ in tables.geometry.tables():
        column = getattr(tables, name)
        column.reshape(-1).view("u1")[:] = chance.integers(0, 256, column.nbytes)


# -- over a real arena --------------------------------------------------------------------------


def make_arena(
    directory: Path, *, lock_wait_s: float = PATIENT_S, asked: ArenaSpec | None = None
) -> Arena:
    return Arena.create(directory, asked or spec(), lock_wait_s=lock_wait_s)


def store(
    arena: Arena,
    keys: list[BlockKey],
    *,
    parent: BlockKey | None = None,
    depth: int = 0,
    part: int = 0,
    block_bytes: int = SLOT,
    namespace: int = 0,
    priority: int | Array = DEFAULT_PRIORITY,
) -> Reservation:
    """Reserve, write and commit `keys`, each with its own content."""
    made = arena.reserve(
        keys,
        parent=parent,
        depth=depth,
        part=part,
        block_bytes=block_bytes,
        namespace=namespace,
        priority=priority,
    )
    assert made is not None
    wanted = [keys[row] for row in made.rows]
    pool = pool_of(wanted, part, block_bytes=block_bytes)
    assert arena.commit(made, arena.write(made, pool, np.arange(len(wanted))))
    return made


def fetch(
    arena: Arena, keys: list[BlockKey], held: Lease, *, part: int = 0, block_bytes: int = SLOT
) -> bool:
    """Read a lease on a head of `keys` with verification; return whether every byte is right."""
    pool = np.zeros((held.num_slots, block_bytes), dtype=np.uint8)
    arena.read(held, pool, np.arange(held.num_slots), verify=True)
    expected = pool_of(keys[: held.num_slots], part, block_bytes=block_bytes)
    return bool((pool == expected).all())
