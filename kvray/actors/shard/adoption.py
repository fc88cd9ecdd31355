"""Chooses the arena of a shard: the one that it finds, or a new one in its place."""

import logging
import os
import time
from pathlib import Path

from kvray.actors.owner.ownership import remove_leftovers
from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store import Arena, ArenaSpec
from kvray.store.arena.file import ARENA_FILE
from kvray.store.arena.prefault import Progress
from kvray.store.arena.retirement import retire_file

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
            _retire(directory)
            patience_s = _LET_GO_S
        else:
            remove_leftovers(directory, keep=arena.arena_id)
            return arena
    remove_leftovers(directory)
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


def _retire(directory: Path) -> None:
    path = directory / ARENA_FILE
    try:
        retire_file(path)
    except OSError as error:
        raise ConfigError(
            f"{path} is no arena and cannot be removed ({error.strerror}); remove it by hand."
        ) from None


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
