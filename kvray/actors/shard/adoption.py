"""Chooses the arena of a shard: the one that it finds, or a new one in its place.

While a process is stopped that has an arena's lock, its node has nothing but misses.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

from kvray.actors.owner.inventory import naming_unused
from kvray.actors.owner.ownership import remove_leftovers
from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store import Arena, ArenaSpec
from kvray.store.arena.file import ARENA_FILE
from kvray.store.arena.owner import retire_file
from kvray.store.arena.prefault import Progress
from kvray.store.machine import lockers
from kvray.store.machine.side_file import ARENA_BYTE, SideFile

_log = logging.getLogger("kvray.shard")

_LOCK_WAIT_S = 0.1
_LET_GO_S = 15.0
"""How long the memory of a retired arena may still be in use: engines look for a new one every
second and keep what they had for ten more."""
_RETRY_S = 0.5


def open_arena(directory: Path, spec: ArenaSpec, shard: str, progress: Progress) -> Arena:
    """Return the arena in `directory` if it is the one we would make, else a new one.

    One that is not is retired, so that those who are attached to it attach to the new one. Only
    the owner of the directory may call this. CapacityError: a new one does not fit.
    """
    patience_s = 0.0
    if os.path.lexists(directory / ARENA_FILE):
        try:
            arena = _adoptable(directory, spec)
        except ShardUnavailable as error:
            # As text: whoever keeps the error keeps its traceback, and so the old arena mapped.
            _log.warning("%s: replaces the arena that is there: %s", shard, str(error))
            try:
                retire_file(directory / ARENA_FILE)
            except OSError as cause:
                raise ConfigError(
                    f"{directory / ARENA_FILE} is no arena and cannot be removed"
                    f" ({cause.strerror}); remove it by hand."
                ) from None
            patience_s = _LET_GO_S
        else:
            remove_leftovers(directory, keep=arena.arena_id)
            return arena
    remove_leftovers(directory)
    with naming_unused(directory.parent):
        return _create(directory, spec, progress, patience_s=patience_s)


def _adoptable(directory: Path, spec: ArenaSpec) -> Arena:
    """Map the arena that is there; ShardUnavailable if it is not what `spec` asks for."""
    arena = Arena(directory, lock_wait_s=_LOCK_WAIT_S)
    if arena.cluster_name != spec.cluster_name:
        reason = f"it is of the cluster {arena.cluster_name!r}, not {spec.cluster_name!r}."
    elif arena.tables.geometry != spec.geometry():
        reason = "it has other sizes than configured."
    else:
        return arena
    arena.close()
    raise ShardUnavailable(reason)


def _create(directory: Path, spec: ArenaSpec, progress: Progress, *, patience_s: float) -> Arena:
    """Make a new arena; what does not fit is tried again while memory may still come free."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return Arena.create(directory, spec, lock_wait_s=_LOCK_WAIT_S, progress=progress)
        except CapacityError:
            if time.monotonic() > deadline:
                raise
            progress(0, spec.capacity)  # raises if the shard is to stop
            time.sleep(_RETRY_S)


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
        elif now - self.found["since"] > self._limit_s and lockers.end(
            stopped, lambda: ARENA_BYTE in side_file.lockers(stopped) and _is_stopped(stopped)
        ):
            _log.warning("%s: ended process %d, which stayed stopped", self._shard, stopped)


def _stopped(side_file: SideFile) -> int | None:
    """Return the process that has the lock, if it is stopped and shares it with nobody."""
    pids = side_file.lockers().get(ARENA_BYTE, set())
    return next(iter(pids)) if len(pids) == 1 and all(map(_is_stopped, pids)) else None


def _is_stopped(pid: int) -> bool:
    return lockers.state_of(pid) in ("T", "t")
