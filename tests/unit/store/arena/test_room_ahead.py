"""The room that an owner makes ahead of need: how much, and whose blocks and slabs go for it."""

import os
import secrets
from pathlib import Path

import pytest

from kvray.store.arena import slabs, victims
from kvray.store.arena.arena import Arena
from kvray.store.arena.layout import HEADER, RETIRED
from kvray.store.arena.owner import STATE_BYTES, ArenaOwner, retire_file
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import SLOT, chain, store


def fill(arena: Arena, *, block_bytes: int = SLOT, num_blocks: int = 4) -> None:
    """Store chains until every slot has a block."""
    while slabs.num_available(arena.tables, block_bytes):
        store(arena, chain(num_blocks, seed=secrets.token_hex(4)), block_bytes=block_bytes)


def room(arena: Arena, block_bytes: int = SLOT) -> int:
    return slabs.num_available(arena.tables, block_bytes)


def test_room_follows_what_writers_take(arena: Arena) -> None:
    fill(arena)
    owner = ArenaOwner(arena)
    owner.evict_ahead(0.1)
    quiet = room(arena)
    store(arena, chain(2, seed="a"))
    owner.evict_ahead(0.1)
    assert room(arena) == quiet, "two rounds of that fit into what is free anyway"
    store(arena, chain(quiet, seed="b"))
    owner.evict_ahead(0.0)
    most = arena.tables.geometry.num_slots // 16
    assert room(arena) == min(2 * quiet, most)


def test_room_that_nobody_takes_is_not_made_again(arena: Arena) -> None:
    fill(arena)
    owner = ArenaOwner(arena)
    owner.evict_ahead(0.1)
    store(arena, chain(room(arena), seed="b"))
    owner.evict_ahead(0.0)
    before = room(arena)
    assert before > 0
    assert owner.evict_ahead(0.0) == 0
    assert room(arena) == before


def test_a_size_whose_blocks_are_younger_gets_the_slabs_of_another(arena: Arena) -> None:
    store(arena, chain(2, seed="small"))
    fill(arena, block_bytes=2 * SLOT)
    store(arena, chain(6, seed="younger"))
    owner = ArenaOwner(arena)
    owner.evict_ahead(0.0)
    for seed in range(6):
        store(arena, chain(2, seed=f"small {seed}"))
        owner.evict_ahead(0.5)
    own = slabs.slots_of(arena.tables, SLOT)
    assert len(own) > arena.tables.geometry.slots_per_slab
    check_invariants(arena.tables)


def test_a_slab_that_is_younger_than_a_sizes_own_blocks_stays(arena: Arena) -> None:
    store(arena, chain(8, seed="small"))
    fill(arena, block_bytes=2 * SLOT)
    owner = ArenaOwner(arena)
    owner.evict_ahead(0.0)
    before = len(slabs.slots_of(arena.tables, 2 * SLOT))
    assert owner.evict_ahead(0.13) > 0
    assert len(slabs.slots_of(arena.tables, 2 * SLOT)) == before
    assert victims.num_slabs_left(arena.tables) > 0


def test_a_slab_with_a_lease_is_not_cleared(arena: Arena) -> None:
    store(arena, chain(2, seed="small"))
    fill(arena, block_bytes=2 * SLOT, num_blocks=1)
    owner, tables = ArenaOwner(arena), arena.tables
    owner.evict_ahead(0.0)
    first = int(victims.next_slabs(tables, SLOT)[0])
    chosen = slabs.slots_of(tables, 2 * SLOT)
    chosen = chosen[tables.geometry.slab_of(chosen) == first]
    held = arena.lease_slots(chosen[:1])
    store(arena, chain(6, seed="younger"))
    owner.evict_ahead(0.5)
    assert held is not None
    assert arena.release(held)
    assert tables.slab_block_bytes[first] == 2 * SLOT
    check_invariants(tables)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_rounds_end_with_nothing_to_evict(arena: Arena, share: float) -> None:
    fill(arena)
    owner = ArenaOwner(arena)
    while owner.evict_ahead(share):
        check_invariants(arena.tables)
    assert owner.evict_ahead(share) == 0


def overwrite(path: Path, at: int, what: bytes) -> None:
    """Change a file under those who map it."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(what)


def test_the_state_stands_where_the_layout_says() -> None:
    assert HEADER.fields is not None
    dtype, at = HEADER.fields["state"][:2]
    assert slice(at, at + dtype.itemsize) == STATE_BYTES


def test_those_who_map_a_retired_arena_see_it_and_keep_its_bytes(
    arena: Arena, directory: Path
) -> None:
    arena.tables.holder_label[7] = b"kept"
    retire_file(directory / "arena")
    assert arena.retired
    assert arena.tables.holder_label[7] == b"kept"
    assert not (directory / "arena").exists()


def test_an_arena_of_another_format_is_retired_too(arena: Arena, directory: Path) -> None:
    path = directory / "arena"
    overwrite(path, 8, (99).to_bytes(4, "little"))
    overwrite(path, 32, os.urandom(1000))
    retire_file(path)
    assert int(arena.tables.header["state"]) == RETIRED


@pytest.mark.parametrize("content", [b"", b"KVRAYARN", b"garbage" * 1000])
def test_what_is_no_arena_is_unlinked(directory: Path, content: bytes) -> None:
    path = directory / "arena"
    path.write_bytes(content)
    os.link(path, directory / "other")
    retire_file(path)
    assert not path.exists()
    assert (directory / "other").read_bytes() == content


def test_a_fifo_or_a_link_is_unlinked_and_its_target_left_alone(
    arena: Arena, directory: Path
) -> None:
    os.mkfifo(directory / "fifo")
    (directory / "link").symlink_to("arena")
    for name in ("fifo", "link", "nothing"):
        retire_file(directory / name)
        assert not os.path.lexists(directory / name)
    assert not arena.retired


def test_a_directory_is_refused(directory: Path) -> None:
    (directory / "arena").mkdir()
    with pytest.raises(OSError, match="directory"):
        retire_file(directory / "arena")
