"""The walk over an arena's blocks: what it checks and leaves alone; and flipped bits in tables."""

import contextlib
import math
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvray.errors import KVRayError, ShardUnavailable
from kvray.store import Arena, ArenaOwner, PartRequest
from kvray.store.arena.layout import QUARANTINED, READY, header_offset
from kvray.store.arena.lease import Lease
from kvray.store.arena.payload import slot_bytes
from kvray.store.arena.tables import Array
from kvray.store.scan import scan
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    PATIENT_S,
    SLOT,
    acquire,
    chain,
    make_arena,
    num_here,
    pool_of,
    release,
    reserved,
    spec,
    store,
)

KEYS = chain(20)
quiet = Mock()
"""Reports to nobody."""


def spoil(arena: Arena, slot: int) -> str:
    """Change one byte of a block; return the name of its key."""
    slot_bytes(arena.tables, slot)[17] ^= 1
    return arena.tables.slot_key[slot].tobytes().hex()[:8]


def test_every_block_of_every_size_is_checked(arena):
    found = scan(arena, quiet)
    assert (found.blocks, found.num_bytes, found.skipped) == (0, 0, 0)
    store(arena, KEYS)
    store(arena, chain(5, seed="large"), block_bytes=2 * SLOT + 1)
    reserved(arena, chain(2, seed="being written"))
    found = scan(arena, quiet)
    assert (found.blocks, found.corrupt, found.skipped) == (25, (), 0)
    assert found.num_bytes == 20 * SLOT + 5 * (2 * SLOT + 1)


def test_a_wrong_byte_is_found_named_and_never_served_again(arena):
    made = store(arena, KEYS)
    names = {spoil(arena, int(made.slots[row])) for row in (3, 11)}
    found = scan(arena, quiet)
    assert set(found.corrupt) == names
    assert found.blocks == 20
    assert num_here(arena, KEYS) == 3
    assert arena.stats()["corrupt"] == 2
    assert (arena.tables.slot_state[made.slots[[3, 11]]] == QUARANTINED).all()
    check_invariants(arena.tables)
    assert scan(arena, quiet).corrupt == ()


def test_batches_are_small_and_nothing_is_leased_between_them(arena):
    store(arena, KEYS)
    seen: list[tuple[int, int]] = []

    def report(done: int, total: int) -> None:
        assert not arena.tables.slot_leases.any()
        seen.append((done // SLOT, total // SLOT))

    scan(arena, report, batch_bytes=3 * SLOT)
    steps = np.diff([done for done, _ in seen])
    assert steps.max() == 3
    assert {total for _, total in seen} == {20}
    assert seen[-1] == (20, 20)
    assert scan(arena, quiet, batch_bytes=1).blocks == 20, "a block may be larger than a batch"


def test_blocks_that_go_during_the_walk_are_passed_over(arena):
    store(arena, KEYS)
    found = scan(arena, lambda done, total: done and ArenaOwner(arena).clear())
    assert found.blocks + found.skipped < 20
    assert found.corrupt == ()


def test_blocks_that_come_and_go_are_never_called_corrupt(arena, directory):
    over = threading.Event()

    def churn() -> None:
        writer = Arena.attach(directory, label="writer", lock_wait_s=PATIENT_S)
        number = 0
        while not over.is_set():
            number += 1
            store(writer, chain(7, seed=str(number)), block_bytes=SLOT * (1 + number % 3))
        writer.close()

    thread = threading.Thread(target=churn)
    thread.start()
    checked, deadline = 0, time.monotonic() + 20
    try:
        while checked < 2000 and time.monotonic() < deadline:
            found = scan(arena, quiet, batch_bytes=4 * SLOT)
            assert found.corrupt == ()
            checked += found.blocks
    finally:
        over.set()
        thread.join()
    assert checked >= 2000
    assert (arena.tables.slot_state == READY).any()


def test_an_arena_that_stays_busy_is_passed_over_and_waits_end(arena, directory, monkeypatch):
    monkeypatch.setattr("kvray.store.scan._PATIENT_S", 0.1)
    store(arena, KEYS)
    hurried = Arena.attach(directory, label="hurried", lock_wait_s=0.001)

    def keep_locked(done: int, total: int) -> None:
        if not done:
            assert acquire(arena._lock, 1)

    start = time.monotonic()
    found = scan(hurried, keep_locked, batch_bytes=SLOT)
    took_s = time.monotonic() - start
    release(arena._lock)
    assert (found.blocks, found.skipped) == (0, 20)
    assert took_s < 20 * 0.1
    hurried.close()


def test_an_arena_that_is_given_up_ends_the_walk(arena):
    store(arena, KEYS)
    with pytest.raises(ShardUnavailable, match="given up"):
        scan(arena, lambda done, total: ArenaOwner(arena).retire())


FLIPPED_BITS_KEYS, OTHERS, MORE = chain(3), chain(2, seed="others"), chain(9, seed="more")
READERS = [[PartRequest(0), PartRequest(1)], [PartRequest(1)]]
FLIPS = 8
"""Of each table."""


class Scene:
    """An arena of two slabs, all of whose bytes can be put back."""

    def __init__(self, directory: Path) -> None:
        self.arena = make_arena(directory, asked=spec(num_slabs=4, slots_per_slab=4, holders_max=2))
        self.arena.join("engine")
        for part in (0, 1):
            store(self.arena, FLIPPED_BITS_KEYS, part=part)
        store(self.arena, OTHERS)
        self.memory: Array = np.memmap(directory / "arena", dtype=np.uint8, mode="r+")
        self.others = self.lease(OTHERS, [[PartRequest(0)]])
        self.image = self.memory.copy()
        self.leases = self.lease(FLIPPED_BITS_KEYS, READERS)
        self.leased_image = self.memory.copy()

    def lease(self, keys: list[bytes], readers: list[list[PartRequest]]) -> tuple[Lease, ...]:
        held = self.arena.lease_for(keys, readers)  # type: ignore[arg-type]
        return () if held is None else held.leases

    def go_on(self) -> None:
        """Do what others do meanwhile; whatever a table says, none of them ends of it."""
        arena = self.arena
        for step in (
            lambda: arena.release(*self.others),
            self.store_more,
            lambda: arena.present(MORE, (0, 1)),
            lambda: ArenaOwner(arena).evict_ahead(0.3),
        ):
            with contextlib.suppress(KVRayError):
                step()

    def store_more(self) -> None:
        made = self.arena.reserve(MORE, parent=None, depth=0, part=0, block_bytes=SLOT)
        if made is not None:
            pool = pool_of([MORE[row] for row in made.rows])
            self.arena.commit(made, self.arena.write(made, pool, np.arange(len(pool))))

    def read(self, leases: tuple[Lease, ...], *, verify: bool = True) -> None:
        """Read what a lease promises: it is right, or refused."""
        for one, readers in zip(leases, READERS, strict=False):
            parts = [one.part for one in readers]
            count = one.num_slots // len(parts)
            expected = np.concatenate([pool_of(FLIPPED_BITS_KEYS[:count], part) for part in parts])
            pool = np.zeros((one.num_slots, SLOT), np.uint8)
            with contextlib.suppress(KVRayError):
                self.arena.read(one, pool, np.arange(one.num_slots), verify=verify)
                assert np.array_equal(pool, expected), "another block's bytes"


@pytest.fixture
def scene(directory: Path) -> Iterator[Scene]:
    made = Scene(directory)
    yield made
    made.memory[:] = made.image
    made.arena.close()
    del made.memory


def flips(scene: Scene, image: Array, per_table: int | None) -> Iterator[None]:
    """Put the image back with one bit of the values in use flipped, again and again.

    Up to so many times for each table; None: for every bit. Low bits and the highest more often
    than others: they make one valid value of another.
    """
    geometry, chance = scene.arena.tables.geometry, random.Random(7)
    tables = {"header": (header_offset("shard_epoch"), "<u8", 12, False)}
    for name, dtype, shape in geometry.tables():
        is_small = math.prod(shape) <= 4 * geometry.num_slots
        tables[name] = geometry.offsets()[name], dtype, math.prod(shape), is_small
    for at, dtype, num_values, is_small in tables.values():
        size = np.dtype(dtype).itemsize
        values = scene.leased_image[at : at + num_values * size].reshape(num_values, size)
        in_use = np.arange(num_values) if is_small else np.flatnonzero(values.any(axis=1))[:64]
        each = [(int(at + value * size), bit) for value in in_use for bit in range(8 * size)]
        if per_table is not None:
            likely = [one for one in each if one[1] < 5 or one[1] >= 8 * size - 2]
            likely = chance.sample(likely, min(per_table, len(likely)))
            each = likely + chance.sample(each, min(per_table // 4, len(each)))
        for value, bit in each:
            scene.memory[:] = image
            scene.memory[value + bit // 8] ^= 1 << bit % 8
            yield


each_count = pytest.mark.parametrize("count", [FLIPS, pytest.param(None, marks=pytest.mark.long)])


@each_count
def test_a_bit_flipped_before_a_lease_gives_no_other_block(scene, count):
    for _ in flips(scene, scene.image, count):
        leases: tuple[Lease, ...] = ()
        with contextlib.suppress(KVRayError):
            leases = scene.lease(FLIPPED_BITS_KEYS, READERS)
        scene.go_on()
        scene.read(leases)


@each_count
@pytest.mark.parametrize("verify", [True, False])
def test_a_bit_flipped_before_a_load_gives_no_other_block(scene, count, verify):
    for _ in flips(scene, scene.leased_image, count):
        if verify:  # only checksums tell what others have overwritten
            scene.go_on()
        scene.read(scene.leases, verify=verify)


@each_count
def test_the_owner_mends_what_a_flipped_bit_contradicts(scene, count):
    for _ in flips(scene, scene.leased_image, count):
        owner = ArenaOwner(scene.arena)
        owner.audit()
        assert not owner.audit(), "it repairs again and again"
        check_invariants(scene.arena.tables)
        scene.go_on()
        scene.read(scene.leases)
