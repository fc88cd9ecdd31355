"""Ctrl-C and SIGTERM: both end a command in order, and neither cuts its clean-up short."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Raises KeyboardInterrupt for the signals; held back where that could lose something."""

    def __init__(self) -> None:
        """Catch nothing yet."""
        self._depth = 0
        self._pending = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals inside the block, which is all that the process does.

        After it they are ignored: a late one must not change the exit status.
        """
        self._handle_with(self._handle)
        try:
            yield
        finally:
            self._handle_with(signal.SIG_IGN)

    @contextlib.contextmanager
    def masked(self) -> Iterator[None]:
        """Have threads that start inside the block take no signal, now and later.

        For imports: some libraries start threads, and while Ray connects it blocks signals in this
        thread only, so that another one would take them, and run Ray's handler.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

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
        """Give a stack of things to close, which are closed with signals held back."""
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
