"""Exceptions from outside at any place of a section: the lock ends with it, whatever happens.

Raised are KeyboardInterrupt before each single bytecode of a section in turn, by a tracing hook,
and real signals and exceptions of other threads at random moments.
"""

import contextlib
import ctypes
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

from kvray.errors import ShardUnavailable
from kvray.store import Arena
from kvray.store.arena import holders
from kvray.store.machine.side_file import ARENA_BYTE, HOLDER_BYTES, Description
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import chain, served, store

# An exception may strike inside a finalizer or a callback, which Python can only report.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KEYS = chain(10)


class Outside(BaseException):
    """What somebody else raises here."""


class Failure(Exception):
    """What a section itself raises."""


class Strike:
    """Raises before the n-th bytecode of whatever is traced."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Strike":
        frame.f_trace_opcodes = True
        if event in ("opcode", "return"):
            self.left -= 1
            if self.left == 0:
                raise Outside
        return self


@pytest.fixture
def probe(arena: Arena) -> Callable[[], bool]:
    """Tell whether another process could take the arena's lock now."""
    elsewhere = Description(arena.side_file.path)
    return lambda: (elsewhere.set(ARENA_BYTE, 1), elsewhere.unlock(0))[0]


def read(arena: Arena) -> None:
    leases = arena.lease(KEYS)
    if leases is not None:
        arena.release(*leases)


def plain(arena: Arena) -> None:
    with arena.section(1):
        arena.tables.counts.stored += 0


def fail(arena: Arena) -> None:
    with contextlib.suppress(Failure), arena.section(1):
        raise Failure


@pytest.mark.parametrize("act", [plain, fail, read])
def test_exception_before_any_bytecode_leaves_no_lock(arena, probe, act):
    store(arena, KEYS)
    kept = []
    for at in itertools.count(1):
        strike = Strike(at)
        sys.settrace(strike)
        try:
            act(arena)
        except Outside as error:
            kept.append(error)  # with its traceback, as a shell keeps its last
        finally:
            sys.settrace(None)
        assert probe(), f"before bytecode {at}"
        with arena.section(0) as entered:
            assert entered, f"before bytecode {at}"
        if strike.left > 0:
            break
        if len(kept) % 50 == 0:
            kept.clear()
            assert probe()
    assert at > 50
    kept.clear()
    arena.leave()
    arena.join("again")
    check_invariants(arena.tables)
    assert served(arena, KEYS) == len(KEYS)


def test_exceptions_of_other_threads_leave_no_lock(arena, probe):
    store(arena, KEYS)
    rng, ended, struck = random.Random(1), threading.Event(), []

    def work() -> None:
        while not ended.is_set():
            try:
                while not ended.is_set():
                    read(arena)
            except Outside as error:
                struck.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    target = ctypes.c_ulong(thread.ident or 0)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        time.sleep(rng.uniform(0, 0.001))
        raise_in(target, ctypes.py_object(Outside))
        with arena.section(2) as entered:
            assert entered, "the lock has leaked"
    while thread.is_alive():
        ended.set()
        thread.join(0.1)
    assert struck
    assert probe()


def test_signals_leave_no_lock(arena, probe):
    store(arena, KEYS)
    rng, kept = random.Random(2), []

    def strike(*_: object) -> None:
        raise Outside

    before = signal.signal(signal.SIGALRM, strike)
    try:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00001, 0.001))
                soon = time.monotonic() + 0.02
                while time.monotonic() < soon:  # a finalizer that is struck swallows it
                    read(arena)
            except Outside as error:
                kept.append(error)
            assert probe()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(kept) > 100


def test_leaving_halfway_leaves_no_live_row(arena, monkeypatch):
    row = arena.holder
    monkeypatch.setattr(holders, "leave", Mock(side_effect=Outside))
    with pytest.raises(Outside):
        arena.leave()
    assert arena.leave()
    assert arena.tables.holder_live[row], "undone, for the owner to bury"
    assert not arena.side_file.is_locked(HOLDER_BYTES + row)


def test_joining_halfway_keeps_no_row(arena, monkeypatch):
    arena.leave()
    arena.tables.holder_live[0] = 1  # of a dead process
    with monkeypatch.context() as patch:
        patch.setattr(holders, "bury", Mock(side_effect=IndexError))  # of a damaged table
        for _ in range(3):
            with pytest.raises(ShardUnavailable):
                arena.join("again")
    assert not any(arena.side_file.is_locked(HOLDER_BYTES + row) for row in range(4))
    assert arena.join("again") == 0
