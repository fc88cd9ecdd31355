"""Calls that found the arena busy and must happen later: releases, aborts, late commits."""

import logging
import time
from collections import deque
from collections.abc import Callable

from kvray.errors import KVRayError
from kvray.store import Arena

_log = logging.getLogger("kvray.node")

_FLUSH_S = 0.1
"""Bound of a round, so that a locked arena does not keep the thread from other work."""
_WAITING_MAX = 4096

Deferred = Callable[[Arena], bool]
"""A call on the arena; False: busy, try again."""


class DeferredCalls:
    """Calls that wait for their arenas; any thread adds, one thread flushes."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Arena, Deferred]] = deque()
        self._has_lost = False  # since it was empty

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, arena: Arena, action: Deferred) -> None:
        """Try `action` until it answers True; one too many is lost, and logged."""
        if len(self._waiting) >= _WAITING_MAX:
            if not self._has_lost:
                self._has_lost = True
                _log.warning(
                    "kvray: the arena has been locked for too long, and calls on it are lost:"
                    " blocks may stay leased until this process ends; look for a stopped process"
                    " of this node that has the lock"
                )
        else:
            self._waiting.append((arena, action))

    def flush(self) -> None:
        """Try each once; a call that still finds its arena busy goes to the end."""
        self._has_lost &= bool(self._waiting)
        until = time.monotonic() + _FLUSH_S
        for _ in range(len(self._waiting)):
            arena, action = self._waiting.popleft()
            try:
                # Also in a retired arena: its leases keep it mapped.
                done = action(arena)
            except KVRayError as error:
                _log.debug("kvray: a deferred call has become void: %s", error)
                continue
            if not done:
                self._waiting.append((arena, action))
                if time.monotonic() > until:
                    return
