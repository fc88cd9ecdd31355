"""One process's access to an arena: joining, leaving, reading, writing, and the owner's part."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.errors import CapacityError, ConfigError, LeaseExpired, ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner, Held, Membership, PartRequest
from kvray.store.arena import holders
from kvray.store.arena.layout import RESERVED
from kvray.store.machine.side_file import HOLDER_BYTES
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    PLACE,
    SLOT,
    acquire,
    chain,
    fetch,
    leased,
    leased_for,
    make_arena,
    num_here,
    release,
    reserved,
    spec,
    store,
)

KEYS = chain(10)
BUSY_S = 0.02
NOTHING = Held(num_blocks=0, leases=())


@pytest.fixture
def second(arena: Arena, directory: Path) -> Iterator[Arena]:
    """Another mapping of the arena, with a holder row of its own."""
    opened = Arena.attach(directory, label="second", lock_wait_s=BUSY_S)
    yield opened
    opened.close()


# -- leases and reservations ----------------------------------------------------------------------


def test_parts_are_present_each_for_itself_and_leased_together(arena):
    store(arena, KEYS[:6], part=0)
    store(arena, KEYS[:4], part=1)
    store(arena, KEYS[1:3], part=3)
    pending = reserved(arena, KEYS[6:8], parent=KEYS[5], depth=6)
    assert len(pending.slots) == 2
    masks = arena.present(KEYS, [0, 3])
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[0, 1, 2, 3, 4, 5], [1, 2]]
    assert arena.abort(pending)
    three = [[PartRequest(part)] for part in range(3)]
    held = leased_for(arena, KEYS, three[:2])
    assert [one.num_slots for one in held.leases] == [4, 4]
    for part, one in enumerate(held.leases):
        assert fetch(arena, KEYS, one, part=part)
    assert leased_for(arena, KEYS, three) == NOTHING
    assert arena.release(*held.leases)


def test_arena_busy_is_a_miss(arena, second):
    store(arena, KEYS)
    held = leased(second, KEYS)
    assert acquire(arena._lock, 0)
    assert second.lease(KEYS) is None
    assert second.reserve(KEYS, **PLACE) is None
    assert not second.release(held)
    release(arena._lock)
    assert second.release(held)


BAD_CALLS: dict[str, Callable[[Arena], object]] = {
    "no key": lambda arena: arena.lease([BlockKey(b"x")]),
    "one key twice": lambda arena: reserved(arena, KEYS + KEYS[:1]),
    **{
        f"{name} {value}": partial(reserved, keys=KEYS, **{name: value})
        for name, value in (
            *(("part", -1), ("part", 2**40), ("depth", -1), ("depth", 2**40)),
            *(("block_bytes", 0), ("block_bytes", -4096), ("parent", b"x")),
        )
    },
    "too few checksums": lambda arena: arena.commit(reserved(arena, KEYS), np.zeros(9, "<u8")),
    "a table of checksums": lambda arena: arena.commit(
        reserved(arena, KEYS), np.zeros((10, 1), "<u8")
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_a_caller_does_wrong_leaves_no_mark(arena, name):
    with pytest.raises(ConfigError):
        BAD_CALLS[name](arena)
    assert arena.stats()["repairs"] == 0


def test_block_larger_than_a_slab_is_refused_with_the_fix(arena):
    with pytest.raises(CapacityError, match=r"raise arena\.slab"):
        reserved(arena, KEYS, block_bytes=8 * SLOT + 1)


def test_empty_calls_are_fine(arena):
    assert arena.lease([]) == []
    assert arena.release()
    made = reserved(arena, [])
    assert arena.commit(made, np.empty(0, dtype="<u8"))
    assert arena.abort(made)


def test_sections_that_raise_change_nothing(arena, monkeypatch):
    store(arena, KEYS)
    monkeypatch.setattr("kvray.store.arena.lease.Lease", lambda **kwargs: 1 / 0)
    with pytest.raises(ShardUnavailable, match="make no sense"):
        arena.lease(KEYS)
    assert not arena.tables.slot_leases.any()
    assert num_here(arena, KEYS) == 10
    assert arena.stats()["repairs"] == 0


# -- membership -----------------------------------------------------------------------------------


def test_who_has_not_joined_can_neither_lease_nor_reserve(directory):
    stranger = make_arena(directory)
    for call in (lambda: stranger.lease(KEYS), lambda: reserved(stranger, KEYS)):
        with pytest.raises(LeaseExpired, match="join"):
            call()
    stranger.close()


def test_full_holder_table_is_a_capacity_error(directory):
    arena = make_arena(directory, asked=spec(holders_max=2))
    others = [Arena(directory, lock_wait_s=1) for _ in range(2)]
    for _ in range(2):  # joining twice is joining once
        assert [one.join("x") for one in others] == [0, 1]
    assert arena.stats()["holders"] == 2
    with pytest.raises(CapacityError, match=r"raise arena\.holders_max"):
        arena.join("third")
    others[0].leave()
    assert arena.join("third") == 0
    for one in (arena, *others):
        one.close()


def test_label_of_any_text_is_kept_as_far_as_it_fits_and_controls_no_terminal(arena, second):
    second.leave()
    row = second.join("ü" * 100 + "\ud800")
    assert bytes(arena.tables.holder_label[row]).decode(errors="replace").startswith("ü" * 30)
    assert holders.shown(b"engine-7 \xc3\xbc") == "engine-7 ü"
    assert holders.shown(b"a\x1b[2J\n\xff") == "a\ufffd[2J\ufffd\ufffd"


def test_leaving_beside_other_threads_leaves_nothing(arena, directory):
    def lease_until_it_ends(leaving: Arena) -> None:
        with contextlib.suppress(LeaseExpired):
            for number in itertools.count():
                if leaving.lease(KEYS) is None:
                    return
                if leaving.reserve(chain(1, seed=str(number)), **PLACE) is None:
                    return

    store(arena, KEYS)
    for _ in range(10):
        leaving = Arena.attach(directory, label="leaving", lock_wait_s=1)
        with ThreadPoolExecutor(3) as pool:
            threads = [pool.submit(lease_until_it_ends, leaving) for _ in range(3)]
            time.sleep(0.005)
            leaving.leave()
        assert [one.result() for one in threads] == [None] * 3
        leaving.close()
        check_invariants(arena.tables)
        assert not arena.tables.slot_leases.any()
        assert not (arena.tables.slot_state == RESERVED).any()
    assert arena.stats()["repairs"] == 0


# -- death ----------------------------------------------------------------------------------------


def die(arena: Arena) -> None:
    """End the liveness lock, which is all that a death does."""
    arena.side_file.unlock(HOLDER_BYTES + arena.holder)


def test_rows_of_the_dead_go_to_who_joins(arena, second, directory):
    store(arena, KEYS)
    row = second.holder
    assert second.lease(KEYS)
    die(second)
    third = Arena(directory, lock_wait_s=1)
    assert third.join("third") == row
    assert not arena.tables.slot_leases.any()
    assert third.lease(KEYS)
    assert ArenaOwner(arena).bury_dead(limbo_s=0) == []
    assert arena.tables.slot_leases.any()
    third.close()


def test_row_that_was_taken_again_meanwhile_is_not_buried(arena, second, directory, monkeypatch):
    store(arena, KEYS)
    die(second)
    third, look, calls = Arena(directory, lock_wait_s=1), holders.dead_rows, []

    def look_and_be_late(*where: Any) -> list[int]:
        calls.append(look(*where))
        if len(calls) == 1:
            third.join("third")
            third.lease(KEYS)
        return calls[-1]

    monkeypatch.setattr(holders, "dead_rows", look_and_be_late)
    assert ArenaOwner(arena).bury_dead(limbo_s=0) == []
    assert calls == [[third.holder], []]
    assert int(arena.tables.slot_leases.sum()) == 10
    third.close()


# -- the owner's part -----------------------------------------------------------------------------


def test_evicting_ahead_looks_at_each_block_size(arena):
    small, large = chain(32, seed="small"), chain(16, seed="large")
    store(arena, small)
    store(arena, large, block_bytes=2 * SLOT)
    assert arena.lease(small[:20])
    assert ArenaOwner(arena).evict_ahead(0.25) == 8
    assert (num_here(arena, small), num_here(arena, large)) == (24, 16)
    assert ArenaOwner(arena).evict_ahead(0.5) == 4 + 4
    assert (num_here(arena, small), num_here(arena, large)) == (20, 12)
    assert arena.lease(small[20:]) == []


def test_figures_are_those_of_the_tables(arena):
    store(arena, KEYS)
    store(arena, KEYS[:2], part=1, block_bytes=3 * SLOT - 100)
    arena.lease(KEYS[:3])
    stats = arena.stats()
    assert (stats["blocks"], stats["leased_blocks"], stats["stored"]) == (12, 3, 12)
    assert stats["resident_bytes"] == 10 * SLOT + 2 * (3 * SLOT - 100)
    assert stats["taken_bytes"] == (10 + 2 * 4) * SLOT
    assert (stats["holders"], stats["spare_slabs"]) == (1, 5)
    names = ("block_bytes", "slabs", "slots", "blocks", "free_slots")
    small, large = ([use[name] for name in names] for use in stats["slabs"])
    assert (small, large) == ([SLOT, 2, 16, 10, 6], [3 * SLOT - 100, 1, 2, 2, 0])
    waste = [(use["slot_waste_bytes"], use["slab_waste_bytes"]) for use in stats["slabs"]]
    assert waste == [(0, 0), (2 * 100, 2 * SLOT)]


def test_a_retired_arena_only_takes_back(arena, second, directory):
    assert [ArenaOwner(one).adopt() for one in (arena, second)] == [1, 2]
    store(arena, KEYS)
    held, made = leased(second, KEYS), reserved(second, chain(3, seed="x"))
    ArenaOwner(arena).retire()
    assert second.retired
    assert second.lease(KEYS) is None
    assert second.reserve(KEYS, **PLACE) is None
    assert fetch(second, KEYS, held)
    assert second.release(held)
    assert second.commit(made, np.zeros(3, dtype="<u8"))
    second.leave()
    with pytest.raises(ShardUnavailable, match="retired"):
        second.join("late")
    assert list(directory.iterdir()) == []


def test_lease_of_slots_takes_those_that_are_ready(arena):
    made = store(arena, chain(5))
    reserved(arena, chain(2, seed="x"))
    held = arena.lease_slots(np.arange(arena.tables.geometry.num_slots))
    assert held is not None
    assert arena.leased_slots(held).tolist() == sorted(made.slots.tolist())
    ArenaOwner(arena).clear()
    assert num_here(arena, chain(5)) == 5
    assert arena.release(held)


# -- in another process's name --------------------------------------------------------------------


def test_a_lease_in_anothers_name_ends_when_that_one_leaves_and_none_is_taken_then(arena, second):
    store(arena, KEYS[:6])
    gone, wanted = second.membership, [[PartRequest(0)]]
    held = leased_for(arena, KEYS, wanted, member=gone)
    assert held.num_blocks == 6
    arena.leave()
    assert len(second.leased_slots(held.leases[0])) == 6
    second.leave()
    with pytest.raises(LeaseExpired):
        second.leased_slots(held.leases[0])
    arena.join("again")
    assert leased_for(arena, KEYS, wanted, member=gone) == NOTHING
    second.join("again")
    assert second.membership.row == gone.row
    for nobody in (gone, Membership(-1, 1), Membership(10**9, 1)):
        assert leased_for(arena, KEYS, wanted, member=nobody) == NOTHING
