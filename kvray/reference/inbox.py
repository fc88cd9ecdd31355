"""Where callers' threads and the executor's meet: requests and cancellations in, results out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from kvray.errors import KVRayError
from kvray.reference.intake import Orders
from kvray.reference.request import LlmRequest

Listener: TypeAlias = "Callable[[Sequence[int]], None]"
"""Called with the tokens that are new, on the executor's thread: it must neither wait nor raise."""


@dataclass(slots=True)
class _Told:
    """A listener, and how many tokens it has heard of."""

    listener: Listener
    num_tokens: int = 0


class Inbox:
    """Requests that were submitted and the futures of all that have not ended.

    A request crosses to the executor's thread in `take` and its result crosses back through its
    future; nothing else is shared.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._submitted: list[LlmRequest] = []
        self._cancelled: set[int] = set()
        self._futures: dict[int, Future[LlmRequest]] = {}
        self._told: dict[int, _Told] = {}
        self._is_closed = False

    def submit(
        self,
        request: LlmRequest,
        *,
        closed_error: Callable[[], KVRayError],
        listener: Listener | None = None,
    ) -> Future[LlmRequest]:
        """Queue a request; after `stop` raise what `closed_error` makes."""
        future: Future[LlmRequest] = Future()
        request.submitted_at = time.monotonic()
        with self._condition:
            if self._is_closed:
                raise closed_error()
            self._futures[request.request_id] = future
            if listener is not None:
                self._told[request.request_id] = _Told(listener)
            self._submitted.append(request)
            self._condition.notify()
        return future

    def cancel(self, request_id: int) -> None:
        """Note that nobody waits for a request any more; one that has ended stays as it is."""
        with self._condition:
            if request_id in self._futures:
                self._cancelled.add(request_id)
                self._condition.notify()

    def stop(self) -> None:
        """Take nothing more in and tell the executor to stop."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    def take(self, *, has_work: bool, timeout_s: float | None = None) -> Orders:
        """Return what is new, sleeping until there is something unless `has_work`.

        With `timeout_s` it sleeps no longer than that, and may return nothing new.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: has_work or self._submitted or self._is_closed, timeout_s
            )
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, set()
            return Orders(
                submitted=submitted, cancelled=frozenset(cancelled), is_stop=self._is_closed
            )

    def pause(self, timeout_s: float) -> None:
        """Sleep until something comes in, at most so long."""
        with self._condition:
            if not (self._submitted or self._is_closed):
                self._condition.wait(timeout_s)

    def progress(self, requests: Iterable[LlmRequest]) -> None:
        """Tell who listens which tokens requests have by now."""
        if self._told:
            for request in requests:
                self._tell(request)

    def resolve(self, request: LlmRequest) -> None:
        """Hand an ended request back; who listens has heard all its tokens then."""
        self._tell(request)
        self._pop(request).set_result(request)

    def fail(self, request: LlmRequest, error: KVRayError) -> None:
        """Hand the reason back why a request has no answer."""
        self._pop(request).set_exception(error)

    def close(self, make_error: Callable[[], KVRayError]) -> None:
        """Take nothing more in, and fail whatever has not ended."""
        with self._condition:
            self._is_closed = True
            futures, self._futures = list(self._futures.values()), {}
            self._told.clear()
        for future in futures:
            future.set_exception(make_error())

    def _tell(self, request: LlmRequest) -> None:
        told = self._told.get(request.request_id)
        if told is None or len(tokens := request.generated_tokens) == told.num_tokens:
            return
        new, told.num_tokens = tokens[told.num_tokens :], len(tokens)
        told.listener(new)

    def _pop(self, request: LlmRequest) -> Future[LlmRequest]:
        with self._condition:
            self._told.pop(request.request_id, None)
            return self._futures.pop(request.request_id)
