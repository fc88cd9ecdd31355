"""The lock over an arena's tables: mutual exclusion between threads and processes, held briefly."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

from kvray.store.machine.side_file import ARENA_BYTE, LOCK, Description, SideFile, Until

_BACKOFF_S = (0.00002, 0.00005, 0.0001, 0.0002)

_MARK_S = 0.001
"""The mark of a waiting process counts so long, unless it marks again: some of its pauses."""
_TURN_S = 0.002
"""A thread waits so long for its turn before it checks whether somebody has lost theirs."""
_AGAIN_S = 0.001
_YIELD_S = 0.0015
"""A process that wants the lock again within `_AGAIN_S` lets those who wait go first, for up to
this."""
_HASTY_S = 0.3
_REST = 20
"""Tries of at most `_HASTY_S` have somebody waiting behind them: of a lock that stays locked they
cost a process one part in so many of its time."""


class ArenaLock:
    """The lock over an arena's tables: tried for a bounded time, never waited for.

    Who has waited in vain does not wait again for a while, unless for longer, or the process has
    had the lock since: a stopped process that has it costs the others a wait, and not one a try.

    The lock never outlives its section, wherever an exception from outside hits: Ctrl-C, a signal's
    handler, one thread that raises in another. Two things make sure of that:

    - The end of a section is one object. Only the interpreter's `with` refers to it, on its stack,
      so it goes when the `with` does, however that ends. No frame has it among its variables, where
      a traceback could keep it.
    - When the object goes, a single C function runs: the unlocking. No bytecode comes between, in
      which an exception could be raised.

    Normally a section ends by itself, and nothing is left to do when the object goes.

    A waiting thread marks `waiting`, a word that the processes share. A thread that has just had
    the lock and wants it again looks there first, and lets the waiting one go before it. The mark
    is a hint that expires by itself, so nobody has to clean up after a death.
    """

    def __init__(self, side_file: SideFile, waiting: memoryview | None = None) -> None:
        """Lock ARENA_BYTE of `side_file`; `waiting` is a shared u64, None: nobody goes first."""
        self._side_file = side_file
        self._waiting = memoryview(bytearray(8)).cast("Q") if waiting is None else waiting
        self._released = 0.0
        # Hints; a thread may overwrite another's.
        self._vain_s = self._rest_until = 0.0

    def section(
        self,
        wait_s: float,
        opened: Callable[[], bool],
        closed: Callable[[BaseException | None], None],
    ) -> AbstractContextManager[bool]:
        """Return a context manager that tries for the lock for `wait_s`, and holds it inside.

        `opened` is called first with the lock; its answer is the section's value, which is False
        without the lock. `closed` is called last with the lock, if `opened` said True or the
        section failed, with the error.
        """
        description = self._side_file.of_thread()
        # A thread that is in a section already: this is its signal's handler, or a finalizer.
        held = None if description is None else description.held
        if description is None or (held is not None and held() is not None):
            return _REFUSED
        step = _Step(self, description, wait_s, opened, closed)
        end = partial(_Step.end, step)
        # Only the description keeps it, so that a section that is never entered can end nothing.
        description.next = Until(end, description.unlock)
        return cast("AbstractContextManager[bool]", _Section(step.begin, end))

    def take(self, description: Description, wait_s: float) -> bool:
        """Try for at most `wait_s`; the lock is `description.next`'s, and ends with it."""
        description.held, description.next = description.next, None
        # None: the section of a signal's handler came between, and has overwritten ours.
        if description.held is not None:
            turn = self._side_file.turn
            if turn.acquire(False):
                description.turn = turn
                if not self._waiting[0] and description.set(ARENA_BYTE, LOCK):
                    return True
            now = time.monotonic()
            rests = wait_s <= self._vain_s and now < self._rest_until
            deadline = now if rests else now + wait_s
            if self._wait_for_turn(description, deadline) or self._try_until(description, deadline):
                return True
            if not rests and wait_s <= _HASTY_S:
                self._vain_s, self._rest_until = wait_s, deadline + _REST * wait_s
        description.held = None
        if description.turn is not None:
            _end_turn(description)
        return False

    def give(self, description: Description) -> None:
        """Give the lock up."""
        self._released = time.monotonic()
        self._vain_s = 0.0
        description.unlock(0)
        description.held = None
        if description.turn is not None:
            _end_turn(description)

    def _wait_for_turn(self, description: Description, deadline: float) -> bool:
        """Queue up behind this process's other threads; return whether we have the lock already.

        The queue only saves time: threads that poll take the interpreter from the one in the
        section. Two threads with a turn do no harm. An exception may lose a turn: a thread that
        gets the lock without one makes a new queue.
        """
        side_file, left = self._side_file, deadline - time.monotonic()
        while description.turn is None:
            turn = side_file.turn
            if turn.acquire(timeout=max(0.0, min(left, _TURN_S))):
                description.turn = turn
            elif description.set(ARENA_BYTE, LOCK):
                side_file.turn = threading.Lock()
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                break
        return False

    def _try_until(self, description: Description, deadline: float) -> bool:
        if self._waiting[0]:
            self._let_others_go_first(deadline)
        attempt = mark = 0
        while not description.set(ARENA_BYTE, LOCK):
            pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
            attempt += 1
            now = time.monotonic()
            if now + pause > deadline:
                return False
            self._waiting[0] = mark = int((now + _MARK_S) * 1e9)
            time.sleep(pause)
        if mark and self._waiting[0] == mark:
            self._waiting[0] = 0  # nobody else waits
        return True

    def _let_others_go_first(self, deadline: float) -> None:
        now = time.monotonic()
        if now - self._released > _AGAIN_S:
            return
        until = min(now + _YIELD_S, deadline - _BACKOFF_S[0])
        # A mark of the far future comes from another time namespace, and says nothing.
        while now < until and now < self._waiting[0] / 1e9 <= now + 2 * _MARK_S:
            time.sleep(_BACKOFF_S[0])
            now = time.monotonic()


def _end_turn(description: Description) -> None:
    turn, description.turn = description.turn, None
    if turn is not None:
        turn.release()


class _Section:
    """A context manager; `with` looks up both methods, keeps the second, drops this object."""

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, enter: Callable[..., object], leave: Callable[..., object]) -> None:
        self.__enter__ = enter
        self.__exit__ = leave


_REFUSED = cast("AbstractContextManager[bool]", _Section(bool, lambda *_: None))


class _Step:
    """State that both ends of a section share; it refers to neither of them."""

    __slots__ = ("_closed", "_description", "_entered", "_lock", "_opened", "_taken", "_wait_s")

    def __init__(
        self,
        lock: ArenaLock,
        description: Description,
        wait_s: float,
        opened: Callable[[], bool],
        closed: Callable[[BaseException | None], None],
    ) -> None:
        self._lock = lock
        self._description = description
        self._wait_s = wait_s
        self._opened = opened
        self._closed = closed
        self._taken = self._entered = False

    def begin(self) -> bool:
        self._taken = self._lock.take(self._description, self._wait_s)
        if self._taken:
            self._entered = self._opened()
        return self._entered

    def end(self, kind: object, error: BaseException | None, *_: object) -> None:
        if not self._taken or self._description.fd < 0:
            return  # not taken, or this is a fork in the middle of its parent's section
        try:
            if self._entered or error is not None:
                self._closed(error)
        finally:
            self._lock.give(self._description)
