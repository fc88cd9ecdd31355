"""The arena's lock: threads, processes, death, forks, and a bounded wait."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvray.store.lock import ARENA_BYTE, HOLDER_BYTES, ArenaLock, SideFile
from tests.unit.store.conftest import Child

TAKE = "SideFile.at(directory / 'lock.test').try_lock({byte})"
GIVE = "SideFile.at(directory / 'lock.test').unlock({byte})"


@pytest.fixture
def side_file(directory: Path) -> SideFile:
    return SideFile.at(directory / "lock.test")


def test_processes_exclude_each_other(side_file: SideFile, child: Callable[[], Child]) -> None:
    other = child()
    assert side_file.try_lock(ARENA_BYTE)
    assert other.say(TAKE.format(byte=ARENA_BYTE)) == "False"
    side_file.unlock(ARENA_BYTE)
    assert other.say(TAKE.format(byte=ARENA_BYTE)) == "True"
    assert not side_file.try_lock(ARENA_BYTE)
    other.say(GIVE.format(byte=ARENA_BYTE))
    assert side_file.try_lock(ARENA_BYTE)


def test_bytes_are_locked_one_by_one(side_file: SideFile, child: Callable[[], Child]) -> None:
    assert side_file.try_lock(HOLDER_BYTES)
    assert child().say(TAKE.format(byte=HOLDER_BYTES + 1)) == "True"


def test_holder_of_a_byte_is_named_while_it_lives(
    side_file: SideFile, child: Callable[[], Child]
) -> None:
    other = child()
    assert side_file.holder_of(HOLDER_BYTES) is None
    other.say(TAKE.format(byte=HOLDER_BYTES))
    assert side_file.holder_of(HOLDER_BYTES) == other.process.pid
    other.process.send_signal(signal.SIGSTOP)
    assert side_file.holder_of(HOLDER_BYTES) == other.process.pid
    other.kill()
    assert side_file.holder_of(HOLDER_BYTES) is None
    assert side_file.try_lock(HOLDER_BYTES)
    assert side_file.holder_of(HOLDER_BYTES) == os.getpid()


def test_lock_of_a_dead_process_is_free_at_once(
    side_file: SideFile, child: Callable[[], Child]
) -> None:
    other = child()
    other.say(TAKE.format(byte=ARENA_BYTE))
    lock = ArenaLock(side_file)
    assert not lock.acquire(0)
    other.kill()
    assert lock.acquire(0)
    lock.release()


def test_second_taker_in_one_process_is_refused(side_file: SideFile) -> None:
    first, second = ArenaLock(side_file), ArenaLock(side_file)
    assert first.acquire(0)
    assert not second.acquire(0.01)
    first.release()
    assert second.acquire(0)
    second.release()


def test_threads_exclude_each_other(side_file: SideFile) -> None:
    lock, inside, most = ArenaLock(side_file), [0], [0]

    def work() -> None:
        for _ in range(50):
            assert lock.acquire(10)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0)
            inside[0] -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == ([0], [1])


@pytest.mark.parametrize("wait_s", [0.0, 0.002, 0.1])
def test_wait_is_bounded(side_file: SideFile, child: Callable[[], Child], wait_s: float) -> None:
    child().say(TAKE.format(byte=ARENA_BYTE))
    lock = ArenaLock(side_file)
    waits = []
    for _ in range(5):
        start = time.monotonic()
        assert not lock.acquire(wait_s)
        waits.append(time.monotonic() - start)
    # The best of five: a wait may be longer by the time that it waited for a core.
    assert wait_s * 0.5 <= min(waits) <= wait_s + 0.02


def test_failed_try_leaves_the_lock_to_other_threads(
    side_file: SideFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(byte: int) -> bool:
        raise KeyboardInterrupt

    lock = ArenaLock(side_file)
    with monkeypatch.context() as patch:
        patch.setattr(side_file, "try_lock", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire(1)
    assert lock.acquire(0)
    lock.release()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_is_detached_and_breaks_no_lock(
    side_file: SideFile, child: Callable[[], Child]
) -> None:
    other = child()
    assert side_file.try_lock(HOLDER_BYTES)
    lock = ArenaLock(side_file)
    assert lock.acquire(0)
    pid = os.fork()
    if pid == 0:
        start = time.monotonic()
        taken = lock.acquire(5) or side_file.try_lock(HOLDER_BYTES + 1)
        side_file.unlock(HOLDER_BYTES)
        os.closerange(3, 256)
        os._exit(1 if taken or time.monotonic() - start > 1 else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for byte in (ARENA_BYTE, HOLDER_BYTES):
        assert other.say(TAKE.format(byte=byte)) == "False"
    lock.release()
    assert lock.acquire(0)
    lock.release()


def test_one_file_under_two_names_is_one_side_file(directory: Path) -> None:
    (directory / "real").mkdir()
    (directory / "link").symlink_to("real")
    assert SideFile.at(directory / "real" / "lock.x") is SideFile.at(directory / "link" / "lock.x")


def test_file_that_was_unlinked_is_not_taken_for_its_successor(
    directory: Path, child: Callable[[], Child]
) -> None:
    path = directory / "lock.test"
    first = SideFile.at(path)
    assert first.try_lock(ARENA_BYTE)
    path.unlink()
    second = SideFile.at(path)
    assert second is not first
    assert second.try_lock(ARENA_BYTE)
    assert child().say(TAKE.format(byte=ARENA_BYTE)) == "False"


def test_side_file_that_must_exist_is_not_made(directory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SideFile.at(directory / "lock.missing", create=False)
    assert not list(directory.iterdir())
