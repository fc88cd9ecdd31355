"""The arena's lock: threads, processes, death, forks, and a bounded wait."""

import contextlib
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from kvray.errors import ShardUnavailable
from kvray.store import Arena
from kvray.store.machine import lock as lock_module
from kvray.store.machine.lock import ArenaLock
from kvray.store.machine.side_file import ARENA_BYTE, HOLDER_BYTES, Description, SideFile
from tests.unit.store.child import Child, in_fork
from tests.unit.store.small_arena import acquire, chain, num_here, release, store
from tests.waiting import HANG_S, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def takes(other: Child, byte: int) -> bool:
    """Let another process try to lock a byte of `side_file`."""
    return other.say(f"(kept := SideFile.at(directory / 'lock.test')).try_lock({byte})") == "True"


@contextlib.contextmanager
def held_by_thread(lock: ArenaLock) -> Iterator[None]:
    """Let another thread of this process have the lock."""
    has_it, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (acquire(lock, 1), has_it.set(), go_on.wait(60), release(lock)))
        assert has_it.wait(HANG_S)
        try:
            yield
        finally:
            go_on.set()


@pytest.fixture
def side_file(directory: Path) -> SideFile:
    return SideFile.at(directory / "lock.test")


@pytest.fixture
def lock(side_file: SideFile) -> ArenaLock:
    return ArenaLock(side_file)


def test_a_file_that_nobody_uses_any_more_is_closed_and_so_is_a_threads_that_has_ended(directory):
    def num_open() -> int:
        links = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        return links.count(str(directory / "lock.test"))

    lock = ArenaLock(SideFile.at(directory / "lock.test"))
    for _ in range(2):
        assert acquire(lock, 0)
        release(lock)
    thread = threading.Thread(target=lambda own: (acquire(own, 0), release(own)), args=[lock])
    thread.start()
    thread.join()
    assert num_open() == 2, "the file's own, and this thread's"
    del lock
    assert num_open() == 0


def test_processes_exclude_each_other_and_who_has_a_byte_is_named_while_it_lives(side_file, other):
    assert side_file.holder_of(HOLDER_BYTES) is None
    assert side_file.try_lock(HOLDER_BYTES)
    assert side_file.holder_of(HOLDER_BYTES) == os.getpid()
    assert not takes(other, HOLDER_BYTES)
    side_file.unlock(HOLDER_BYTES)
    assert takes(other, HOLDER_BYTES)
    assert not side_file.try_lock(HOLDER_BYTES)
    other.stop()
    assert side_file.holder_of(HOLDER_BYTES) == other.pid
    other.kill()
    assert side_file.holder_of(HOLDER_BYTES) is None
    assert side_file.try_lock(HOLDER_BYTES)


def test_threads_exclude_each_other(side_file, lock):
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(50):
            assert acquire(lock, 10)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            release(lock)

    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(work) for _ in range(4)]:
            one.result()
    assert (inside, most) == ([0], [1])
    assert not side_file.turn.locked()


def test_threads_wait_behind_others(lock, monkeypatch):
    looks, really = [0], Description.set

    def count(*args: Any) -> bool:
        looks[0] += 1
        return really(*args)

    with held_by_thread(lock):
        monkeypatch.setattr(Description, "set", count)
        assert not acquire(lock, 0.05)
        assert looks[0] < 60, "each look takes the interpreter from who is in the section"


def test_turn_that_an_exception_has_lost_is_recreated(side_file, lock):
    start = time.monotonic()
    side_file.turn.acquire()
    assert acquire(lock, 5)
    release(lock)
    assert time.monotonic() - start < 4
    assert not side_file.turn.locked()


@pytest.mark.parametrize("wait_s", [0.0, 0.002, 0.1])
def test_wait_is_bounded(side_file, lock, other, wait_s):
    assert takes(other, ARENA_BYTE)
    waits = []
    for _ in range(5):
        start = time.monotonic()
        assert not acquire(lock, wait_s)
        waits.append(time.monotonic() - start)
        assert not side_file.turn.locked(), "other threads need not wait"
        lock._vain_s = 0.0  # as if it had been had meanwhile
    # The best of five: a wait may be longer by the time that it waited for a core.
    assert wait_s * 0.5 <= min(waits) <= wait_s + 0.02


def test_who_has_waited_in_vain_waits_only_for_longer_until_the_lock_was_had(
    lock, other, monkeypatch
):
    slept = Mock(side_effect=time.sleep)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=slept)
    monkeypatch.setattr(lock_module, "time", clock)

    def is_waited_for(wait_s: float) -> bool:
        slept.reset_mock()
        assert not acquire(lock, wait_s)
        return slept.called

    assert takes(other, ARENA_BYTE)
    assert [is_waited_for(wait_s) for wait_s in (0.1, 0.1, 0.05, 0.2, 0.5)] == [1, 0, 0, 1, 1]
    other.say(f"kept.unlock({ARENA_BYTE})")
    assert acquire(lock, 0)
    release(lock)
    assert takes(other, ARENA_BYTE)
    assert is_waited_for(0.1)


def test_a_thread_that_can_open_no_file_is_refused_until_it_can(lock, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", Mock(side_effect=OSError(errno.EMFILE, "no descriptor is left")))
        assert not acquire(lock, 0)
    assert acquire(lock, 0)
    release(lock)


def test_forked_child_is_refused_at_once_and_breaks_no_lock(side_file, lock, other):
    assert side_file.try_lock(HOLDER_BYTES)
    assert acquire(lock, 0)
    release(lock)

    def takes_nothing() -> bool:
        taken = acquire(lock, 5) or side_file.try_lock(HOLDER_BYTES + 1)
        release(lock)
        side_file.unlock(HOLDER_BYTES)
        os.closerange(3, 256)
        return not taken

    with held_by_thread(lock):
        assert in_fork(takes_nothing)
        for byte in (ARENA_BYTE, HOLDER_BYTES):
            assert not takes(other, byte)
    assert acquire(lock, 0)
    release(lock)


def test_one_file_under_two_names_is_one_side_file(directory):
    (directory / "real").mkdir()
    (directory / "link").symlink_to("real")
    assert SideFile.at(directory / "real" / "lock.x") is SideFile.at(directory / "link" / "lock.x")


def test_an_unlinked_file_is_not_taken_for_its_successor(directory, other):
    path = directory / "lock.test"
    first = SideFile.at(path)
    assert first.try_lock(ARENA_BYTE)
    path.unlink()
    second = SideFile.at(path)
    assert second is not first
    assert second.try_lock(ARENA_BYTE)
    assert not takes(other, ARENA_BYTE)


def test_locks_stay_whatever_else_the_process_does_with_the_file(side_file, lock, directory, other):
    assert acquire(lock, 0)
    assert side_file.try_lock(HOLDER_BYTES)
    shutil.copy(side_file.path, directory / "copy")
    side_file.path.read_bytes()
    for byte in (ARENA_BYTE, HOLDER_BYTES):
        assert not takes(other, byte)
    release(lock)


PROGRAM = "__import__('subprocess').Popen(['sleep', '60'], close_fds=False).pid"


@pytest.mark.parametrize("start", ["os.fork() or time.sleep(60)", PROGRAM], ids=["fork", "program"])
@pytest.mark.parametrize("in_section", [False, True])
def test_a_dead_parents_locks_end_though_what_it_started_lives(arena, other, start, in_section):
    other.say("arena.join('parent')")
    if in_section:
        other.say("(held := arena.section(1)).__enter__()")
    pid = int(other.say(start))
    try:
        other.kill()
        # The fork may not have run yet.
        wait_for(lambda: not arena.side_file.is_locked(HOLDER_BYTES + 1))
        assert acquire(ArenaLock(arena.side_file), 0)
        release(ArenaLock(arena.side_file))
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_fork_inside_of_a_section_ends_nothing_of_its_parents(arena, other):
    with arena.section(1) as entered:
        assert entered
        arena.tables.put(np.arange(3), holder_live=1)
        pid = os.fork()
        if pid:
            status = os.waitpid(pid, 0)[1]
            assert arena.tables.undo.begin(), "the fork has settled its parent's step"
            assert other.say("small.acquire(arena._lock, 0)") == "False"
        else:  # with the descriptors that were its parent's
            own = [SideFile.at(arena.directory / f"lock.{number}") for number in range(4)]
            taken = [one.try_lock(ARENA_BYTE) for one in own]
    if not pid:
        stolen = [Description(one.path).set(ARENA_BYTE, 1) for one in own]
        os._exit(0 if all(taken) and not any(stolen) else 1)
    assert os.waitstatus_to_exitcode(status) == 0
    assert other.say("arena.note_use([], 0)") == "True"


def test_fork_opens_what_it_needs_again(arena):
    store(arena, chain(3))

    def opens_it() -> tuple[int, int]:
        own = Arena(arena.directory, lock_wait_s=1)
        return num_here(own, chain(3)), own.join("fork")

    def opens_it_in_a_thread() -> bool:
        answers: list[tuple[int, int]] = []
        thread = threading.Thread(target=lambda: answers.append(opens_it()), daemon=True)
        thread.start()
        thread.join(HANG_S)
        return answers == [(3, 1)]

    with SideFile._registry_lock:  # as another thread might have it
        assert in_fork(opens_it_in_a_thread, within_s=HANG_S)
    assert not arena.side_file.is_locked(HOLDER_BYTES + 1)


def test_a_section_that_another_of_the_thread_has_come_before_is_refused(arena):
    late = arena.section(1)
    with arena.section(1), arena.section(1) as entered:  # or a signal's, before `with` enters late
        assert not entered
    with late as entered:
        assert not entered
    with arena.section(0) as entered:
        assert entered


def test_closed_arena_has_no_section_and_keeps_no_lock(arena, other):
    tables = arena.tables

    def read_closed() -> None:
        del arena.tables
        arena.stats()

    with pytest.raises(ShardUnavailable, match="closed"), arena.section(1):
        read_closed()
    arena.tables = tables
    assert other.say("arena.note_use([], 0)") == "True"
    arena.close()
    arena.close()
    with pytest.raises(ShardUnavailable, match="closed"), arena.section(1):
        pass
    assert other.say("arena.note_use([], 0)") == "True"


def test_letting_others_first_is_bounded(directory, monkeypatch):
    waiting, naps, now = memoryview(bytearray(8)).cast("Q"), [0], [100.0]
    lock = ArenaLock(SideFile.at(directory / "lock.test"), waiting)

    def ask_again(seconds: float) -> None:
        now[0] += seconds
        waiting[0] = int((now[0] + 0.001) * 1e9)
        naps[0] += 1

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=ask_again)
    monkeypatch.setattr("kvray.store.machine.lock.time", clock)
    for since_s, wait_s, mark_s, is_letting in (
        (0.0, 1.0, 0.001, True),
        (0.0, 0.0, 0.001, False),
        (9.0, 1.0, 0.001, False),
        (0.0, 1.0, -1.0, False),
        (0.0, 1.0, 3600.0, False),
    ):
        naps[0], start = 0, now[0]
        waiting[0], lock._released = int((start + mark_s) * 1e9), start - since_s
        assert acquire(lock, wait_s)
        assert now[0] - start < 0.5
        assert bool(naps[0]) == is_letting
        release(lock)


@pytest.mark.parametrize("other_mark", [None, 7])
def test_who_waits_says_so_and_takes_only_his_own_mark_back(directory, monkeypatch, other_mark):
    waiting, marks = memoryview(bytearray(8)).cast("Q"), []
    side_file = SideFile.at(directory / "lock.test")
    lock, elsewhere = ArenaLock(side_file, waiting), Description(side_file.path)
    assert elsewhere.set(ARENA_BYTE, 1)

    def nap(_: float) -> None:
        marks.append((waiting[0] / 1e9, time.monotonic()))
        elsewhere.unlock(0)
        waiting[0] = other_mark or waiting[0]

    monkeypatch.setattr("kvray.store.machine.lock.time.sleep", nap)
    began = time.monotonic()
    assert acquire(lock, 1)
    release(lock)
    ((mark, seen_at), *_) = marks
    assert began < mark < seen_at + 0.002
    assert waiting[0] == (other_mark or 0)
