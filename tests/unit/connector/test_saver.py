"""A block is committed with the bytes that its pass left, or not at all."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray import node
from kvray.actors.shard import Shard
from kvray.block import BlockKey
from kvray.config import load_config
from kvray.connector import saver as saver_module
from kvray.connector.plan import SavePlan, pack_ids
from kvray.connector.saver import Job, Saver
from kvray.keys import chain_keys
from kvray.node import NodeLink
from kvray.store import Arena, ArenaOwner
from tests.unit.actors.small_shard import wait_for

BLOCK_BYTES = 64


@pytest.fixture
def link(shard: Shard) -> Iterator[NodeLink]:
    config = load_config()
    made = node.attach(config.node_dir, label="test", lock_wait_s=0.2, attach_retry_s=0.02)
    yield made
    made.detach()


@pytest.fixture
def make_saver(link: NodeLink) -> Iterator[Callable[..., Saver]]:
    savers: list[Saver] = []

    def make(saves_max: int = 256) -> Saver:
        savers.append(Saver(link, part=0, saves_max=saves_max, totals=Counter()))
        return savers[-1]

    yield make
    for each in savers:
        each.close(10)


def keys_of(seed: int, count: int) -> list[BlockKey]:
    seed_bytes = bytes([seed % 256, seed // 256]) * 16
    return chain_keys(list(range(count)), tokens_per_block=1, seed=seed_bytes)


def job_of(rows: Any, keys: list[BlockKey], first: int = 0, **fields: Any) -> Job:
    plan = SavePlan(
        request_id=1,
        keys=tuple(keys),
        parent=None,
        depth=first,
        block_ids=pack_ids(range(len(keys))),
    )
    return Job(plan=plan, rows=rows, block_ids=np.arange(len(keys)), **fields)


def rows_of(count: int, value: int = 1) -> Any:
    return np.full((count, BLOCK_BYTES), value, dtype=np.uint8)


def stored(link: NodeLink, keys: list[BlockKey]) -> Any:
    """Return the bytes of the leading blocks that are there."""
    arena = link.arena
    assert arena is not None
    leases = arena.lease(keys)
    assert leases is not None
    if not leases:
        return np.empty((0, BLOCK_BYTES), dtype=np.uint8)
    rows = np.zeros((leases[0].num_slots, BLOCK_BYTES), dtype=np.uint8)
    arena.read(leases[0], rows, np.arange(len(rows)), verify=True)
    assert arena.release(*leases)
    return rows


def totals(saver: Saver) -> Counter[str]:
    return saver._totals


def test_what_was_submitted_before_close_is_stored(
    link: NodeLink, make_saver: Callable[..., Saver]
) -> None:
    saver, keys = make_saver(), keys_of(1, 5)
    saver.submit(job_of(rows_of(5), keys, is_lent=False))
    saver.close(10)
    assert len(stored(link, keys)) == 5
    saver.close(10)
    saver.submit(job_of(rows_of(5), keys_of(2, 5)))
    assert totals(saver) == {"stored_blocks": 5, "existing_blocks": 0, "dropped_blocks": 5}


def test_blocks_that_are_there_are_not_written_again(
    link: NodeLink, make_saver: Callable[..., Saver]
) -> None:
    saver, keys = make_saver(), keys_of(3, 6)
    saver.submit(job_of(rows_of(4), keys[:4]))
    saver.submit(job_of(rows_of(6, value=1), keys))
    saver.close(10)
    assert (totals(saver)["stored_blocks"], totals(saver)["existing_blocks"]) == (6, 4)


def test_a_long_job_is_saved_in_pieces(
    link: NodeLink, make_saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_PIECE_BYTES", 3 * BLOCK_BYTES)
    keys, rows = keys_of(4, 20), rows_of(20)
    rows += np.arange(20, dtype=np.uint8)[:, None]
    saver = make_saver()
    saver.submit(job_of(rows, keys))
    saver.fence()
    saver.close(10)
    assert (stored(link, keys) == rows).all()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    delays=st.lists(st.floats(0, 0.012), min_size=1, max_size=4),
    stall_s=st.floats(0.001, 0.02),
    blocks=st.integers(1, 7),
    number=st.integers(0, 60_000),
)
def test_a_block_overwritten_right_after_the_fence_is_never_committed_with_foreign_bytes(
    link: NodeLink, delays: list[float], stall_s: float, blocks: int, number: int
) -> None:
    slow = iter(delays * 50)
    write, arena = Arena.write, link.arena
    assert arena is not None

    def slow_write(self: Arena, reservation: Any, pool: Any, block_ids: Any) -> Any:
        time.sleep(next(slow))  # the copy reads what is there after this
        checksums = write(self, reservation, pool, block_ids)
        time.sleep(next(slow))
        return checksums

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "write", slow_write)
        patch.setattr(saver_module, "_STALL_S", stall_s)
        patch.setattr(saver_module, "_PIECE_BYTES", 2 * BLOCK_BYTES)
        saver = Saver(link, part=0, saves_max=9, totals=Counter())
        jobs = []
        for turn in range(3):
            pool, keys = rows_of(blocks, value=7 + turn), keys_of(number + turn, blocks)
            saver.submit(job_of(pool, keys))
            saver.fence()
            pool[:] = 0xEE  # the engine has it again
            jobs.append((keys, 7 + turn))
        saver.close(10)
    for keys, value in jobs:
        assert (stored(link, keys) == value).all()
    assert arena.stats()["leased_blocks"] == 0
    ArenaOwner(arena).clear()


def test_a_fence_does_not_wait_for_a_copy_that_stands_still(
    link: NodeLink, make_saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    write = Arena.write

    def stuck(*args: Any) -> Any:
        reached.set()
        go_on.wait(10)
        return write(*args)

    monkeypatch.setattr(Arena, "write", stuck)
    monkeypatch.setattr(saver_module, "_STALL_S", 0.02)
    saver, keys = make_saver(), keys_of(5, 3)
    saver.submit(job_of(rows_of(3), keys))
    saver.submit(job_of(rows_of(2), keys_of(6, 2)))
    reached.wait(10)
    started = time.monotonic()
    saver.fence()
    assert time.monotonic() - started < 5
    go_on.set()
    saver.close(10)
    assert len(stored(link, keys)) == 0
    assert totals(saver)["dropped_blocks"] == 5
    arena = link.arena
    assert arena is not None
    assert (arena.tables.slot_state == 0).all()


def test_too_many_waiting_saves_are_dropped(
    link: NodeLink,
    make_saver: Callable[..., Saver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = threading.Event()
    write = Arena.write
    monkeypatch.setattr(Arena, "write", lambda *args: (go_on.wait(10), write(*args))[1])
    saver = make_saver(saves_max=2)
    for number in range(6):
        saver.submit(job_of(rows_of(1), keys_of(10 + number, 1), is_lent=False))
    go_on.set()
    saver.close(10)
    assert totals(saver)["stored_blocks"] + totals(saver)["dropped_blocks"] == 6
    assert totals(saver)["dropped_blocks"] >= 3
    assert len([one for one in caplog.messages if "too many saves" in one]) == 1


def test_copies_that_wait_are_bounded_in_bytes_too(
    link: NodeLink, make_saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write = Arena.write
    monkeypatch.setattr(Arena, "write", lambda *args: (go_on.wait(10), write(*args))[1])
    monkeypatch.setattr(saver_module, "_COPIES_BYTES_MAX", 3 * BLOCK_BYTES)
    saver = make_saver()
    for number in range(8):
        saver.submit(job_of(rows_of(1), keys_of(20 + number, 1), is_lent=False))
    go_on.set()
    saver.close(10)
    assert totals(saver)["dropped_blocks"] >= 4


def test_a_locked_arena_costs_the_engine_one_wait_and_the_blocks(
    link: NodeLink, make_saver: Callable[..., Saver], caplog: pytest.LogCaptureFixture
) -> None:
    saver, arena = make_saver(), link.arena
    assert arena is not None
    assert arena._lock.acquire(1)
    for number in range(4):
        saver.submit(job_of(rows_of(2), keys_of(30 + number, 2)))
    started = time.monotonic()
    saver.fence()
    arena._lock.release()
    assert time.monotonic() - started < 1
    assert totals(saver)["dropped_blocks"] == 8
    assert [one for one in caplog.messages if "stayed locked" in one]


def test_a_save_whose_parent_is_not_there_is_dropped_and_said(
    link: NodeLink, make_saver: Callable[..., Saver], caplog: pytest.LogCaptureFixture
) -> None:
    saver, keys = make_saver(), keys_of(40, 4)
    plan = SavePlan(
        request_id=1, keys=tuple(keys[2:]), parent=keys[1], depth=2, block_ids=pack_ids([0, 1])
    )
    for _ in range(2):
        saver.submit(Job(plan=plan, rows=rows_of(2), block_ids=np.arange(2)))
    saver.fence()
    saver.close(10)
    assert totals(saver)["dropped_blocks"] == 4
    assert len([one for one in caplog.messages if "the block before them" in one]) == 1


def test_a_defect_does_not_end_the_thread_nor_hold_the_engine_up(
    link: NodeLink, make_saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver, keys, arena = make_saver(), keys_of(50, 2), link.arena
    assert arena is not None
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "write", lambda *args: 1 / 0)
        saver.submit(job_of(rows_of(2), keys))
        saver.fence()
        wait_for(lambda: totals(saver)["dropped_blocks"] == 2)
    assert (arena.tables.slot_state == 0).all()
    saver.submit(job_of(rows_of(2), keys))
    saver.close(10)
    assert len(stored(link, keys)) == 2


def test_without_a_tier_blocks_are_dropped_and_said_once(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    link = node.attach(tmp_path / "none", label="t", lock_wait_s=0.1, attach_retry_s=0.05)
    saver = Saver(link, part=0, saves_max=4, totals=Counter())
    for _ in range(2):
        saver.submit(job_of(rows_of(2), keys_of(60, 2)))
        saver.fence()
    saver.close(10)
    link.detach()
    assert totals(saver)["dropped_blocks"] == 4
    assert len([one for one in caplog.messages if "the tier is not there" in one]) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_saves_nor_hangs(
    link: NodeLink, make_saver: Callable[..., Saver]
) -> None:
    saver = make_saver()
    with saver._guard:  # as the thread may have it at the moment of the fork
        child = os.fork()
        if child == 0:
            saver.submit(job_of(rows_of(1), keys_of(70, 1)))
            saver.fence()
            saver.close(10)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
