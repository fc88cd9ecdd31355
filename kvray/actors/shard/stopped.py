"""A process that is stopped while it has an arena's lock: its node has nothing but misses."""

import logging
from typing import Any

from kvray.store.machine import lockers
from kvray.store.machine.side_file import ARENA_BYTE, SideFile

_log = logging.getLogger("kvray.shard")


class StoppedHolder:
    """Names the process, and ends it after a while; one that runs is never ended."""

    def __init__(self, shard: str, *, limit_s: float) -> None:
        self._shard = shard
        self._limit_s = limit_s
        self._locked_before = False
        self.found: dict[str, Any] | None = None
        """pid, name and since (monotonic seconds) of who is stopped with the lock now."""

    def look(self, side_file: SideFile, *, now: float) -> None:
        """Look who has the lock; called at each heartbeat."""
        was, self._locked_before = self._locked_before, side_file.is_locked(ARENA_BYTE)
        # A process that has just entered does not matter: asking for its pid takes milliseconds.
        stopped = _stopped(side_file) if was and self._locked_before else None
        if stopped is None:
            self.found = None
        elif self.found is None or self.found["pid"] != stopped:
            self.found = {"pid": stopped, "name": lockers.name_of(stopped), "since": now}
            _log.warning(
                "%s: process %d (%s) is stopped while it has the arena's lock, so that all others"
                " have misses; continue it with `kill -CONT %d`, or it is ended in %.0f s",
                *(self._shard, stopped, self.found["name"], stopped, self._limit_s),
            )
        elif now - self.found["since"] > self._limit_s and _end(side_file, stopped):
            _log.warning("%s: ended process %d, which stayed stopped", self._shard, stopped)


def _stopped(side_file: SideFile) -> int | None:
    """Return the process that has the lock, if it is stopped and shares it with nobody."""
    pids = side_file.lockers().get(ARENA_BYTE, set())
    return next(iter(pids)) if len(pids) == 1 and all(map(_is_stopped, pids)) else None


def _is_stopped(pid: int) -> bool:
    return lockers.state_of(pid) in ("T", "t")


def _end(side_file: SideFile, pid: int) -> bool:
    """Kill a process if it is stopped and has the lock, still."""
    return lockers.end(pid, lambda: ARENA_BYTE in side_file.lockers(pid) and _is_stopped(pid))
