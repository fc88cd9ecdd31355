"""A connector that records how long it held up the thread of the engine's scheduler.

The scheduler is named with the file that it writes behind an `@`, as in
`TimedScheduler@/tmp/stalls`. A record is four doubles: 0 for a match or 1 for a pass, the monotonic
time of the call, the seconds it took, and the part of them in which the thread waited for a core,
which the kernel counts in /proc/thread-self/schedstat.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvray.connector import KvRayScheduler, KvRayWorker

__all__ = ["KvRayWorker"]

T = TypeVar("T")

MATCH, PASS = 0.0, 1.0
_FIELDS = 4


def __getattr__(name: str) -> Any:
    """Return a scheduler that writes to the file behind the `@`."""
    class_name, _, path = name.partition("@")
    if class_name != "TimedScheduler" or not path:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    class Timed(KvRayScheduler):
        def __init__(self, llm_args: Any) -> None:
            super().__init__(llm_args)
            self._watch = _Stopwatch(path)

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            match = super().get_num_new_matched_tokens
            return self._watch.time(MATCH, match, request, num_computed_tokens)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return self._watch.time(PASS, super().build_connector_meta, scheduler_output)

    return Timed


def read_stalls(path: Path) -> npt.NDArray[np.float64]:
    """Return the records of a file, shape [num_calls, 4]; none if nobody wrote it."""
    if not path.exists():
        return np.empty((0, _FIELDS))
    values = np.frombuffer(path.read_bytes()[: path.stat().st_size // 32 * 32])
    return values.reshape(-1, _FIELDS)


class _Stopwatch:
    """Appends one record a call; a killed engine leaves all that ended before."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - for the engine's life
        self._schedstat: int | None = None

    def time(self, kind: float, call: Callable[..., T], *args: Any) -> T:
        delayed, began = self._delay_s(), time.monotonic()
        try:
            return call(*args)
        finally:
            took, delay = time.monotonic() - began, self._delay_s() - delayed
            self._file.write(np.array([kind, began, took, delay]).tobytes())

    def _delay_s(self) -> float:
        """Return how long this thread has waited for a core; it is always the same thread."""
        if self._schedstat is None:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        return int(os.pread(self._schedstat, 128, 0).split()[1]) / 1e9
