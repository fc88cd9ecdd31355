"""Slabs of several block sizes: where in them slots are taken, and every figure of them."""

import numpy as np
import pytest

from kvray.store.arena import slabs, slots
from kvray.store.arena.layout import FREE, LIMBO, READY, RESERVED
from kvray.store.arena.mapped import slab_use
from kvray.store.arena.payload import slot_bytes
from tests.unit.store.small_arena import SLOT, chain, make_tables, matched, put, reserve, take

EVERY_SLOT = 64


def test_smallest_run_in_the_emptiest_slab_that_is_long_enough_is_taken(tables):
    made = put(tables, chain(EVERY_SLOT))
    gaps = np.concatenate((made.slots[10:13], made.slots[16:20], made.slots[21:24]))
    slots.free(tables, gaps)
    assert reserve(tables, chain(3, seed="a")).slots.tolist() == [21, 22, 23]
    assert reserve(tables, chain(4, seed="b")).slots.tolist() == [16, 17, 18, 19]
    assert reserve(tables, chain(3, seed="c")).slots.tolist() == [10, 11, 12]


def test_blocks_that_no_slab_has_room_for_together_are_spread(tables):
    made = put(tables, chain(EVERY_SLOT))
    slots.free(tables, made.slots[[1, 2, 9, 17, 18, 33]])
    assert sorted(reserve(tables, chain(6, seed="a")).slots.tolist()) == [1, 2, 9, 17, 18, 33]


def test_longest_runs_are_taken_first_where_none_is_long_enough():
    free = np.array([1, 3, 4, 5, 7, 8, 20])
    assert slabs.longest_runs_first(free, 4).tolist() == [3, 4, 5, 7]
    assert slabs.longest_runs_first(free, 6).tolist() == [3, 4, 5, 7, 8, 1]
    assert slabs.longest_runs_first(free, 9).tolist() == free.tolist()


def test_block_sizes_live_in_slabs_of_their_own(tables):
    small, large = put(tables, chain(9)), put(tables, chain(3, seed="x"), block_bytes=3 * SLOT)
    assert tables.slab_block_bytes.tolist() == [SLOT, SLOT, 3 * SLOT, 3 * SLOT, 0, 0, 0, 0]
    assert small.slots.tolist() == list(range(9))
    # A slab of 8 minimal slots holds two of three times the size.
    assert large.slots.tolist() == [16, 17, 24]
    # What is no multiple of the alignment gets whole pages.
    odd = put(tables, chain(1, seed="y"), block_bytes=SLOT + 1)
    assert len(slot_bytes(tables, 32)) == 2 * SLOT
    assert odd.slots.tolist() == [32]


def test_slab_with_a_slot_in_limbo_is_not_given_back(tables):
    made = reserve(tables, chain(8), holder=3)
    slots.strand(tables, 3, now=0.0)
    slots.free(tables, made.slots[1:])
    assert tables.slab_block_bytes[0] == SLOT
    assert tables.slot_state[made.slots[0]] == LIMBO


@pytest.mark.parametrize("num_slabs", [1, 5])
def test_taking_slabs_costs_what_is_in_them_and_hangs_from_it(tables, num_slabs):
    for number in range(8):
        put(tables, chain(8, seed=f"slab {number}"))
    take(tables, chain(8, seed="slab 0"))
    made = put(tables, chain(num_slabs, seed="large"), block_bytes=8 * SLOT)
    assert (len(made.slots), made.dropped) == (num_slabs, 0)
    left = [matched(tables, chain(8, seed=f"slab {number}")) for number in range(8)]
    assert left == [8, *num_slabs * [0], *(7 - num_slabs) * [8]]


def test_slab_from_which_a_leased_block_hangs_is_not_taken(tables):
    keys = chain(EVERY_SLOT)
    put(tables, keys)
    # As a lease that began below the root: nothing above it may go either.
    take(tables, keys[-1:])
    made = reserve(tables, chain(1, seed="large"), block_bytes=8 * SLOT)
    assert (len(made.slots), made.dropped) == (0, 1)
    assert matched(tables, keys) == EVERY_SLOT


@pytest.mark.parametrize("is_used_since", [True, False])
def test_own_blocks_go_before_a_slab_of_another_size_that_was_used_since(tables, is_used_since):
    put(tables, chain(56))
    large = chain(2, seed="large")
    put(tables, large, block_bytes=4 * SLOT)
    if is_used_since:
        put(tables, chain(56))
    put(tables, chain(2, seed="next"), block_bytes=4 * SLOT)
    assert (matched(tables, chain(56)) == 56) is is_used_since
    assert (matched(tables, large) == 0) is is_used_since


@pytest.mark.parametrize(
    ("layout", "free", "longest", "share"),
    [
        (("RR......", "RRRRR..."), 9, 6, 0),
        (("R.R.R...", "b.RRRRRR", "........"), 14, 8, 1 - 12 / 14),
        (("RRRRRR..", "....RRRR"), 6, 4, 0),  # a run ends with its slab
        (("RRRRRRRR",), 0, 0, 0),
    ],
)
def test_free_slots_outside_their_slab_s_longest_run_are_fragmented(layout, free, longest, share):
    tables = make_tables()
    for slab, letters in enumerate(layout):  # Ready, busy, free
        tables.slab_block_bytes[slab] = SLOT
        states = [{"R": READY, "b": RESERVED, ".": FREE}[letter] for letter in letters]
        tables.slot_state[8 * slab : 8 * slab + 8] = states
    (use,) = slab_use(tables)
    assert (use["free_slots"], use["longest_free_run"]) == (free, longest)
    assert use["fragmented_share"] == share
