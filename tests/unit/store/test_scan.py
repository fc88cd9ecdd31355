"""The walk over an arena's blocks: what it checks, and what it leaves alone."""

import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest

from kvray.errors import ShardUnavailable
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.layout import QUARANTINED, READY
from kvray.store.arena.payload import slot_bytes
from kvray.store.scan import scan
from tests.unit.store.small_arena import SLOT, acquire, chain, num_here, release, reserved, store

KEYS = chain(20)
quiet = Mock()


def test_every_block_is_checked_and_wrong_ones_are_named_and_never_served_again(arena):
    found = scan(arena, quiet)
    assert (found.blocks, found.num_bytes, found.skipped) == (0, 0, 0)
    made = store(arena, KEYS)
    store(arena, chain(5, seed="large"), block_bytes=2 * SLOT + 1)
    reserved(arena, chain(2, seed="being written"))
    found = scan(arena, quiet)
    assert (found.blocks, found.corrupt, found.skipped) == (25, (), 0)
    assert found.num_bytes == 20 * SLOT + 5 * (2 * SLOT + 1)
    spoilt = made.slots[[3, 11]]
    for slot in spoilt.tolist():
        slot_bytes(arena.tables, slot)[17] ^= 1
    found = scan(arena, quiet)
    assert set(found.corrupt) == {KEYS[row].hex()[:8] for row in (3, 11)}
    assert (found.blocks, arena.stats()["corrupt"], num_here(arena, KEYS)) == (25, 2, 3)
    assert (arena.tables.slot_state[spoilt] == QUARANTINED).all()
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
        writer = Arena.attach(directory, label="writer", lock_wait_s=5)
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
