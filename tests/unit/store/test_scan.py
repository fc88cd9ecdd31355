"""The walk over an arena's blocks: what it checks, what it leaves alone, what it holds."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvray.errors import LeaseExpired, ShardUnavailable
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.layout import QUARANTINED, READY
from kvray.store.scan import scan
from tests.unit.store.conftest import Child
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import PATIENT_S, SLOT, chain, store

KEYS = chain(20)


def quiet(done: int, total: int) -> None:
    """Report to nobody."""


def spoil(arena: Arena, slot: int) -> str:
    """Change one byte of a block; return the name of its key."""
    slab, row = arena.tables.geometry.place_of(slot)
    arena.tables.rows(slab)[row, 17] ^= 1
    return arena.tables.slot_key[slot].tobytes().hex()[:8]


def test_every_block_of_every_size_is_checked(arena: Arena) -> None:
    store(arena, KEYS)
    store(arena, chain(5, seed="large"), block_bytes=2 * SLOT + 1)
    found = scan(arena, quiet)
    assert (found.blocks, found.corrupt, found.skipped) == (25, (), 0)
    assert found.num_bytes == 20 * SLOT + 5 * (2 * SLOT + 1)


def test_a_wrong_byte_is_found_named_and_never_served_again(arena: Arena) -> None:
    made = store(arena, KEYS)
    names = {spoil(arena, int(made.slots[row])) for row in (3, 11)}
    found = scan(arena, quiet)
    assert set(found.corrupt) == names
    assert found.blocks == 20
    assert arena.match(KEYS) == 3
    assert arena.stats()["corrupt"] == 2
    assert (arena.tables.slot_state[made.slots[[3, 11]]] == QUARANTINED).all()
    check_invariants(arena.tables)
    assert scan(arena, quiet).corrupt == ()


def test_what_is_being_written_is_not_looked_at(arena: Arena) -> None:
    store(arena, KEYS[:2])
    assert arena.reserve(KEYS[2:], parent=KEYS[1], depth=2, part=0, block_bytes=SLOT)
    found = scan(arena, quiet)
    assert (found.blocks, found.corrupt, found.skipped) == (2, (), 0)


def test_batches_are_small_and_nothing_is_leased_between_them(arena: Arena) -> None:
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


def test_a_block_larger_than_a_batch_is_checked_alone(arena: Arena) -> None:
    store(arena, chain(2), block_bytes=8 * SLOT)
    assert scan(arena, quiet, batch_bytes=1).blocks == 2


def test_blocks_that_go_during_the_walk_are_passed_over(arena: Arena) -> None:
    store(arena, KEYS)

    def clear(done: int, total: int) -> None:
        if done:
            ArenaOwner(arena).clear()

    found = scan(arena, clear)
    assert found.blocks + found.skipped < 20
    assert found.corrupt == ()


def test_an_end_between_batches_leaves_no_lease(arena: Arena) -> None:
    store(arena, KEYS)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(arena, interrupt)
    assert not arena.tables.slot_leases.any()
    check_invariants(arena.tables)


def test_the_walk_does_not_disturb_the_leases_of_others(
    arena: Arena, child: Callable[[], Child]
) -> None:
    store(arena, KEYS)
    other = child()
    other.say("arena.join('other')")
    other.say("arena.lease(small.chain(20))")
    assert scan(arena, quiet).blocks == 20
    assert arena.tables.slot_leases.sum() == 20


def test_blocks_that_come_and_go_during_the_walk_are_never_called_corrupt(
    arena: Arena, directory: Path
) -> None:
    over = threading.Event()

    def churn() -> None:
        writer = Arena(directory, lock_wait_s=PATIENT_S)
        writer.join("writer")
        number = 0
        while not over.is_set():
            number += 1
            store(writer, chain(7, seed=str(number)), block_bytes=SLOT * (1 + number % 3))
        writer.close()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        checked = 0
        deadline = time.monotonic() + 20
        while checked < 2000 and time.monotonic() < deadline:
            found = scan(arena, quiet, batch_bytes=4 * SLOT)
            assert found.corrupt == ()
            checked += found.blocks
    finally:
        over.set()
        thread.join()
    assert checked >= 2000
    assert (arena.tables.slot_state == READY).any()
    check_invariants(arena.tables)


def test_an_arena_that_stays_busy_is_passed_over_without_an_end_to_the_waits(
    arena: Arena, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.store.scan._PATIENT_S", 0.1)
    store(arena, KEYS)
    hurried = Arena(directory, lock_wait_s=0.001)
    hurried.join("hurried")

    def keep_locked(done: int, total: int) -> None:
        if not done:
            assert arena._lock.acquire(1)

    start = time.monotonic()
    found = scan(hurried, keep_locked, batch_bytes=SLOT)
    took_s = time.monotonic() - start
    arena._lock.release()
    assert (found.blocks, found.skipped) == (0, 20)
    assert took_s < 20 * 0.1
    hurried.close()


def test_an_arena_that_is_given_up_ends_the_walk(arena: Arena) -> None:
    store(arena, KEYS)
    with pytest.raises(ShardUnavailable, match="given up"):
        scan(arena, lambda done, total: ArenaOwner(arena).retire())


def test_who_is_no_holder_cannot_walk(arena: Arena) -> None:
    store(arena, KEYS)
    arena.leave()
    with pytest.raises(LeaseExpired, match="join"):
        scan(arena, quiet)


def test_an_empty_arena_is_sound(arena: Arena) -> None:
    found = scan(arena, quiet)
    assert (found.blocks, found.num_bytes, found.skipped) == (0, 0, 0)
