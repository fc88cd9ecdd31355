"""What the slabs of small tables say of themselves, with every figure counted by hand."""

from pathlib import Path

import numpy as np

from kvray.store.arena.figures import slab_use
from kvray.store.arena.layout import FREE, READY, RESERVED
from kvray.store.arena.slabs import num_spare
from kvray.store.arena.tables import Tables
from tests.unit.store.small_arena import SLOT, chain, make_arena, make_tables, put, store


def lay(tables: Tables, *slabs: str, block_bytes: int = SLOT) -> None:
    """Make the first slabs serve `block_bytes`, with a slot for each letter: Ready, busy, free."""
    states = {"R": READY, "b": RESERVED, ".": FREE}
    per_slab = tables.geometry.slots_per_slab
    for slab, letters in enumerate(slabs):
        tables.slab_block_bytes[slab] = block_bytes
        start = slab * per_slab
        tables.slot_state[start : start + len(letters)] = [states[letter] for letter in letters]


def test_an_empty_arena_is_all_spare() -> None:
    tables = make_tables(num_slabs=8)
    assert slab_use(tables) == []
    assert num_spare(tables) == 8


def test_each_block_size_is_counted_by_itself() -> None:
    tables = make_tables(num_slabs=8, slots_per_slab=8)
    put(tables, chain(10, seed="small"))
    put(tables, chain(3, seed="large"), block_bytes=3 * SLOT)
    small, large = slab_use(tables)
    assert (small["block_bytes"], small["slabs"], small["slots"]) == (SLOT, 2, 16)
    assert (small["blocks"], small["free_slots"]) == (10, 6)
    assert (large["block_bytes"], large["slabs"], large["slots"]) == (3 * SLOT, 2, 4)
    assert (large["blocks"], large["free_slots"]) == (3, 1)
    assert num_spare(tables) == 4


def test_free_memory_in_one_piece_is_not_fragmented() -> None:
    tables = make_tables(slots_per_slab=8)
    lay(tables, "RR......", "RRRRR...")
    (use,) = slab_use(tables)
    assert use["longest_free_run"] == 6
    assert use["fragmented_share"] == 0


def test_free_slots_outside_their_slab_s_longest_run_are_fragmented() -> None:
    tables = make_tables(slots_per_slab=8)
    lay(tables, "R.R.R...", "b.RRRRRR", "........")
    (use,) = slab_use(tables)
    assert use["free_slots"] == 5 + 1 + 8
    assert use["longest_free_run"] == 8
    assert use["fragmented_share"] == 1 - (3 + 1 + 8) / 14


def test_a_run_does_not_go_on_in_the_next_slab() -> None:
    tables = make_tables(slots_per_slab=8)
    lay(tables, "RRRRRR..", "....RRRR")
    (use,) = slab_use(tables)
    assert use["longest_free_run"] == 4
    assert use["fragmented_share"] == 0


def test_a_full_slab_has_no_fragments() -> None:
    tables = make_tables(slots_per_slab=8)
    lay(tables, "RRRRRRRR")
    (use,) = slab_use(tables)
    assert (use["free_slots"], use["longest_free_run"], use["fragmented_share"]) == (0, 0, 0)


def test_bytes_that_no_block_can_use_are_counted() -> None:
    tables = make_tables(slots_per_slab=8)
    lay(tables, "R", "R", block_bytes=2 * SLOT + 100)
    (use,) = slab_use(tables)
    assert use["slots"] == 2 * 2
    assert use["slot_waste_bytes"] == 4 * (SLOT - 100)
    assert use["slab_waste_bytes"] == 2 * 2 * SLOT


def test_the_parts_of_a_slab_add_up_to_it() -> None:
    tables = make_tables(slots_per_slab=32)
    rng = np.random.default_rng(0)
    for slab, size in enumerate((SLOT - 1, 5 * SLOT, 7 * SLOT + 1)):
        usable = tables.geometry.slab_bytes // tables.geometry.stride(size)
        tables.slab_block_bytes[slab] = size
        tables.slot_state[slab * 32 : slab * 32 + usable] = rng.choice([FREE, READY], usable)
    for use in slab_use(tables):
        wasted = use["slot_waste_bytes"] + use["slab_waste_bytes"]
        assert use["slots"] * use["block_bytes"] + wasted == tables.geometry.slab_bytes
        assert use["blocks"] + use["free_slots"] == use["slots"]


def test_an_arena_s_figures_name_its_slabs(directory: Path) -> None:
    arena = make_arena(directory)
    arena.join("test")
    store(arena, chain(3))
    figures = arena.stats()
    assert [(use["block_bytes"], use["blocks"]) for use in figures["slabs"]] == [(SLOT, 3)]
    assert figures["spare_slabs"] == 7
    arena.close()
