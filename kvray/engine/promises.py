"""All promises of one engine: kept while it may claim them, then released and remembered as lost.

An engine cannot be told that a promise is taken back. A promise that is used becomes a load. Any
other is released and remembered as lost: if the engine counts on it after all, it must be stopped.
"""

from collections import OrderedDict

from kvray.engine.meta import Promise
from kvray.engine.request import RequestState
from kvray.engine.shared_state import SharedState
from kvray.errors import LeaseExpired

_LOST_MAX = 65_536
"""Requests remembered whose promise was given up; those of longest ago are forgotten."""


class Promises:
    """The requests that have a promise; used by the engine's executor thread."""

    def __init__(self) -> None:
        self._states: dict[int, RequestState] = {}
        self._lost: OrderedDict[int, int] = OrderedDict()
        """Requests whose promise was given up -> their own blocks, as far as they may still go."""

    def keep(self, state: RequestState, promise: Promise) -> None:
        """Take a promise in; from now on it is taken or released."""
        state.promise = promise
        self._states[state.request_id] = state

    def take(self, state: RequestState) -> Promise:
        """Hand a promise over to the caller, who ends its leases."""
        promise, state.promise = state.promise, None
        assert promise is not None, "the caller has looked"
        del self._states[state.request_id]
        return promise

    def release(self, shared: SharedState, state: RequestState) -> None:
        """Give up what a request was promised, if it was anything."""
        if state.promise is not None:
            shared.release_prefix(self.take(state).lease)

    def forget(self, request_id: int) -> None:
        """The request has ended, or starts over: nothing of it is lost any more."""
        self._lost.pop(request_id, None)

    def check(self, shared: SharedState, request_id: int, position: int) -> None:
        """Raise LeaseExpired if a first report's position counts on what was given up."""
        first = self._lost.pop(request_id, None)
        if first is not None and position > first * shared.args.tokens_per_block:
            raise LeaseExpired(
                f"Request {request_id} comes back for tokens that were promised to it for an"
                " earlier pass, and whose lease has ended; report this with TensorRT-LLM's version."
            )

    def settle(self, shared: SharedState) -> None:
        """Release promises that the pass did not use, unless the engine may still claim them.

        It may if the runtime itself says what it will not use.
        """
        for state in () if shared.args.takes_offers_later else list(self._states.values()):
            self._lose(shared, state)

    def _lose(self, shared: SharedState, state: RequestState) -> None:
        assert state.promise is not None, "the caller has looked"
        self._lost[state.request_id] = state.promise.first
        if len(self._lost) > _LOST_MAX:
            self._lost.popitem(last=False)
        self.release(shared, state)
