"""Notices parts of the tier that no longer answer; Ray notices dead ones only.

It also says which nodes kvray leaves, because nobody uses them and they are to go.
"""

import contextlib
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import ray

from kvray.actors.ray_glue.calls import mapped_errors
from kvray.errors import KVRayError

_READY_S = 1.0
"""How long it may take to get an answer that is there."""
_DOUBLINGS_MAX = 3
"""How often the time that a part has to start is doubled."""
_TRIES_MAX = 256
"""Machines that are tried at once, each by a thread."""


class Share:
    """Which parts a round asks: a bounded number, however many there are; pure."""

    def __init__(self, most: int) -> None:
        """Ask at most so many parts in a round: all of a small tier, in every round."""
        self._most = most
        # Who was asked longest ago comes first.
        self._line: dict[str, None] = {}

    def retain(self, parts: Collection[str]) -> None:
        """Have these parts, and no others, take turns; new ones come first."""
        new = dict.fromkeys(name for name in parts if name not in self._line)
        self._line = new | {name: None for name in self._line if name in parts}

    def take(self, suspects: Sequence[Set[str]], heard: Set[str]) -> set[str]:
        """Return whom to ask now; if there are many, no part that was `heard`.

        Each group of `suspects` gets half of what those before it have left, and the others have
        their turns: so one frozen part is found even if many are unreachable.
        """
        if len(self._line) <= self._most:
            return set(self._line)
        taken: set[str] = set()
        for group in suspects:
            names = (name for name in self._line if name in group and name not in taken)
            taken |= self._next(names, (self._most - len(taken)) // 2)
        left_out = set(heard).union(*suspects)
        others = (name for name in self._line if name not in left_out)
        return taken | self._next(others, self._most - len(taken))

    def _next(self, names: Iterator[str], most: int) -> set[str]:
        taken = list(islice(names, most))
        for name in taken:
            self._line[name] = self._line.pop(name)
        return set(taken)


class Silences:
    """How long parts have not answered; pure.

    A part that has not answered yet, was ended, or says that it starts has `start_s`, and twice as
    long after each end of a start: on a busy machine it would never come to its end. One that has
    answered is frozen after `frozen_s`, and after `misses` rounds in a row that asked it.
    """

    # Time in which nobody asked a part does not count: its silence is the sum of the rounds that
    # asked it, each with the time since the round before. That time says nothing about a part: a
    # tier of many parts asks each one now and then only, and one that froze just now would have its
    # last answer long ago. Where every round asks all, the sum is the time since the last answer.

    def __init__(self, *, frozen_s: float, start_s: float, misses: int = 1) -> None:
        self._frozen_s = frozen_s
        self._start_s = start_s
        self._misses = misses
        self._noted_at = 0.0
        # Those that answered last and have started.
        self._well: set[str] = set()
        # The others that were asked -> seconds of silence, rounds missed.
        self._silent: dict[str, tuple[float, int]] = {}
        # Those whose start was ended -> how often, in a row.
        self._ended_starts: dict[str, int] = {}

    @property
    def silent(self) -> Set[str]:
        """Those that did not answer when they were asked last, or said that they start."""
        return self._silent.keys()

    def forget(self, names: Iterable[str]) -> None:
        """Forget parts that there are no more."""
        for name in names:
            self._well.discard(name)
            self._silent.pop(name, None)
            self._ended_starts.pop(name, None)

    def note(
        self, asked: Set[str], answered: Set[str], now: float, *, starting: Set[str] = frozenset()
    ) -> list[str]:
        """Take note of a round of questions, and return the frozen parts, each once.

        `answered` have answered, have an excuse, or were heard of otherwise, `asked` or not;
        `starting` are those of them that said that they start.
        """
        passed_s, self._noted_at = now - self._noted_at, now
        for name in self._silent.keys() & answered:
            del self._silent[name]
        frozen = []
        for name in asked - answered:
            seconds, missed = self._silent.get(name, (0.0, 0))
            if name in self._silent or name in self._well:
                seconds += passed_s
            self._silent[name] = seconds, missed + 1
            doublings = min(self._ended_starts.get(name, 0), _DOUBLINGS_MAX)
            limit_s = self._frozen_s if name in self._well else self._start_s * 2.0**doublings
            if seconds >= limit_s and missed + 1 >= self._misses:
                frozen.append(name)
        for name in set(frozen) - self._well:
            self._ended_starts[name] = self._ended_starts.get(name, 0) + 1
        self._well |= answered
        self._well -= {*starting, *frozen}
        for name in self._well & self._ended_starts.keys():
            del self._ended_starts[name]
        self._silent |= dict.fromkeys((*starting, *frozen), (0.0, 0))
        return sorted(frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The outcome of a round of pings; a part in neither set is silent."""

    alive: frozenset[str]
    dead: frozenset[str]
    """Ray knows that they have ended, and restarts them."""
    starting: frozenset[str] = frozenset()
    """Those of the living that say so: a start may take long."""


class Pings:
    """Pings of parts, round after round. An answer that comes a round later counts as well."""

    def __init__(self, *, patience_s: float) -> None:
        """Ping a part again after `patience_s`: the ping may be lost."""
        self._patience_s = patience_s
        # Name -> its ping, and when it was asked.
        self._asked: dict[str, tuple[Any, float]] = {}

    def forget(self, names: Iterable[str]) -> None:
        """Forget parts that there are no more."""
        for name in names:
            self._asked.pop(name, None)

    def round(self, parts: Mapping[str, Any], *, timeout_s: float) -> Answers:
        """Ping `parts`, by name, and return what they answered in time."""
        now = time.monotonic()
        names: dict[Any, str] = {}
        for name, actor in parts.items():
            with contextlib.suppress(KVRayError), mapped_errors():
                ping, at = self._asked.pop(name, (None, now))
                if ping is None or now > at + self._patience_s:
                    ping, at = actor.ping.remote(), now
                self._asked[name] = ping, at
                names[ping] = name
        ready: list[Any] = []
        if names:
            ready, _ = ray.wait(list(names), num_returns=len(names), timeout=timeout_s)
        answers = {names[ping]: _answer(ping) for ping in ready}
        for name in answers:
            del self._asked[name]
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


class IdleNodes:
    """Nodes that nothing but kvray uses, and those that kvray leaves or has left for that."""

    def __init__(self, after_s: float | None) -> None:
        """Have kvray leave a node that is unused for so long; None: only those that are to go."""
        self._after_s = float("inf") if after_s is None else after_s
        self._since: dict[str, float] = {}
        self._left: set[str] = set()

    @property
    def left(self) -> Set[str]:
        """Those that kvray leaves or has left: none gets a shard until somebody uses it."""
        return self._left

    def note(self, unused: Set[str], going: Set[str], now: float) -> None:
        """Take note of the nodes that are unused `now`, and of those that are `going` anyway.

        The latter are left at once.
        """
        self._since = {node: self._since.get(node, now) for node in unused}
        due = {node for node, since in self._since.items() if now - since >= self._after_s}
        self._left = self._left & unused | due | going

    def stay(self, node: str) -> None:
        """Note that a node could not be left: it counts as unused from the next look on."""
        self._left.discard(node)
        self._since.pop(node, None)
