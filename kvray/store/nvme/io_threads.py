"""Runs several transfers at a time: as many as there are threads, without a queue."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

Task = Callable[[], None]


class IoThreads:
    """A fixed number of threads; each caller of `run` works too, and several may call at once."""

    def __init__(self, num_threads: int) -> None:
        """Use `num_threads` threads, of which the caller is one."""
        self.num_threads = num_threads
        self._num_helpers = max(0, num_threads - 1)
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), "kvray-nvme")

    def run(self, tasks: Sequence[Task]) -> None:
        """Do all `tasks`, in any order; return when all of them have ended.

        At most `num_threads` tasks of a caller run at once. After the first failure none begins.

        Raises:
            Exception: the error of the first task that failed.
        """
        turns = iter(tasks)
        helpers = []
        # What crosses: `turns`, of which each thread takes the next.
        with contextlib.suppress(RuntimeError):  # closed meanwhile: the caller goes on alone
            for _ in range(min(self._num_helpers, len(tasks) - 1)):
                helpers.append(self._helpers.submit(_take_turns, turns))
        try:
            _take_turns(turns)
        finally:
            # Also after an error: tasks that others have begun still use the caller's memory.
            ended = [one for one in helpers if not one.cancel()]
            errors = [error for one in ended if (error := one.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the threads after what is under way. Twice is fine."""
        self._helpers.shutdown()


def _take_turns(turns: Iterator[Task]) -> None:
    try:
        for task in turns:
            task()
    except BaseException:
        for _ in turns:
            pass
        raise
