"""A block is committed with the bytes that its pass left, or not at all; a pass may have many."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray import node
from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.engine import saver as saver_module
from kvray.engine.cache_layout import LayerRange, Region
from kvray.engine.device.pool import HostPool, Ticket
from kvray.engine.saver import Job, Saver
from kvray.engine.shared_state import Boundary, EngineFigures, PendingReads
from kvray.errors import TierError
from kvray.identity.block import BlockKey
from kvray.node import NodeLink
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.layout import READY
from tests.examples import examples
from tests.kit.connector import HIT, PROMPT, Request
from tests.kit.devices import part_of
from tests.unit.store.small_arena import acquire, chain, release
from tests.waiting import HANG_S, Gate, wait_for

BLOCK_BYTES = 64


@pytest.fixture
def link(shard: Shard) -> Iterator[NodeLink]:
    config = load_config()
    made = node.attach(config.node_dir, label="test", lock_wait_s=0.2, attach_retry_s=0.02)
    yield made
    made.detach()


@pytest.fixture
def saver(link: NodeLink, request: pytest.FixtureRequest) -> Iterator[Saver]:
    made = new_saver(link, getattr(request, "param", 256))
    yield made
    made.close(10)


@pytest.fixture
def arena(link: NodeLink) -> Arena:
    assert link.arena is not None
    return link.arena


def keys_of(seed: int, count: int) -> list[BlockKey]:
    return chain(count, seed=str(seed))


def new_saver(link: NodeLink, saves_max: int = 256) -> Saver:
    figures = EngineFigures()
    shared: Any = SimpleNamespace(
        link=link,
        config=SimpleNamespace(connector=SimpleNamespace(saves_max=saves_max)),
        figures=figures,
        boundary=Boundary(figures.totals),
        pending_reads=PendingReads(),
    )
    return Saver(shared)


def job_of(rows: Any, keys: list[BlockKey], **fields: Any) -> Job:
    """Return the job of saving all of `rows`, which stays the engine's memory."""
    region = Region(pages=torch.from_numpy(rows), steps=(LayerRange((0,), 0, BLOCK_BYTES),))
    part = part_of(region)
    plain = {"parent": None, "depth": 0, "pool": HostPool([part]), "request_id": 1}
    return Job(part=part, keys=keys, pages=np.arange(len(keys)), **plain | fields)


def rows_of(count: int, value: int = 1) -> Any:
    return np.full((count, BLOCK_BYTES), value, dtype=np.uint8)


def stored(link: NodeLink, keys: list[BlockKey]) -> Any:
    """Return the bytes of the leading blocks that are there."""
    arena: Any = link.arena
    leases = arena.lease(keys)
    rows = np.zeros((leases[0].num_slots if leases else 0, BLOCK_BYTES), dtype=np.uint8)
    for one in leases:
        arena.read(one, rows, np.arange(len(rows)), verify=True)
        assert arena.release(one)
    return rows


def dropped(totals: dict[str, int], reason: str) -> int:
    """Return how many blocks were dropped, all of them for that reason."""
    assert totals["dropped_blocks"] == totals[f"dropped_blocks_{reason}"]
    return totals["dropped_blocks"]


def test_what_was_submitted_before_close_is_stored_once(link, saver):
    keys = keys_of(1, 6)
    saver.submit(job_of(rows_of(4), keys[:4]))
    saver.submit(job_of(rows_of(6), keys))
    saver.close(10)
    assert len(stored(link, keys)) == 6
    saver.close(10)
    saver.submit(job_of(rows_of(5), keys_of(2, 5)))
    assert dropped(saver._totals, "shut_down") == 5
    assert (saver._totals["stored_blocks"], saver._totals["existing_blocks"]) == (6, 4)


def test_a_long_job_is_saved_in_pieces_that_hang_together(link, arena, saver, monkeypatch):
    monkeypatch.setattr(saver_module, "_PIECE_BYTES", 3 * BLOCK_BYTES)
    keys, rows = keys_of(4, 20), rows_of(20)
    rows += np.arange(20, dtype=np.uint8)[:, None]
    saver.submit(job_of(rows, keys))
    saver.fence()
    saver.close(10)
    assert (stored(link, keys) == rows).all()
    tables = arena.tables
    assert np.count_nonzero(tables.slot_parent[tables.slot_state == READY] < 0) == 1


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    delays=st.lists(st.floats(0, 0.012), min_size=1, max_size=4),
    stall_s=st.floats(0.001, 0.02),
    blocks=st.integers(1, 7),
    number=st.integers(0, 60_000),
)
def test_a_block_overwritten_after_the_fence_is_never_committed_with_foreign_bytes(
    link, arena, delays, stall_s, blocks, number
):
    slow = iter(delays * 50)
    write = Arena.write_slots

    def slow_write(*args: Any) -> Any:
        time.sleep(next(slow))  # the copy reads what is there after this
        checksums = write(*args)
        time.sleep(next(slow))
        return checksums

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "write_slots", slow_write)
        patch.setattr(saver_module, "_STALL_S", stall_s)
        patch.setattr(saver_module, "_PIECE_BYTES", 2 * BLOCK_BYTES)
        saver = new_saver(link)
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


def test_a_fence_does_not_wait_for_a_copy_that_stands_still(link, arena, saver, monkeypatch):
    gate = Gate(monkeypatch, Arena, "write_slots")
    monkeypatch.setattr(saver_module, "_STALL_S", 0.02)
    keys = keys_of(5, 3)
    saver.submit(job_of(rows_of(3), keys))
    saver.submit(job_of(rows_of(2), keys_of(6, 2)))
    gate.reached.wait(HANG_S)
    started = time.monotonic()
    saver.fence()
    assert time.monotonic() - started < 5
    gate.open.set()
    saver.close(10)
    assert len(stored(link, keys)) == 0
    assert dropped(saver._totals, "too_slow") == 5
    assert (arena.tables.slot_state == 0).all()


@pytest.mark.parametrize("saver", [2], indirect=True)
def test_too_many_waiting_saves_are_dropped(saver, monkeypatch, caplog):
    gate = Gate(monkeypatch, Arena, "write_slots")
    for number in range(6):
        saver.submit(job_of(rows_of(1), keys_of(10 + number, 1)))
    gate.open.set()
    saver.close(10)
    assert saver._totals["stored_blocks"] + saver._totals["dropped_blocks"] == 6
    assert dropped(saver._totals, "too_many") >= 3
    assert len([one for one in caplog.messages if "too many saves" in one]) == 1


def test_a_locked_arena_costs_the_engine_one_wait_and_the_blocks(arena, saver, caplog, monkeypatch):
    monkeypatch.setattr(saver_module, "_LOCK_WAIT_S", 1.0)
    assert acquire(arena._lock, 1)
    for number in range(4):
        saver.submit(job_of(rows_of(2), keys_of(30 + number, 2)))
    started = time.monotonic()
    saver.fence()
    release(arena._lock)
    assert time.monotonic() - started < 3.5, "each of the four waits"
    assert dropped(saver._totals, "arena_busy") == 8
    assert [one for one in caplog.messages if "stayed locked" in one]


def test_a_save_whose_parent_is_not_there_is_dropped_and_said(saver, caplog):
    keys = keys_of(40, 4)
    for _ in range(2):
        saver.submit(job_of(rows_of(2), keys[2:], parent=keys[1], depth=2))
    saver.fence()
    saver.close(10)
    assert dropped(saver._totals, "no_room") == 4
    assert len([one for one in caplog.messages if "parent block is missing" in one]) == 1


def test_a_defect_does_not_end_the_thread_nor_hold_the_engine_up(link, arena, saver, monkeypatch):
    keys = keys_of(50, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "write_slots", lambda *args: 1 / 0)
        saver.submit(job_of(rows_of(2), keys))
        saver.fence()
        wait_for(lambda: saver._totals["dropped_blocks_error"] == 2)
    assert (arena.tables.slot_state == 0).all()
    saver.submit(job_of(rows_of(2), keys))
    saver.close(10)
    assert len(stored(link, keys)) == 2


def test_without_a_tier_blocks_are_dropped_and_said_once(environment, caplog, tmp_path):
    link = node.attach(tmp_path / "none", label="t", lock_wait_s=0.1, attach_retry_s=0.05)
    saver = new_saver(link)
    for _ in range(2):
        saver.submit(job_of(rows_of(2), keys_of(60, 2)))
        saver.fence()
    saver.close(10)
    link.detach()
    assert dropped(saver._totals, "store_down") == 4
    assert len([one for one in caplog.messages if "the tier is not there" in one]) == 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_saves_nor_hangs(saver):
    with saver._guard:  # as the thread may have it at the moment of the fork
        child = os.fork()
        if child == 0:
            saver.submit(job_of(rows_of(1), keys_of(70, 1)))
            saver.fence()
            saver.close(10)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


class LaterPool(HostPool):
    """A pool as on a device: copies are enqueued, and end when the test says so."""

    is_host = False

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self.may_end = threading.Event()

    def save(self, *args: Any) -> Any:
        return LaterCopy(self.may_end, lambda: super(LaterPool, self).save(*args))


class LaterCopy(Ticket):
    def __init__(self, may_end: threading.Event, copy: Callable[[], Any]) -> None:
        super().__init__()
        self._may_end, self._copy, self._is_done = may_end, copy, False

    def done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        assert self._may_end.wait(HANG_S)
        self._copy()
        self._is_done = True


def later_job(rows: Any, keys: list[BlockKey], **fields: Any) -> tuple[Job, LaterPool]:
    job = job_of(rows, keys, **fields)
    pool = LaterPool([job.part])
    return dataclasses.replace(job, pool=pool), pool


def test_copies_on_a_device_are_committed_when_they_have_ended(link, saver, monkeypatch):
    monkeypatch.setattr(saver_module, "_PIECE_BYTES", 2 * BLOCK_BYTES)
    keys = keys_of(80, 5)
    job, pool = later_job(rows_of(5, value=3), keys, request_id=9)
    saver.submit(job)
    saver.fence()  # begun is enough
    assert 9 in saver._reads
    assert len(stored(link, keys)) == 0
    pool.may_end.set()
    wait_for(lambda: 9 not in saver._reads)
    assert (stored(link, keys) == 3).all()
    assert len(stored(link, keys)) == 5


def test_slots_of_an_abandoned_copy_come_back_when_it_has_ended(arena, saver, monkeypatch):
    job, pool = later_job(rows_of(2), keys_of(81, 2))
    gate = Gate(monkeypatch, pool, "save")
    monkeypatch.setattr(saver_module, "_STALL_S", 0.02)
    saver.submit(job)
    gate.reached.wait(HANG_S)
    saver.fence()
    gate.open.set()
    wait_for(lambda: saver._totals["dropped_blocks"] == 2)
    assert np.count_nonzero(arena.tables.slot_state) == 2, "a late copy still writes them"
    pool.may_end.set()
    saver.close(10)
    assert (arena.tables.slot_state == 0).all()


def test_blocks_whose_copy_fails_on_the_device_are_counted(saver, monkeypatch):
    monkeypatch.setattr(LaterCopy, "wait", Mock(side_effect=TierError("The device has failed.")))
    job, _ = later_job(rows_of(3), keys_of(90, 3))
    saver.submit(job)
    saver.close(10)
    assert dropped(saver._totals, "error") == 3


@pytest.mark.parametrize("is_host", [True, False])
def test_a_commit_into_a_locked_arena_is_done_later(link, saver, child_in, monkeypatch, is_host):
    monkeypatch.setattr(saver_module, "_LOCK_WAIT_S", 0.02)
    other, keys = child_in(link.directory), keys_of(91, 3)
    gate = Gate(monkeypatch, Arena, "write_slots")
    job, pool = later_job(rows_of(3), keys)
    pool.may_end.set()
    saver.submit(job_of(rows_of(3), keys) if is_host else job)
    assert gate.reached.wait(HANG_S)
    assert other.say("small.acquire(arena._lock, 60)") == "True"
    gate.open.set()
    wait_for(lambda: 1 not in saver._reads, "the end of reading")
    saver.submit(job_of(rows_of(2), keys_of(93, 2)))
    wait_for(lambda: saver._totals["dropped_blocks_arena_busy"] == 2)
    other.say("small.release(arena._lock)")
    wait_for(lambda: len(stored(link, keys)) == 3)
    assert saver._totals["stored_blocks"] == 3


def test_slots_that_are_given_back_to_a_locked_arena_come_back_later(saver, monkeypatch):
    abort = Mock(side_effect=[False, True])
    monkeypatch.setattr(Arena, "abort", abort)
    monkeypatch.setattr(Arena, "write_slots", lambda *_: 1 / 0)
    saver.submit(job_of(rows_of(2), keys_of(94, 2)))
    wait_for(lambda: abort.call_count == 2)
    saver.close(10)
    assert dropped(saver._totals, "error") == 2


@pytest.mark.parametrize("place", ["waits for the lock", "is about to commit"])
def test_a_saver_that_outlives_its_link_keeps_no_lock(link, arena, child_in, monkeypatch, place):
    saver, other = new_saver(link), child_in(link.directory)
    gate = Gate(monkeypatch, Arena, "commit")
    monkeypatch.setattr(saver_module, "_LOCK_WAIT_S", 60.0)
    job = job_of(rows_of(2), keys_of(92, 2))
    if place == "is about to commit":
        saver.submit(job)
        assert gate.reached.wait(HANG_S)
    assert other.say("small.acquire(arena._lock, 60)") == "True"
    if place == "waits for the lock":
        saver.submit(job)
        wait_for(lambda: arena.tables.waiting[0])
    saver.close(0.01)
    link.detach()
    assert saver._thread.is_alive()
    other.say("small.release(arena._lock)")
    gate.open.set()
    saver._thread.join(HANG_S)
    assert saver._totals["dropped_blocks_error"] == 2
    assert other.say("arena.join('other'), arena.lease(small.chain(1))").endswith(", [])")
    assert other.say("small.acquire(arena._lock, 0)") == "True"


def test_what_was_computed_while_the_tier_was_away_is_counted_at_the_end(pair, monkeypatch):
    request = Request(1, PROMPT[:HIT])
    pair.query(request)
    with monkeypatch.context() as patch:
        patch.setattr(type(pair.engine.link), "arena", None)
        pair.plan(request)
        pair.worker.start_load_kv(None)
        pair.compute(request)
        assert pair.totals["dropped_blocks"] == 0, "a later pass may save them"
        pair.finish(request)
    assert dropped(pair.totals, "store_down") == 9


def test_what_the_engine_names_no_page_for_is_counted(pair):
    request = Request(1, PROMPT[:HIT])
    pair.query(request)
    request.block_ids[4] = -1
    pair.plan(request)
    pair.worker.start_load_kv(None)
    pair.end_pass()
    pair.finish(request)
    pair.flush()
    assert pair.totals["stored_blocks"] == 4
    assert dropped(pair.totals, "no_page") == 5


def test_saves_that_a_defect_prevents_are_counted(pair, monkeypatch):
    monkeypatch.setattr("kvray.engine.rank.split_keys", lambda *_: 1 / 0)
    pair.serve(Request(1, PROMPT[:HIT]))
    assert dropped(pair.totals, "error") == 9
