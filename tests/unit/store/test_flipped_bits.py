"""A bit that flips in a table costs a block or a load, but gives nobody another block's bytes.

Each bit is flipped between a store and its lease, or between a lease and its load, while others
go on: they lease, store into what is full, evict and release.
"""

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvray.errors import KVRayError
from kvray.store import ArenaOwner, PartRequest
from kvray.store.arena.layout import header_offset
from kvray.store.arena.lease import Lease
from kvray.store.arena.tables import Array
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import SLOT, chain, make_arena, pool_of, spec, store

KEYS, OTHERS, MORE = chain(3), chain(2, seed="others"), chain(9, seed="more")
READERS = [[PartRequest(0), PartRequest(1)], [PartRequest(1)]]
FLIPS = 20
"""Of each table."""


class Scene:
    """An arena of two slabs, all of whose bytes can be put back."""

    def __init__(self, directory: Path) -> None:
        self.arena = make_arena(directory, asked=spec(num_slabs=4, slots_per_slab=4, holders_max=2))
        self.arena.join("engine")
        for part in (0, 1):
            store(self.arena, KEYS, part=part)
        store(self.arena, OTHERS)
        self.memory: Array = np.memmap(directory / "arena", dtype=np.uint8, mode="r+")
        self.others = self.lease(OTHERS, [[PartRequest(0)]])
        self.image = self.memory.copy()
        self.leases = self.lease(KEYS, READERS)
        self.leased_image = self.memory.copy()

    def put_back(self, image: Array) -> None:
        self.memory[:] = image

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
            expected = np.concatenate([pool_of(KEYS[:count], part) for part in parts])
            pool = np.zeros((one.num_slots, SLOT), np.uint8)
            with contextlib.suppress(KVRayError):
                self.arena.read(one, pool, np.arange(one.num_slots), verify=verify)
                assert np.array_equal(pool, expected), "another block's bytes"


@pytest.fixture
def scene(directory: Path) -> Iterator[Scene]:
    made = Scene(directory)
    yield made
    made.put_back(made.image)
    made.arena.close()
    del made.memory


def bits(scene: Scene, per_table: int | None) -> Iterator[tuple[int, int]]:
    """Yield (byte, bit) of the values in use, up to so many of each table; None: every one.

    Low bits and the highest more often than others: they make one sound value of another.
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
        yield from ((value + bit // 8, bit % 8) for value, bit in each)


COUNTS = [FLIPS, pytest.param(None, marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
def test_a_bit_flipped_between_store_and_lease_gives_no_other_block(
    scene: Scene, count: int | None
) -> None:
    for place, bit in bits(scene, count):
        scene.put_back(scene.image)
        scene.memory[place] ^= 1 << bit
        leases: tuple[Lease, ...] = ()
        with contextlib.suppress(KVRayError):
            leases = scene.lease(KEYS, READERS)
        scene.go_on()
        scene.read(leases)


@pytest.mark.parametrize("count", COUNTS)
def test_a_bit_flipped_between_lease_and_load_gives_no_other_block(
    scene: Scene, count: int | None
) -> None:
    for place, bit in bits(scene, count):
        scene.put_back(scene.leased_image)
        scene.memory[place] ^= 1 << bit
        scene.go_on()
        scene.read(scene.leases)


@pytest.mark.parametrize("count", COUNTS)
def test_without_checksums_a_flipped_bit_gives_no_block_of_another_key(
    scene: Scene, count: int | None
) -> None:
    for place, bit in bits(scene, count):
        scene.put_back(scene.leased_image)
        scene.memory[place] ^= 1 << bit
        scene.read(scene.leases, verify=False)


@pytest.mark.parametrize("count", COUNTS)
def test_the_owner_mends_what_a_flipped_bit_contradicts(scene: Scene, count: int | None) -> None:
    for place, bit in bits(scene, count):
        scene.put_back(scene.leased_image)
        scene.memory[place] ^= 1 << bit
        owner = ArenaOwner(scene.arena)
        owner.audit()
        assert not owner.audit(), "it repairs again and again"
        check_invariants(scene.arena.tables)
        scene.go_on()
        scene.read(scene.leases)
