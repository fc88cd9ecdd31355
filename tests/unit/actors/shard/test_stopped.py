"""A process that is stopped with the arena's lock is named, then ended; one that runs never is."""

import signal
import time
from collections.abc import Callable

from kvray.actors.shard.adoption import StoppedHolder
from kvray.store.machine import lockers
from kvray.store.machine.side_file import ARENA_BYTE, SideFile
from tests.unit.store.conftest import Child, child, directory
from tests.waiting import HANG_S

__all__ = ["child", "directory"]

TAKE = "ArenaLock((kept := SideFile.at(directory / 'lock.test'))).acquire(0)"


def stop(process: Child) -> None:
    process.process.send_signal(signal.SIGSTOP)
    while lockers.state_of(process.process.pid) != "T":
        time.sleep(0.001)


def test_stopped_holder_is_named_and_ended_after_the_limit(directory, child):
    file, other, watch = (
        SideFile.at(directory / "lock.test"),
        child(),
        StoppedHolder("s", limit_s=30.0),
    )
    assert other.say(TAKE) == "True"
    for now in (0.0, 1.0, 40.0):
        watch.look(file, now=now)
    assert watch.found is None, "it runs"
    stop(other)
    watch.look(file, now=41.0)
    assert watch.found
    assert watch.found["pid"] == other.process.pid
    watch.look(file, now=70.0)
    assert other.process.poll() is None
    watch.look(file, now=72.0)
    assert other.process.wait(HANG_S) == -signal.SIGKILL
    assert not file.is_locked(ARENA_BYTE)
    watch.look(file, now=73.0)
    assert watch.found is None


def test_holder_that_goes_on_just_before_its_end_is_left_alone(directory, child, monkeypatch):
    file, other, watch = (
        SideFile.at(directory / "lock.test"),
        child(),
        StoppedHolder("s", limit_s=30.0),
    )
    assert other.say(TAKE) == "True"
    stop(other)
    end = lockers.end

    def end_late(pid: int, is_meant: Callable[[], bool]) -> bool:
        other.process.send_signal(signal.SIGCONT)
        while lockers.state_of(pid) == "T":
            time.sleep(0.001)
        return end(pid, is_meant)

    monkeypatch.setattr(lockers, "end", end_late)
    for now in (0.0, 1.0, 40.0):
        watch.look(file, now=now)
    assert other.say("1") == "1", "it lives"
