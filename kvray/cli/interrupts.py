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
        """Catch the signals inside the block, and give them back to whoever had them."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        before: dict[int, Any] = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        self.catch()
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def catch(self) -> None:
        """Catch the signals again: `ray.init` puts a handler of its own in place."""
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                signal.signal(signum, self._handle)

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

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._depth:
            self._pending = True
        else:
            raise KeyboardInterrupt
