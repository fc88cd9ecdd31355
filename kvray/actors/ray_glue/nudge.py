"""Calls to an actor that nobody waits for: Ray finds some dead processes by a call alone."""

import contextlib
from typing import Any

import ray

from kvray.actors.ray_glue.calls import get_actor, mapped_errors
from kvray.errors import KVRayError


class Nudge:
    """Calls an actor now and then, and does not wait for its answer.

    A process that could not become the actor it was started for, with a full disk say, counts as
    running with Ray until somebody calls it: only then does it end, and Ray starts the next.
    """

    def __init__(self, name: str, *, every_s: float) -> None:
        self._name = name
        self._every_s = every_s
        self._due = 0.0
        self._answer: Any = None

    def give(self, now: float) -> None:
        """Call it if it is time, and it has answered the last one."""
        if now < self._due:
            return
        self._due = now + self._every_s
        with contextlib.suppress(KVRayError), mapped_errors():
            if self._answer is None or ray.wait([self._answer], timeout=0)[0]:
                self._answer = get_actor(self._name).ping.remote()
