"""Notices parts of the tier that have stopped answering, which Ray does for dead ones only."""

import contextlib
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from kvray.actors.ray_calls import get_actor, mapped_errors
from kvray.errors import KVRayError

_READY_S = 1.0
"""How long an answer may take that is known to be there."""


class Silences:
    """Since when parts have not answered; pure.

    A part that has not answered yet, or was ended, is given `start_s`: it may be starting.
    """

    def __init__(self, *, frozen_s: float, start_s: float) -> None:
        """Count a part as frozen that has answered once, and then not for `frozen_s`."""
        self._frozen_s = frozen_s
        self._start_s = start_s
        self._until: dict[str, float] = {}

    def note(self, asked: Collection[str], answered: Collection[str], now: float) -> list[str]:
        """Take note of a round of questions.

        Args:
            asked: names of the parts that were asked; others are forgotten.
            answered: those of them that answered, or cannot be expected to.
            now: monotonic seconds.

        Returns:
            The frozen ones, each once.
        """
        until = {name: self._until.get(name, now + self._start_s) for name in asked}
        until |= dict.fromkeys(set(answered) & set(asked), now + self._frozen_s)
        frozen = sorted(name for name in asked if now >= until[name])
        self._until = until | dict.fromkeys(frozen, now + self._start_s)
        return frozen


class Nudge:
    """Calls an actor now and then, and does not wait for its answer.

    A process that could not become the actor it was started for, with a full disk say, counts as
    running with Ray until somebody calls it: only then does it end, and Ray starts the next.
    """

    def __init__(self, name: str, *, every_s: float) -> None:
        """Call the actor `name`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What became of a ping of every part; a part that is in neither set is silent."""

    alive: frozenset[str]
    dead: frozenset[str]
    """Ray knows that they have ended, and starts them anew."""


def who_answers(parts: Mapping[str, Any], *, timeout_s: float) -> Answers:
    """Ping all `parts`, by name, and return what they answered in time."""
    asked: dict[Any, str] = {}
    for name, actor in parts.items():
        with contextlib.suppress(KVRayError), mapped_errors():
            asked[actor.ping.remote()] = name
    if not asked:
        return Answers(alive=frozenset(), dead=frozenset(parts))
    answers, silent = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)
    alive = frozenset(asked[answer] for answer in answers if _is_alive(answer))
    return Answers(alive=alive, dead=frozenset(parts) - alive - {asked[one] for one in silent})


def _is_alive(answer: Any) -> bool:
    try:
        with mapped_errors():
            ray.get(answer, timeout=_READY_S)
    except KVRayError:
        return False
    return True


def is_reachable(node: Mapping[str, Any], *, timeout_s: float) -> bool:
    """Whether the machine of a Ray node can be reached, whatever runs or is frozen on it."""
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        socket.create_connection(address, timeout=timeout_s).close()
    except OSError:
        return False
    return True
