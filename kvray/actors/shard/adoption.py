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
    """Names the process, and ends it after a while; one that runs is never ended.

    It is told by the lock, which it keeps, and its CPU time, which stands still: what a frozen
    container's processes show as their state depends on the kernel.
    """

    def __init__(self, shard: str, *, limit_s: float) -> None:
        self._shard = shard
        self._limit_s = limit_s
        self._locked_before = False
        self._seen: tuple[int, tuple[bytes, ...]] | None = None
        """Who had the lock at the last look, alone, and the CPU time that it had used."""
        self._since = 0.0
        self.found: dict[str, Any] | None = None
        """pid, name and since (monotonic seconds) of who is stopped with the lock now."""

    def look(self, side_file: SideFile, *, now: float) -> None:
        """Look who has the lock; called at each heartbeat."""
        was, self._locked_before = self._locked_before, side_file.is_locked(ARENA_BYTE)
        before, since = self._seen, self._since
        # A process that has just entered does not matter: asking for its pid takes milliseconds.
        self._seen = _holder(side_file) if was and self._locked_before else None
        if self._seen is None or self._seen != before:
            self._since, self.found = now, None
            return
        pid = self._seen[0]
        if self.found is None:
            self.found = {"pid": pid, "name": lockers.name_of(pid), "since": since}
            _log.warning(
                "%s: process %d (%s) is stopped while it has the arena's lock, so that all others"
                " have misses; continue it with `kill -CONT %d`, or unpause its container, or it is"
                " ended in %.0f s",
                *(self._shard, pid, self.found["name"], pid, self._limit_s),
            )
        elif now - since > self._limit_s and lockers.end(
            pid, lambda: _holder(side_file, pid) == before
        ):
            _log.warning("%s: has killed process %d, which stayed stopped", self._shard, pid)
            self._since = now  # a frozen one may die only when it is thawed


def _holder(side_file: SideFile, *pids: int) -> tuple[int, tuple[bytes, ...]] | None:
    """Return who of `pids`, or of all, has the lock and shares it with nobody; and its CPU time."""
    found = list(side_file.lockers(*pids).get(ARENA_BYTE, ()))
    return (found[0], lockers.cpu_time_of(found[0])) if len(found) == 1 else None
