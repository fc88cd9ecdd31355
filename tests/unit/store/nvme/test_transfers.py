"""Few large transfers, threads that take turns, and what may be written in a day."""

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.store.nvme.disk import BUFFERS_MAX
from kvray.store.nvme.terms import LEDGER_FILE, WriteBudget
from kvray.store.nvme.transfers import IoThreads, cut

MEMORY = np.arange(4096 * 4096, dtype="u4").view("u1")


def plan(starts: list[int], offsets: list[int], *, chunk_bytes: int = 10**9):  # type: ignore[no-untyped-def]
    places = (np.array(one, dtype=np.int64) for one in (starts, offsets))
    return cut(MEMORY, *places, io_bytes=4096, chunk_bytes=chunk_bytes)


def test_no_transfer_exceeds_its_size_or_the_pieces_of_one_call():
    count = 3 * BUFFERS_MAX
    scattered = [2 * 4096 * at for at in range(2000)]
    some = plan(scattered[:count], [4096 * at for at in range(2000)])
    assert [len(one.buffers) for one in some] == [1024, 976]
    small = plan([0, 4096, 8192], [0, 4096, 8192], chunk_bytes=8192)
    assert [len(one.rows) for one in small] == [2, 1]
    assert [len(one.rows) for one in plan([0, 4096], [0, 4096], chunk_bytes=1)] == [1, 1]


@given(memory=st.permutations(range(12)), file=st.permutations(range(14)), count=st.integers(0, 12))
def test_every_byte_goes_where_it_belongs_in_as_few_pieces_as_can_be(memory, file, count):
    starts, offsets = ([4096 * at for at in some[:count]] for some in (memory, file))
    written, made = np.zeros(4096 * 14, dtype="u1"), plan(starts, offsets, chunk_bytes=5 * 4096)
    for one in made:
        joined = np.concatenate(one.buffers)
        written[one.offset : one.offset + len(joined)] = joined
        assert [offsets[row] for row in one.rows] == [
            one.offset + 4096 * at for at in range(len(one.rows))
        ]
        places = [starts[row] for row in one.rows]
        gaps = sum(b - a != 4096 for a, b in pairwise(places))
        assert len(one.buffers) == 1 + gaps
    for start, offset in zip(starts, offsets, strict=True):
        assert (written[offset : offset + 4096] == MEMORY[start : start + 4096]).all()
    for one, other in pairwise(made):
        is_full = len(one.rows) == 5
        assert is_full or other.offset > one.offset + 4096 * len(one.rows)


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
    for tasks in ([], [slow]):
        threads.run(tasks)
    threads.close()
    threads.close()


DAY_S = 86400.0
PER_DAY = 24_000.0


def test_an_hour_is_saved_up_the_rest_comes_evenly_and_what_was_too_much_is_made_up_for():
    unbounded = WriteBudget(None, now=0.0)
    unbounded.spend(10**15, 1.0)
    assert unbounded.available(2.0) is None
    for spent, expected in (
        (1000, {0: 0, DAY_S / 48: 479, 10 * DAY_S: 1000}),
        (1958 + 10, {DAY_S / 24: 0, DAY_S / 12: 948}),
    ):
        budget = WriteBudget(PER_DAY, now=0.0)
        assert budget.available(0.0) == 1000
        budget.spend(spent, 0.0)
        assert {at: budget.available(at) for at in expected} == expected


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


def test_a_restart_goes_on_with_what_was_left_and_no_ledger_stops_it(tmp_path):
    def restarted(now: float) -> WriteBudget:
        budget = WriteBudget(PER_DAY, now=now)
        budget.load(tmp_path)
        return budget

    before = WriteBudget(PER_DAY, now=0.0)
    before.spend(900, 100.0)
    before.save(tmp_path)
    assert restarted(101.0).available(101.0) in range(100, 102)
    future = WriteBudget(PER_DAY, now=10 * DAY_S)
    future.spend(1000, 10 * DAY_S)
    future.save(tmp_path)
    assert restarted(0.0).available(DAY_S) == 1000
    for text in ("", "[]", '{"saved": "x", "at": 1}', '{"saved": 1}', '{"saved": NaN, "at": 0}'):
        (tmp_path / LEDGER_FILE).write_text(text)
        assert restarted(0.0).available(0.0) is not None
