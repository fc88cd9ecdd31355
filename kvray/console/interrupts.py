"""Ctrl-C and SIGTERM: both end a command in order, and neither interrupts its clean-up."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def masked() -> Iterator[None]:
    """Keep signals from the threads that start inside the block, now and later.

    This is for imports: some libraries start threads. While Ray connects, it blocks signals in
    this thread only. Another thread would then take them and run Ray's handler.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupts:
    """Raises KeyboardInterrupt for the signals, later where that would lose something."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals inside the block, which is the whole command.

        Afterwards they are ignored: a late signal must not change the exit status.
        """
        self._handle_with(self._handle)
        try:
            yield
        finally:
            self._handle_with(signal.SIG_IGN)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals back until the end of the block, or until `check`."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt now if a signal is held back."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def closing(self) -> Iterator[contextlib.ExitStack]:
        """Yield a stack of things to close; it closes them with signals held back."""
        stack = contextlib.ExitStack()
        try:
            yield stack
        finally:
            self._depth += 1
            try:
                stack.close()
            finally:
                self._depth -= 1
        self.check()

    def _handle_with(self, handler: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for signum in _SIGNALS:
                signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._depth:
            self._pending = True
        else:
            raise KeyboardInterrupt
