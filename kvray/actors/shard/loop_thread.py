"""An event loop in a thread of its own, and how other threads call what belongs to it."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from kvray.errors import ShardUnavailable

T = TypeVar("T")

ANSWER_S = 2.0  # how long the event loop may take to get to a call


class LoopThread:
    """Runs one coroutine to its end; until then other threads may call what belongs to the loop."""

    def __init__(
        self,
        owner: str,
        main: Callable[[], Coroutine[Any, Any, None]],
        ended: Callable[[Exception | None], None],
    ) -> None:
        """Run `main` once started; `ended` gets what it raised, in the thread."""
        self._owner = owner
        self._main = main
        self._ended = ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=owner, daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether it has begun and is not over."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end, and return whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, function: Callable[[], object]) -> None:
        """Have the loop run `function` soon, if it is not over."""
        with contextlib.suppress(RuntimeError):  # it has just ended by itself
            self._require_loop().call_soon_threadsafe(function)

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Return what `function` returns on the loop; otherwise as `wait`."""

        async def work() -> T:
            return function()

        return self.wait(work(), timeout_s)

    def wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return what `work` returns on the loop, or raise its error.

        ShardUnavailable: it took too long, and is cancelled; or the loop is over.
        """
        future = None
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._require_loop())
            return future.result(timeout_s)
        except (RuntimeError, FutureTimeoutError, CancelledError):
            if future is not None:
                future.cancel()
            if future is None or not self.is_alive():
                work.close()  # the loop has ended; nobody else will
            raise ShardUnavailable(
                f"{self._owner} did not answer within {timeout_s:.0f} s; see `kvray status`."
            ) from None

    def _require_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ShardUnavailable(f"{self._owner} was not started.")
        return self._loop

    def _run(self) -> None:
        loop = self._require_loop()
        asyncio.set_event_loop(loop)
        failure = None
        try:
            loop.run_until_complete(self._main())
        except Exception as error:  # noqa: BLE001 - the thread's end, which its owner acts upon
            failure = error
        finally:
            self._ended(failure)
            loop.run_until_complete(_end_others())
            loop.close()


async def _end_others() -> None:
    """Cancel what other threads wait for: their calls came as the loop ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def pause(until: asyncio.Event, seconds: float) -> None:
    """Wait for `seconds`, but not longer than `until` is set."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(until.wait(), seconds)
