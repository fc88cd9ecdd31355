"""Few large transfers, threads that take turns, and what may be written in a day."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.store.nvme.disk import BUFFERS_MAX
from kvray.store.nvme.terms import LEDGER_FILE, WriteBudget
from kvray.store.nvme.transfers import IoThreads, cut

MEMORY = np.arange(4096 * 4096, dtype="u4").view("u1")


def plan(starts: list[int], offsets: list[int], *, chunk_bytes: int = 10**9):  # type: ignore[no-untyped-def]
    return cut(
        MEMORY,
        np.array(starts, dtype=np.int64),
        np.array(offsets, dtype=np.int64),
        io_bytes=4096,
        chunk_bytes=chunk_bytes,
    )


def test_neighbours_in_file_and_memory_are_one_transfer_of_one_piece():
    assert plan([], []) == []
    (one,) = plan([0, 4096, 8192], [40960, 45056, 49152])
    assert (one.offset, len(one.buffers), one.rows.tolist()) == (40960, 1, [0, 1, 2])


def test_blocks_are_taken_in_the_order_of_the_file():
    (one,) = plan([0, 4096, 8192], [49152, 40960, 45056])
    assert one.rows.tolist() == [1, 2, 0]
    assert [piece.nbytes for piece in one.buffers] == [8192, 4096]


def test_gap_in_the_file_ends_a_transfer():
    assert [one.offset for one in plan([0, 4096], [0, 8192])] == [0, 8192]


def test_no_transfer_exceeds_its_size_or_the_pieces_of_one_call():
    count = 3 * BUFFERS_MAX
    scattered = [2 * 4096 * at for at in range(2000)]
    some = plan(scattered[:count], [4096 * at for at in range(2000)])
    assert [len(one.buffers) for one in some] == [1024, 976]
    small = plan([0, 4096, 8192], [0, 4096, 8192], chunk_bytes=8192)
    assert [len(one.rows) for one in small] == [2, 1]
    assert [len(one.rows) for one in plan([0, 4096], [0, 4096], chunk_bytes=1)] == [1, 1]


def test_every_byte_goes_where_it_belongs():
    chance = np.random.default_rng(3)
    starts, offsets = (4096 * chance.permutation(500)[:200] for _ in range(2))
    file = np.zeros(4096 * 500, dtype="u1")
    for one in plan(starts.tolist(), offsets.tolist(), chunk_bytes=7 * 4096):
        joined = np.concatenate(one.buffers)
        file[one.offset : one.offset + len(joined)] = joined
    for start, offset in zip(starts, offsets, strict=True):
        assert (file[offset : offset + 4096] == MEMORY[start : start + 4096]).all()


def test_as_many_tasks_are_under_way_as_there_are_threads():
    threads, lock, under_way, most = IoThreads(3), threading.Lock(), 0, 0

    def task() -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.005)
        with lock:
            under_way -= 1

    threads.run([task] * 20)
    assert (most, under_way) == (3, 0)
    threads.close()


def test_failure_ends_the_turns_and_is_raised_when_all_have_ended():
    threads, done = IoThreads(2), []

    def fail() -> None:
        raise ValueError("this one")

    def slow() -> None:
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(ValueError, match="this one"):
        threads.run([slow, fail, *[slow] * 50])
    assert len(done) < 5
    threads.run([slow])
    threads.close()
    threads.close()


def test_one_thread_and_no_task_are_fine():
    threads, done = IoThreads(1), []
    threads.run([])
    threads.run([lambda: done.append(1)] * 3)
    assert done == [1, 1, 1]
    threads.close()


DAY_S = 86400.0
PER_DAY = 24_000.0


def test_an_hour_is_saved_up_and_the_rest_comes_evenly():
    unbounded = WriteBudget(None, now=0.0)
    unbounded.spend(10**15, 1.0)
    assert unbounded.available(2.0) is None
    budget = WriteBudget(PER_DAY, now=0.0)
    assert budget.available(0.0) == 1000
    budget.spend(1000, 0.0)
    assert budget.available(0.0) == 0
    assert budget.available(DAY_S / 48) == 479
    assert budget.available(10 * DAY_S) == 1000


def test_what_was_too_much_is_made_up_for():
    budget = WriteBudget(PER_DAY, now=0.0)
    budget.spend(1958 + 10, 0.0)
    assert budget.available(DAY_S / 24) == 0
    assert budget.available(DAY_S / 12) == 948


@given(st.lists(st.tuples(st.floats(0, 3 * DAY_S), st.floats(0, 1)), min_size=1, max_size=60))
def test_in_any_day_no_more_than_a_days_bytes_are_spent(steps):
    budget, spent = WriteBudget(PER_DAY, now=0.0), []
    for at, share in sorted(steps):
        room = budget.available(at)
        assert room is not None
        budget.spend(int(room * share), at)
        spent.append((at, int(room * share)))
    for begin, _ in spent:
        assert sum(num for at, num in spent if begin <= at < begin + DAY_S) <= PER_DAY


def test_a_restart_goes_on_with_what_was_left(tmp_path):
    before = WriteBudget(PER_DAY, now=0.0)
    before.spend(900, 100.0)
    before.save(tmp_path)
    after = WriteBudget(PER_DAY, now=101.0)
    after.load(tmp_path)
    assert after.available(101.0) in range(100, 102)


def test_a_ledger_from_the_future_or_a_broken_one_stops_nothing(tmp_path):
    before = WriteBudget(PER_DAY, now=10 * DAY_S)
    before.spend(1000, 10 * DAY_S)
    before.save(tmp_path)
    after = WriteBudget(PER_DAY, now=0.0)
    after.load(tmp_path)
    assert after.available(DAY_S) == 1000
    for text in ("", "[]", '{"saved": "x", "at": 1}', '{"saved": 1}', '{"saved": NaN, "at": 0}'):
        (tmp_path / LEDGER_FILE).write_text(text)
        broken = WriteBudget(PER_DAY, now=0.0)
        broken.load(tmp_path)
        assert broken.available(0.0) is not None
