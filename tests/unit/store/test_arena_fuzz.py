"""Whatever lies in an arena's place, it is mapped if it is one, or refused in a sentence.

A process that may open the arena is trusted, so nothing here is an attack: it is memory that a
dying machine, another kvray or a stray pointer has left.
"""

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.errors import CorruptBlock, KVRayError, ShardUnavailable
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.file import ARENA_FILE
from kvray.store.arena.layout import HEADER, MAGIC, header_checksum
from kvray.store.arena.owner import retire_file
from tests.examples import examples
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import SLOT, chain, fetch, make_arena, spec, store

KEYS = chain(8)
GEOMETRY = spec().geometry()
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


@pytest.fixture
def image(directory: Path) -> Path:
    """Return a copy of an arena with blocks, whose lock file stays."""
    arena = make_arena(directory)
    arena.join("maker")
    store(arena, KEYS)
    arena.close()
    return (directory / ARENA_FILE).rename(directory / "image")


def attach(directory: Path) -> Arena | None:
    """Do what an engine does with an arena: map, join, look at it; None: it was refused."""
    with contextlib.suppress(ShardUnavailable):
        return Arena(directory, lock_wait_s=0.05)
    return None


def use(arena: Arena) -> None:
    """Read and write as an engine does; what is read is right, or refused."""
    with contextlib.closing(arena), contextlib.suppress(KVRayError):
        arena.join("engine")
        arena.stats()
        with contextlib.suppress(CorruptBlock):
            for held in arena.lease(KEYS) or ():
                assert fetch(arena, KEYS, held)
        arena.reserve(chain(3, seed="more"), parent=None, depth=0, part=0, block_bytes=SLOT)


def damaged(image: Path, damage: list[tuple[str, float, bytes]]) -> bytes:
    """Return an arena's bytes with others written over its tables, each at its place in one."""
    memory = bytearray(image.read_bytes())
    for name, place, value in damage:
        at = OFFSETS[name] + int(place * SIZES[name])
        memory[at : at + len(value)] = value
    return bytes(memory)


@fuzzed
@given(st.binary(max_size=300) | st.binary(max_size=60).map(MAGIC.__add__))
def test_bytes_that_are_no_arena_are_refused(directory, memory):
    (directory / ARENA_FILE).write_bytes(memory.ljust(5000, b"\1"))
    assert attach(directory) is None
    retire_file(directory / ARENA_FILE)
    assert not (directory / ARENA_FILE).exists()


@fuzzed
@given(fields=FIELDS)
def test_any_header_is_refused_or_used(directory, image, fields):
    memory = bytearray(image.read_bytes())
    header = np.frombuffer(memory, HEADER, count=1)
    for name, value in fields.items():
        header[name] = value
    header["checksum"] = header_checksum(header.tobytes())
    (directory / ARENA_FILE).write_bytes(memory)
    if arena := attach(directory):
        use(arena)


@fuzzed
@given(place=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 / 4096, 0.5, 0.999999]))
def test_an_arena_that_was_cut_short_is_refused(directory, image, place):
    """What is not there cannot be mapped: to read it would end the process with a bus error."""
    memory = image.read_bytes()
    (directory / ARENA_FILE).write_bytes(memory[: int(place * len(memory))])
    assert attach(directory) is None


DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(sorted(SIZES)),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=64) | st.just(b"\xff" * 64),
    ),
    min_size=1,
    max_size=8,
)


@fuzzed
@given(damage=DAMAGE)
def test_an_engine_reads_nothing_wrong_from_damaged_tables_that_nobody_has_put_in_order(
    directory, image, damage
):
    """A shard puts them in order in its first round of looks, and engines go on meanwhile.

    What is found may make no sense to it, which its connector counts as a defect and misses. What
    may not be is a wrong block, memory without end, or a wait.
    """
    (directory / ARENA_FILE).write_bytes(damaged(image, damage))
    if arena := attach(directory):
        with np.errstate(all="ignore"), contextlib.suppress(LookupError, ValueError):
            use(arena)


@fuzzed
@given(damage=DAMAGE)
def test_damaged_tables_are_put_in_order_by_the_next_owner(directory, image, damage):
    (directory / ARENA_FILE).write_bytes(damaged(image, damage))
    arena = Arena(directory, lock_wait_s=1.0)
    owner = ArenaOwner(arena)
    owner.adopt()
    while not owner.is_audited:
        owner.audit()
    owner.bury_dead(limbo_s=0.0)
    check_invariants(arena.tables)
    use(arena)
