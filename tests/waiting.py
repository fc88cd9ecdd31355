"""How tests wait: for something to happen, and never for a time in which it should.

A machine may run at a tenth of its usual speed, so a limit only catches what hangs.
"""

import time
from collections.abc import Callable

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
