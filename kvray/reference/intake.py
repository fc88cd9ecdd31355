"""Between callers' threads and the executors': requests and cancellations in, results out."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvray.errors import KVRayError
from kvray.reference.output import Call, Listener, Output
from kvray.reference.ranks import Ranks
from kvray.reference.request import LlmRequest

_HEARTBEAT_S = 1.0
"""How often an idle leader meets the others, and notices a dead one."""


@dataclass(slots=True, kw_only=True)
class Orders:
    """News for the executor at the head of an iteration."""

    submitted: list[LlmRequest] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    is_stop: bool = False
    model: str | None = None
    """The checkpoint whose weights the engine gets when its active requests have ended; empty: it
    keeps its own, and only its prefix cache is emptied."""
    is_dummy_due: bool = False
    """Whether others have work and this rank has none: it runs a dummy beside them."""


class Intake:
    """Gives one rank's executor its requests, and hands the results back.

    Callers submit on the leader, whose `take` tells the other ranks, as upstream. With `is_dealt`
    (attention data parallelism) the leader deals the requests round-robin; their owners report
    results at the head of the next iteration, and the leader hands them back. A request crosses to
    the executor's thread in `take`, its result crosses back through its future.
    """

    def __init__(
        self, ranks: Ranks, describe: Callable[[LlmRequest], Output], *, is_dealt: bool = False
    ) -> None:
        self._ranks = ranks
        self._describe = describe
        self._failure: BaseException | None = None
        """Makes the error for those who come too late; the executor knows more."""
        self._is_dealt = is_dealt
        self._condition = threading.Condition()
        self._next = Orders()
        """Those of the next `take`; once they say stop, nothing is taken in any more."""
        self._updated: Future[None] | None = None
        self._calls: dict[int, Call] = {}
        self._reports: list[tuple[LlmRequest, KVRayError | None]] = []

    def submit(self, request: LlmRequest, *, listener: Listener | None = None) -> Call:
        """Queue a request; KVRayError after `stop` or `close`."""
        call = Call(call_id=request.request_id, listener=listener)
        request.submitted_at = time.monotonic()
        with self._changing() as orders:
            self._calls[request.request_id] = call
            orders.submitted.append(request)
        return call

    def cancel(self, request_id: int) -> None:
        """Ask the executor to end a request early; one that has ended stays as it is."""
        with self._condition:
            if request_id in self._calls:
                self._next.cancelled.add(request_id)
                self._condition.notify()

    def update_weights(self, model: str) -> Future[None]:
        """Have the engine take the weights of `model`, see `Orders`; one call at a time."""
        with self._changing() as orders:
            orders.model, self._updated = model, Future()
            return self._updated

    def updated(self, failure: KVRayError | None) -> None:
        """The executor has the new weights, or could not load them."""
        with self._condition:
            if self._updated is not None and failure is not None:
                self._updated.set_exception(failure)
            elif self._updated is not None:
                self._updated.set_result(None)
            self._updated = None

    def stop(self) -> None:
        """Take nothing more in and tell the executor to stop."""
        with self._condition:
            self._next.is_stop = True
            self._condition.notify()

    def take(self, *, has_work: bool) -> Orders:
        """Return this rank's orders, or sleep while no rank has work; KVRayError if a rank died."""
        is_any_busy = has_work
        if self._is_dealt:
            told = self._ranks.allgather((has_work, self._reports))
            self._reports = []
            is_any_busy = any(is_busy for is_busy, _ in told)
            for _, ended in told:
                for request, error in ended:
                    self._settle(request, error)
        is_leader = self._ranks.rank == 0
        orders = self._ranks.broadcast(self._collect(is_any_busy) if is_leader else Orders())
        if not self._is_dealt:
            return orders
        own = [
            request
            for request in orders.submitted
            if (request.request_id - 1) % self._ranks.size == self._ranks.rank
        ]
        is_dummy_due = not (has_work or own) and (is_any_busy or len(orders.submitted) > 0)
        return replace(orders, submitted=own, is_dummy_due=is_dummy_due)

    def pause(self, timeout_s: float) -> None:
        """Sleep until a request arrives, at most `timeout_s`."""
        with self._condition:
            if not (self._next.submitted or self._next.is_stop):
                self._condition.wait(timeout_s)

    def progress(self, requests: Iterable[LlmRequest]) -> None:
        """Give the listeners, which are on the leader, the new tokens of its own requests."""
        for request in requests:
            if not self._is_dealt and (call := self._calls.get(request.request_id)):
                _tell(call, request)

    def end(self, request: LlmRequest, error: KVRayError | None = None) -> None:
        """Hand back an ended request, or the reason why it has no answer."""
        if self._is_dealt:
            # The error goes without its cause, which may not pickle.
            self._reports.append((request, error and KVRayError(str(error))))
        else:
            self._settle(request, error)

    def close(self, failure: BaseException | None) -> None:
        """Take nothing more and fail what has not ended; ranks that wait for this one fail too.

        `failure` is what has ended the engine, if it was not told to stop.
        """
        self._ranks.leave()
        for request, error in self._reports:
            self._settle(request, error)
        with self._condition:
            self._next.is_stop, self._failure = True, failure
            calls, self._calls = list(self._calls.values()), {}
            updated, self._updated = self._updated, None
        for future in [call.future for call in calls] + ([updated] if updated else []):
            future.set_exception(self._closed_error())

    @contextmanager
    def _changing(self) -> Iterator[Orders]:
        """Give the next orders to add to; KVRayError: there are none any more."""
        with self._condition:
            if self._next.is_stop:
                raise self._closed_error()
            yield self._next
            self._condition.notify()

    def _closed_error(self) -> KVRayError:
        failure = self._failure
        if failure is None:
            return KVRayError("The reference engine is closed.")
        error = KVRayError(f"The reference engine is dead: {type(failure).__name__}: {failure}")
        error.__cause__ = failure
        return error

    def _collect(self, has_work: bool) -> Orders:
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    has_work
                    or self._next.submitted
                    or self._next.model is not None
                    or self._next.is_stop
                ),
                None if self._ranks.size == 1 else _HEARTBEAT_S,
            )
            orders, self._next = self._next, Orders(is_stop=self._next.is_stop)
            return orders

    def _settle(self, request: LlmRequest, error: KVRayError | None) -> None:
        with self._condition:
            call = self._calls.pop(request.request_id, None)
        if call is None:
            return  # another rank's copy: its call is on the leader
        if error is not None:
            call.future.set_exception(error)
        else:
            _tell(call, request)
            call.future.set_result(self._describe(request))


def _tell(call: Call, request: LlmRequest) -> None:
    new = request.generated_tokens[call.num_heard :]
    if new and call.listener is not None:
        call.num_heard += len(new)
        call.listener(new)
