"""Notices parts of the tier that no longer answer; Ray notices dead ones only."""

import contextlib
import socket
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from typing import Any

import ray

from kvray.actors.ray_glue.calls import mapped_errors
from kvray.errors import KVRayError

_READY_S = 1.0
"""How long it may take to get an answer that is there."""
_TRIES_MAX = 256
"""Machines that are tried at once, each by a thread."""


class Silences:
    """Since when parts have not answered; pure.

    A part that has not answered yet, has ended, or says that it starts has `start_s`. One that has
    answered is frozen after `frozen_s`, and after `misses` rounds in a row: time in which nobody
    asked does not count.
    """

    def __init__(self, *, frozen_s: float, start_s: float, misses: int = 1) -> None:
        self._frozen_s = frozen_s
        self._start_s = start_s
        self._misses = misses
        self._until: dict[str, float] = {}
        self._missed: dict[str, int] = {}

    def note(
        self,
        asked: Collection[str],
        answered: Collection[str],
        now: float,
        *,
        starting: Collection[str] = (),
    ) -> list[str]:
        """Take note of a round of questions, and return the frozen parts, each once.

        It forgets parts that were not `asked`. `answered` have answered or have an excuse;
        `starting` are those of them that said that they start.
        """
        until = {name: self._until.get(name, now + self._start_s) for name in asked}
        until |= dict.fromkeys(set(answered) & set(asked), now + self._frozen_s)
        until |= dict.fromkeys(set(starting) & set(asked), now + self._start_s)
        self._missed = {
            name: 0 if name in answered else self._missed.get(name, 0) + 1 for name in asked
        }
        frozen = sorted(
            name for name in asked if now >= until[name] and self._missed[name] >= self._misses
        )
        self._until = until | dict.fromkeys(frozen, now + self._start_s)
        return frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The outcome of a ping of every part; a part in neither set is silent."""

    alive: frozenset[str]
    dead: frozenset[str]
    """Ray knows that they have ended, and restarts them."""
    starting: frozenset[str] = frozenset()
    """Those of the living that say so: a start may take long."""


class Pings:
    """Pings of all parts, round after round. An answer that comes a round later counts as well."""

    def __init__(self, *, patience_s: float) -> None:
        """Ping a part again after `patience_s`: the ping may be lost."""
        self._patience_s = patience_s
        # Name -> its ping, and when it was asked.
        self._asked: dict[str, tuple[Any, float]] = {}

    def round(self, parts: Mapping[str, Any], *, timeout_s: float) -> Answers:
        """Ping all `parts`, by name, and return what they answered in time."""
        now = time.monotonic()
        asked: dict[str, tuple[Any, float]] = {}
        for name, actor in parts.items():
            with contextlib.suppress(KVRayError), mapped_errors():
                ping, at = self._asked.get(name, (None, now))
                is_new = ping is None or now > at + self._patience_s
                asked[name] = (actor.ping.remote(), now) if is_new else (ping, at)
        names = {ping: name for name, (ping, _) in asked.items()}
        ready: list[Any] = []
        if names:
            ready, _ = ray.wait(list(names), num_returns=len(names), timeout=timeout_s)
        answers = {names[ping]: _answer(ping) for ping in ready}
        self._asked = {name: one for name, one in asked.items() if name not in answers}
        alive = frozenset(name for name, answer in answers.items() if answer is not None)
        return Answers(
            alive=alive,
            dead=frozenset(parts) - alive - self._asked.keys(),
            starting=frozenset(name for name in alive if answers[name]),
        )


def _answer(ping: Any) -> bool | None:
    """Return whether a part says that it starts; None if it has ended."""
    try:
        with mapped_errors():
            return bool(ray.get(ping, timeout=_READY_S))
    except KVRayError:
        return None


def reachable(nodes: Mapping[str, Mapping[str, Any]], *, timeout_s: float) -> frozenset[str]:
    """Return the names of the Ray nodes whose machines can be reached, whatever runs there."""

    def can_connect(node: Mapping[str, Any]) -> bool:
        raylet = node["NodeManagerAddress"], node["NodeManagerPort"]
        with contextlib.suppress(OSError), socket.create_connection(raylet, timeout_s):
            return True
        return False

    with ThreadPoolExecutor(_TRIES_MAX) as threads:
        return frozenset(compress(nodes, threads.map(can_connect, nodes.values())))
