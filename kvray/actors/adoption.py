"""Which arena a shard goes on with: the one that it finds, or a new one."""

import logging
from pathlib import Path

from kvray.actors.ownership import remove_leftovers
from kvray.errors import ShardUnavailable
from kvray.store import Arena, ArenaSpec
from kvray.store.arena_file import Progress

_log = logging.getLogger("kvray.shard")

_LOCK_WAIT_S = 0.1


def open_arena(directory: Path, spec: ArenaSpec, *, shard: str, progress: Progress) -> Arena:
    """Adopt the arena that is there if it is the one we would make, else make a new one."""
    try:
        arena = Arena(directory, lock_wait_s=_LOCK_WAIT_S)
    except ShardUnavailable:
        arena = None
    if arena is not None:
        if arena.tables.geometry == spec.geometry():
            return arena
        _log.warning("%s: the arena has other sizes than configured; making a new one", shard)
        arena.retire()
        arena.close()
    remove_leftovers(directory)
    return Arena.create(directory, spec, lock_wait_s=_LOCK_WAIT_S, progress=progress)
