"""How requests reach the executors of several ranks, in step.

Source: TensorRT-LLM's leader tells all ranks at the head of each iteration what is new, cancelled
or over; everything after that follows from it, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from kvray.errors import KVRayError
from kvray.reference.inbox import Inbox
from kvray.reference.intake import Orders
from kvray.reference.ranks import Ranks
from kvray.reference.request import LlmRequest

_HEARTBEAT_S = 1.0
"""How often an idle leader lets the others hear of it, and notices one that is dead."""


class SharedIntake:
    """Tensor parallelism: every rank runs every request, and the leader hands the results back.

    `inbox` is None but on the leader.
    """

    def __init__(self, ranks: Ranks, inbox: Inbox | None) -> None:
        self._ranks = ranks
        self._inbox = inbox

    def take(self, *, has_work: bool) -> Orders:
        """Return the leader's orders.

        Raises:
            KVRayError: another rank has died or is late.
        """
        orders = Orders()
        if self._inbox is not None:
            orders = self._inbox.take(has_work=has_work, timeout_s=_HEARTBEAT_S)
        return self._ranks.broadcast(orders)

    def pause(self, timeout_s: float) -> None:
        """Sleep on the leader, for which the others wait."""
        if self._inbox is not None:
            self._inbox.pause(timeout_s)

    def progress(self, requests: Iterable[LlmRequest]) -> None:
        """Tell the leader's listeners, who hear of every request here."""
        if self._inbox is not None:
            self._inbox.progress(requests)

    def resolve(self, request: LlmRequest) -> None:
        """Hand an ended request back; the other ranks' copies of it end here."""
        if self._inbox is not None:
            self._inbox.resolve(request)

    def fail(self, request: LlmRequest, error: KVRayError) -> None:
        """Hand the reason back why a request has no answer."""
        if self._inbox is not None:
            self._inbox.fail(request, error)

    def close(self, make_error: Callable[[], KVRayError]) -> None:
        """Take nothing more and fail what has not ended; ranks that wait for this one fail too."""
        self._ranks.leave()
        if self._inbox is not None:
            self._inbox.close(make_error)


class DealtIntake:
    """Attention data parallelism: each rank runs its own requests, dealt round-robin.

    The leader hands results back that the owners report at the head of the next iteration.
    """

    def __init__(self, ranks: Ranks, inbox: Inbox | None) -> None:
        self._ranks = ranks
        self._inbox = inbox
        self._ended: list[tuple[LlmRequest, str | None]] = []

    def take(self, *, has_work: bool) -> Orders:
        """Return the orders for this rank's own requests.

        Raises:
            KVRayError: another rank has died or is late.
        """
        reports = self._ranks.allgather((has_work, self._ended))
        self._ended = []
        orders, is_any_busy = Orders(), any(is_busy for is_busy, _ in reports)
        if self._inbox is not None:
            for _, ended in reports:
                _settle(self._inbox, ended)
            orders = self._inbox.take(has_work=is_any_busy, timeout_s=_HEARTBEAT_S)
        orders = self._ranks.broadcast(orders)
        own = [request for request in orders.submitted if self._owner(request) == self._ranks.rank]
        is_idle = not has_work and not own
        return replace(
            orders,
            submitted=own,
            is_dummy_due=is_idle and (is_any_busy or len(orders.submitted) > 0),
        )

    def pause(self, timeout_s: float) -> None:
        """Sleep on the leader, for which the others wait."""
        if self._inbox is not None:
            self._inbox.pause(timeout_s)

    def progress(self, requests: Iterable[LlmRequest]) -> None:
        """Tell nobody: listeners are on the leader, and hear all when the owner reports the end."""

    def resolve(self, request: LlmRequest) -> None:
        """Hand an ended request back with the next report."""
        self._ended.append((request, None))

    def fail(self, request: LlmRequest, error: KVRayError) -> None:
        """Hand the reason back with the next report."""
        self._ended.append((request, str(error)))

    def close(self, make_error: Callable[[], KVRayError]) -> None:
        """Take nothing more and fail what has not ended; ranks that wait for this one fail too."""
        self._ranks.leave()
        if self._inbox is not None:
            _settle(self._inbox, self._ended)
            self._inbox.close(make_error)

    def _owner(self, request: LlmRequest) -> int:
        return (request.request_id - 1) % self._ranks.size


def _settle(inbox: Inbox, ended: list[tuple[LlmRequest, str | None]]) -> None:
    for request, failure in ended:
        if failure is None:
            inbox.resolve(request)
        else:
            inbox.fail(request, KVRayError(failure))
