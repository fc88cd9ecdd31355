"""Bytes between an engine's pool and slots: runs, checksums, what proves wrong."""

import os
import threading
import time
from collections.abc import Iterator
from itertools import accumulate, pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash
from numpy.lib.stride_tricks import as_strided

from kvray.errors import ConfigError, CorruptBlock, LayoutMismatch, LeaseExpired
from kvray.identity.block import BlockKey
from kvray.store import Arena, ArenaOwner, Lease, PartRequest
from kvray.store.arena import payload as copier_module
from kvray.store.arena.layout import QUARANTINED
from kvray.store.arena.payload import Copier, Copy, Strip, copy_run, slot_bytes
from kvray.store.arena.tables import Array
from tests.unit.store.child import in_fork
from tests.unit.store.small_arena import (
    SLOT,
    chain,
    fetch,
    leased,
    leased_for,
    num_here,
    pool_of,
    reserved,
    served,
    spec,
    store,
)
from tests.waiting import HANG_S

KEYS = chain(20)


def valid_run(arena: Arena, held: Lease, *, first: int = 0) -> int:
    """Return how many blocks from `first` on are valid."""
    valid = arena.valid(held, slice(first, None))
    return len(valid) if valid.all() else int(valid.argmin())


def test_blocks_may_lie_anywhere_in_the_pool(arena):
    where = np.array([7, 3, 4, 5, 29, 0])
    pool = np.zeros((30, SLOT), dtype=np.uint8)
    pool[where] = pool_of(KEYS[:6])
    made = reserved(arena, KEYS[:6])
    arena.commit(made, arena.write(made, pool, where))
    held = leased(arena, KEYS[:6])
    back = np.zeros_like(pool)
    arena.read(held, back, where[::-1][:4], first=2, verify=True)
    assert (back[where[::-1][:4]] == pool_of(KEYS[2:6])).all()
    untouched = np.setdiff1d(np.arange(30), where[::-1][:4])
    assert not back[untouched].any()


@pytest.mark.parametrize("num_regions", [1, 2])
@pytest.mark.parametrize("block_bytes", [SLOT, 3 * 2**18])
@pytest.mark.parametrize("arena", [spec(slots_per_slab=512)], indirect=True)
def test_what_others_write_before_a_sum_is_found(arena, monkeypatch, num_regions, block_bytes):
    made, copyto = reserved(arena, KEYS[:2], block_bytes=block_bytes), np.copyto

    def copy_and_spoil(target: Array, source: Array) -> None:
        copyto(target, source)
        target[..., 0] ^= 8

    monkeypatch.setattr(np, "copyto", copy_and_spoil)
    pool = noise(2, block_bytes)
    regions = [np.array(one) for one in np.split(pool, num_regions, axis=1)]
    sums = arena.write_slots(made.slots, regions, np.arange(2))
    monkeypatch.undo()
    assert sums.tolist() == expected(pool, seeds_of(KEYS[:2]))
    assert arena.commit(made, sums)
    assert valid_run(arena, leased(arena, KEYS[:2])) == 0


PIECE = 512 * 1024
"""What is copied and summed at a time."""


@pytest.mark.parametrize("block_bytes", [PIECE // 4, PIECE, PIECE + 1, 5 * PIECE + 4096])
@pytest.mark.parametrize("cores", [{0}, {0, 1}])
@pytest.mark.parametrize("arena", [spec(slots_per_slab=1024)], indirect=True)
def test_pieces_and_threads_change_no_bytes_and_no_sums(arena, monkeypatch, block_bytes, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    keys = KEYS[: 8 * 2**20 // block_bytes + 1] if block_bytes > PIECE else KEYS
    pool = noise(len(keys), block_bytes)
    made = reserved(arena, keys, block_bytes=block_bytes)
    sums = arena.write(made, pool, np.arange(len(keys)))
    assert sums.tolist() == expected(pool, seeds_of(keys))
    assert arena.commit(made, sums)
    held = leased(arena, keys)
    for verify in (True, False):
        back = np.zeros_like(pool)
        arena.read(held, back, np.arange(len(keys)), verify=verify)
        assert np.array_equal(back, pool)
    assert valid_run(arena, held) == len(keys)
    slot_bytes(arena.tables, int(made.slots[-1]))[block_bytes - 1] ^= 1
    with pytest.raises(CorruptBlock, match=keys[-1].hex()[:8]):
        arena.read(held, back, np.arange(len(keys)), verify=True)


@pytest.mark.parametrize("verify", [True, False])
def test_flipped_byte_is_found_and_the_block_never_served_again(arena, verify):
    bad = int(store(arena, KEYS).slots[11])
    held = leased(arena, KEYS)
    slot_bytes(arena.tables, bad)[77] ^= 1
    with pytest.raises(CorruptBlock, match=KEYS[11].hex()[:8]):
        fetch(arena, KEYS, held)
    assert arena.tables.slot_state[bad] == QUARANTINED
    assert (num_here(arena, KEYS), arena.stats()["corrupt"]) == (11, 1)
    # A lease from before does not serve it either, whether it looks at checksums or not.
    pool = np.zeros((len(KEYS), SLOT), dtype=np.uint8)
    with pytest.raises(CorruptBlock):
        arena.read(held, pool, np.arange(len(KEYS)), verify=verify)
    assert arena.stats()["corrupt"] == 1
    arena.release(held)
    ArenaOwner(arena).bury_dead(limbo_s=0)
    store(arena, KEYS)
    assert served(arena, KEYS) == 20


def test_first_bad_block_is_told_and_taken_out_of_service(arena):
    store(arena, KEYS)
    held = leased(arena, KEYS)
    assert valid_run(arena, held) == 20
    slot_bytes(arena.tables, 11)[77] ^= 1
    assert [valid_run(arena, held, first=first) for first in (15, 0, 0, 20)] == [5, 11, 11, 0]
    assert num_here(arena, KEYS) == 11


def test_leases_that_end_in_a_copy_void_it(arena, monkeypatch):
    store(arena, KEYS)
    held, copyto = leased(arena, KEYS), np.copyto
    monkeypatch.setattr(np, "copyto", lambda *both: (arena.release(held), copyto(*both)))
    with pytest.raises(LeaseExpired, match="void"):
        fetch(arena, KEYS, held)


def test_pools_of_another_size_and_other_numbers_of_blocks_are_refused(arena):
    made = reserved(arena, KEYS[:2])
    with pytest.raises(LayoutMismatch, match=f"{SLOT // 2} bytes, those in the arena {SLOT}"):
        arena.write(made, np.zeros((2, SLOT // 2), dtype=np.uint8), np.arange(2))
    assert arena.abort(made)
    store(arena, KEYS[:3])
    held, pool = leased(arena, KEYS[:3]), np.zeros((9, SLOT), dtype=np.uint8)
    for num_blocks, first in ((4, 0), (9, 0), (2, 2)):
        with pytest.raises(ConfigError, match=f"{num_blocks} blocks"):
            arena.read(held, pool, np.arange(num_blocks), first=first, verify=False)
    arena.read(held, pool, np.arange(0), verify=True)


def test_pages_of_several_regions_come_back_by_parts_of_other_sizes(arena):
    keys, pages = KEYS[:5], np.array([4, 2, 3, 9, 0])
    sizes = {0: (100, 700, 64), 1: (SLOT + 8,)}
    wide = noise(10, 2 * SLOT)
    pools = {part: [wide[:, 5 : 5 + size] for size in some] for part, some in sizes.items()}
    for part, regions in pools.items():
        block_bytes = sum(sizes[part])
        made = arena.reserve(keys, parent=None, depth=0, part=part, block_bytes=block_bytes)
        assert made
        assert arena.commit(made, arena.write_slots(made.slots, regions, pages))
    held = leased_for(arena, keys, [[PartRequest(0), PartRequest(1, window=2)]])
    assert held.num_blocks == 5
    slots = arena.leased_slots(held.leases[0])
    back = {part: [np.zeros_like(region) for region in pools[part]] for part in pools}
    for part, start, stop in ((0, 0, 5), (1, 5, 7)):
        starts = accumulate(sizes[part], initial=0)
        each = zip(back[part], starts, sizes[part], strict=False)
        strips = [Strip(region[:, None], at, size) for region, at, size in each]
        here = slots[start:stop]
        arena.read_slots(here, strips, pages[3 * part :], block_bytes=sum(sizes[part]))
    arena.check(held.leases[0], slots, verify=True)
    for region, copy in zip(pools[0], back[0], strict=True):
        assert np.array_equal(region[pages], copy[pages])
    assert np.array_equal(pools[1][0][pages[3:]], back[1][0][pages[3:]])
    assert not back[1][0][pages[:3]].any()
    arena.slot_bytes(int(slots[6]))[3] ^= 1
    with pytest.raises(CorruptBlock, match="quarantined"):
        arena.check(held.leases[0], slots, verify=True)
    assert not arena.valid(held.leases[0], slice(6, 7)).any()
    arena.release(*held.leases)


@pytest.mark.parametrize("pages", [np.arange(5), np.array([4, 2, 3, 9, 0])], ids=["run", "apart"])
def test_a_strip_has_runs_of_a_slot_from_all_over_a_page(arena, pages):
    keys, block_bytes = KEYS[:5], 1200
    blocks = noise(5, block_bytes)
    made = reserved(arena, keys, block_bytes=block_bytes)
    assert arena.commit(made, arena.write_slots(made.slots, [blocks], np.arange(5)))
    memory = np.zeros((10, 500), dtype=np.uint8)
    runs = as_strided(memory[:, 7:], (10, 4, 50), (500, 100, 1))
    strip = Strip(runs, start=30, step=300)
    arena.read_slots(made.slots.astype(np.int64), [strip], pages, block_bytes=block_bytes)
    expected = np.zeros_like(memory)
    for run, at in enumerate(range(30, 1200, 300)):
        expected[pages, 7 + 100 * run : 57 + 100 * run] = blocks[:, at : at + 50]
    assert (memory == expected).all()


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    """Copies that its second thread shares, however small they are."""
    monkeypatch.setattr(copier_module, "_SHARED_BYTES", 1)
    made = Copier()
    yield made
    made.close()


def noise(num_blocks: int, block_bytes: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)


def seeds_of(keys: list[BlockKey]) -> list[int]:
    return [int.from_bytes(key[:8], "little") for key in keys]


def expected(blocks: Array, seeds: list[int]) -> list[int]:
    each = zip(blocks, seeds, strict=True)
    return [xxhash.xxh3_64_intdigest(block.tobytes(), seed) for block, seed in each]


@pytest.mark.parametrize("shared_bytes", [0, 1, 2**40])
@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "cuts"),
    [
        (0, 4096, ()),
        (1, 1, ()),
        (7, 4097, (2,)),
        (3, 1_100_000, (1,)),
        *((300, 5000, cuts) for cuts in ((), (1,), (4, 5), (10, 200, 299))),
    ],
)
def test_copies_have_their_bytes_and_their_checksums(
    copier, monkeypatch, num_blocks, block_bytes, cuts, shared_bytes
):
    monkeypatch.setattr(copier_module, "_SHARED_BYTES", shared_bytes)
    source, seeds = noise(num_blocks, block_bytes), list(range(10, 10 + num_blocks))
    targets = [np.zeros_like(source) for _ in range(2)]
    plain, summed = (
        [Copy(at, target[at:end], source[at:end]) for at, end in pairwise((0, *cuts, num_blocks))]
        for target in targets
    )
    copier.copy(plain)
    copier.copy([])
    assert copier.copy_and_sum(summed[::-1], seeds).tolist() == expected(source, seeds)
    assert all((target == source).all() for target in targets)


def test_copies_are_made_without_the_second_thread(copier):
    source = noise(3, 4096)
    busy = threading.Event()
    waits = copier._second.submit(busy.wait, 30)
    target = np.zeros_like(source)
    copier.copy([Copy(0, target, source)])
    assert (target == source).all()
    busy.set()
    assert waits.result(30)
    copier.close()
    copier.close()
    for copy in (copier.copy, lambda copies: copier.copy_and_sum(copies, [1, 2, 3])):
        target[:] = 0
        copy([Copy(0, target, source)])
        assert (target == source).all()


def test_a_copy_for_which_no_thread_could_be_started_writes_nothing_later(copier, monkeypatch):
    source = noise(8, 4096)
    target = np.zeros_like(source)
    with monkeypatch.context() as patch:
        refusal = Mock(side_effect=RuntimeError("can't start new thread"))
        patch.setattr(threading.Thread, "start", refusal)
        copier.copy([Copy(0, target, source)])
    assert (target == source).all()
    target[:] = 0  # it is the caller's again
    copier.copy([Copy(0, np.zeros_like(source), source)])
    copier.close()
    assert not target.any()


class Signal(BaseException):
    """Raised in the caller's thread, as by Ctrl-C."""


@pytest.mark.parametrize("work", ["_copy_all", "_take_turns"])
def test_after_a_signal_nothing_is_written_any_more(copier, monkeypatch, work):
    real, is_at_it, threads = getattr(copier_module, work), threading.Event(), set()

    def interrupted(*args: object) -> None:
        threads.add(threading.get_ident())
        if threading.current_thread() is threading.main_thread():
            assert is_at_it.wait(HANG_S)
            raise Signal
        is_at_it.set()
        time.sleep(0.05)  # it is still at its work when the signal comes
        real(*args)

    monkeypatch.setattr(copier_module, work, interrupted)
    source = noise(8, 2**20)
    target = np.zeros_like(source)
    copies = [Copy(0, target, source)]
    with pytest.raises(Signal):
        copier.copy(copies) if work == "_copy_all" else copier.copy_and_sum(copies, list(range(8)))
    left = target.copy()
    copier.close()  # waits for the second thread
    assert len(threads) == 2
    assert (target == left).all()


def test_after_a_signal_the_second_thread_does_not_begin(copier, monkeypatch):
    busy, source = threading.Event(), noise(8, 2**20)
    copier._second.submit(busy.wait, HANG_S)

    def interrupted(*_: object) -> None:
        raise Signal

    with monkeypatch.context() as patch:
        patch.setattr(copier_module, "_copy_all", interrupted)
        target = np.zeros_like(source)
        with pytest.raises(Signal):
            copier.copy([Copy(0, target, source)])
    busy.set()
    copier.close()
    assert not target.any()


@pytest.mark.parametrize("whole_bytes", [0, 2**40])
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("stride", [300_000, 300_001])
def test_run_is_copied_alike_in_pieces_and_as_a_whole(monkeypatch, whole_bytes, skipped, stride):
    monkeypatch.setattr(copier_module, "_WHOLE_BYTES", whole_bytes)
    source = noise(5, stride)[:, :300_000]
    target = np.zeros(skipped + source.size, dtype=np.uint8)[skipped:].reshape(source.shape)
    copy_run(target, source)
    assert (target == source).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_for_no_thread_of_its_parent(copier):
    copies = [Copy(0, np.zeros((4, 4096), np.uint8), noise(4, 4096))]
    copier.copy_and_sum(copies, [1, 2, 3, 4])
    assert in_fork(
        lambda: (copier.copy_and_sum(copies, [1, 2, 3, 4]), copier.close()), within_s=HANG_S
    )
