"""How tests wait: for something to happen, and never for a time in which it should.

A machine may run at a tenth of its usual speed, so a limit only catches what hangs.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

HANG_S = 600.0
"""What has not happened by then never will."""


def wait_for(condition: Callable[[], object], what: object = "it") -> None:
    """Return once `condition` holds.

    It sleeps as long as the condition took to look at: a command of kvray costs a core a second.
    """
    deadline = time.monotonic() + HANG_S
    while True:
        began = time.monotonic()
        if condition():
            return
        assert time.monotonic() < deadline, f"{what} did not happen within {HANG_S:.0f} s"
        time.sleep(min(1.0, max(0.005, time.monotonic() - began)))


class Gate:
    """Holds the calls of a method or function up until the test opens it."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        method = getattr(owner, name)

        def held(*args: Any, **kwargs: Any) -> Any:
            self.reached.set()
            assert self.open.wait(HANG_S)
            return method(*args, **kwargs)

        patch.setattr(owner, name, held)
