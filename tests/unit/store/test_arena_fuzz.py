"""Whatever lies in an arena's place, it is mapped if it is one, or refused in a sentence.

What is read is right or refused, whatever its tables say. A process that may open the arena is
trusted, so nothing here is an attack: it is memory that a dying machine, another kvray or a stray
pointer has left.
"""

import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.errors import KVRayError, ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner, PartRequest
from kvray.store.arena.file import ARENA_FILE
from kvray.store.arena.layout import HEADER, MAGIC, header_checksum, header_offset
from kvray.store.arena.lease import Lease
from kvray.store.arena.owner import retire_file
from kvray.store.arena.tables import Array
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import SLOT, chain, make_arena, pool_of, spec, store

KEYS, OTHERS, MORE = chain(3), chain(2, seed="others"), chain(9, seed="more")
READERS = [[PartRequest(0), PartRequest(1)], [PartRequest(1)]]
ASKED = spec(num_slabs=4, slots_per_slab=4, holders_max=2)
GEOMETRY = ASKED.geometry()
OFFSETS, TABLES = GEOMETRY.offsets(), GEOMETRY.tables()
SIZES = {name: np.dtype(kind).itemsize * math.prod(shape) for name, kind, shape in TABLES}
of_one_directory = [HealthCheck.function_scoped_fixture]
fuzzed = settings(max_examples=examples(60), suppress_health_check=of_one_directory)
WORDS = st.integers(0, 2**64 - 1)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "state": st.integers(0, 2**32 - 1),
        "arena_id": st.binary(max_size=16) | st.sampled_from([b"a\0b", b"../../x", b"\xff"]),
        "cluster_name": st.binary(max_size=64),
        "created": st.floats(),
        "capacity": WORDS | st.just(2**62),
        "slab_bytes": WORDS | st.just(2**20),
        "slot_min": WORDS | st.just(2**12),
        **dict.fromkeys(("holders_max", "undo_count", "next_lease", "next_page", "tick"), WORDS),
    },
)


class Scene:
    """An arena all of whose bytes can be put back."""

    def __init__(self, directory: Path) -> None:
        self.arena = make_arena(directory, asked=ASKED)
        self.arena.join("engine")
        for part in (0, 1):
            store(self.arena, KEYS, part=part)
        store(self.arena, OTHERS)
        self.memory: Array = np.memmap(directory / ARENA_FILE, dtype=np.uint8, mode="r+")
        self.others = lease(self.arena, OTHERS, [[PartRequest(0)]])
        self.image = self.memory.copy()
        self.leases = lease(self.arena, KEYS, READERS)
        self.leased_image = self.memory.copy()

    def go_on(self) -> None:
        """Do what others do meanwhile; whatever a table says, none of them ends of it."""
        arena = self.arena
        for step in (
            lambda: arena.release(*self.others),
            lambda: store_more(arena),
            lambda: arena.present(MORE, (0, 1)),
            lambda: ArenaOwner(arena).evict_ahead(0.3),
        ):
            with contextlib.suppress(KVRayError):
                step()


@pytest.fixture
def scene(directory: Path) -> Iterator[Scene]:
    made = Scene(directory)
    yield made
    made.memory[:] = made.image
    made.arena.close()
    del made.memory


def lease(
    arena: Arena, keys: list[BlockKey], readers: list[list[PartRequest]]
) -> tuple[Lease, ...]:
    held = arena.lease_for(keys, readers)
    return () if held is None else held.leases


def store_more(arena: Arena) -> None:
    made = arena.reserve(MORE, parent=None, depth=0, part=0, block_bytes=SLOT)
    if made is not None:
        pool = pool_of([MORE[row] for row in made.rows])
        arena.commit(made, arena.write(made, pool, np.arange(len(pool))))


def read(arena: Arena, leases: tuple[Lease, ...], *, verify: bool = True) -> None:
    """Read what a lease promises: it is right, or refused."""
    for one, readers in zip(leases, READERS, strict=False):
        parts = [one.part for one in readers]
        count = one.num_slots // len(parts)
        expected = np.concatenate([pool_of(KEYS[:count], part) for part in parts])
        pool = np.zeros((one.num_slots, SLOT), np.uint8)
        with contextlib.suppress(KVRayError):
            arena.read(one, pool, np.arange(one.num_slots), verify=verify)
            assert np.array_equal(pool, expected), "another block's bytes"


def attach(directory: Path) -> bool:
    """Do what an engine does with an arena: map, join, look at it, read, write; False: refused."""
    try:
        arena = Arena(directory, lock_wait_s=0.05)
    except ShardUnavailable:
        return False
    with contextlib.closing(arena), contextlib.suppress(KVRayError):
        arena.join("another")
        arena.stats()
        read(arena, lease(arena, KEYS, READERS))
        store_more(arena)
    return True


@fuzzed
@given(st.binary(max_size=300) | st.binary(max_size=60).map(MAGIC.__add__), st.booleans())
def test_bytes_that_are_no_arena_are_refused_and_unlinked(directory, memory, is_long):
    path, other = directory / ARENA_FILE, directory / "other"
    other.write_bytes(memory.ljust(5000, b"\1") if is_long else memory)
    path.hardlink_to(other)
    before = other.read_bytes()
    assert not attach(directory)
    retire_file(path)
    assert not path.exists()
    # It is marked as retired in case that it is an arena.
    is_marked = memory.startswith(MAGIC) and before != MAGIC
    assert is_marked or other.read_bytes() == before


@fuzzed
@given(fields=FIELDS)
def test_any_header_is_refused_or_used(directory, scene, fields):
    header = scene.image.copy()[: HEADER.itemsize].view(HEADER)
    for name, value in fields.items():
        header[name] = value
    header["checksum"] = header_checksum(header.tobytes())
    scene.memory[:] = scene.image
    scene.memory[: HEADER.itemsize] = header.view("u1")
    attach(directory)


@fuzzed
@given(place=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 / 4096, 0.5, 0.999999]))
def test_an_arena_that_was_cut_short_is_refused(directory, scene, place):
    """What is not there cannot be mapped: to read it would end the process with a bus error."""
    short = directory / "short"
    short.write_bytes(scene.image[: int(place * len(scene.image))].tobytes())
    short.replace(directory / ARENA_FILE)
    assert not attach(directory)


DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(sorted(SIZES)),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=64) | st.just(b"\xff" * 64),
    ),
    min_size=1,
    max_size=8,
)
"""Tables, places in them, and what is written over these."""


@fuzzed
@given(damage=DAMAGE)
def test_an_engine_reads_nothing_wrong_from_damaged_tables_that_nobody_has_put_in_order(
    directory, scene, damage
):
    """A shard puts them in order in its first round of looks, and engines go on meanwhile.

    What is found may make no sense to it, which its connector counts as a defect and misses. What
    may not be is a wrong block, memory without end, or a wait.
    """
    scene.memory[:] = scene.image
    for name, place, value in damage:
        at = OFFSETS[name] + int(place * SIZES[name])
        scene.memory[at : at + len(value)] = np.frombuffer(value, "u1")
    with np.errstate(all="ignore"), contextlib.suppress(LookupError, ValueError):
        attach(directory)


# -- single bits ----------------------------------------------------------------------------------

FLIPS = 8
"""Of each table."""


def flips(scene: Scene, image: Array, per_table: int | None) -> Iterator[None]:
    """Put the image back with one bit of the values in use flipped, again and again.

    Up to so many times for each table; None: for every bit. Low bits and the highest more often
    than others: they make one valid value of another.
    """
    chance, tables = random.Random(7), {"header": (header_offset("shard_epoch"), "<u8", 12, False)}
    for name, dtype, shape in TABLES:
        is_small = math.prod(shape) <= 4 * GEOMETRY.num_slots
        tables[name] = OFFSETS[name], dtype, math.prod(shape), is_small
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
            leases = lease(scene.arena, KEYS, READERS)
        scene.go_on()
        read(scene.arena, leases)


@each_count
@pytest.mark.parametrize("verify", [True, False])
def test_a_bit_flipped_before_a_load_gives_no_other_block(scene, count, verify):
    for _ in flips(scene, scene.leased_image, count):
        if verify:  # only checksums tell what others have overwritten
            scene.go_on()
        read(scene.arena, scene.leases, verify=verify)


@each_count
def test_the_owner_mends_what_a_flipped_bit_contradicts(scene, count):
    for _ in flips(scene, scene.leased_image, count):
        owner = ArenaOwner(scene.arena)
        owner.audit()
        assert not owner.audit(), "it repairs again and again"
        check_invariants(scene.arena.tables)
        scene.go_on()
        read(scene.arena, scene.leases)
