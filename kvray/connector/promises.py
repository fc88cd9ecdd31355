"""All promises of one engine: kept while it may come for them, released, remembered as lost.

TensorRT-LLM has no way to take a promise back. One that was used is a load. One that was not is
released, and remembered as lost: should the engine come to count on it all the same, the only
right thing left is to stop it.
"""

import time
from collections import OrderedDict

from kvray.connector.engine import Engine, release_prefix
from kvray.connector.promise import Promise
from kvray.connector.request_state import RequestState
from kvray.errors import LeaseExpired

_LOST_MAX = 65_536
"""Requests remembered whose promise was given up; those of longest ago are forgotten."""


class Promises:
    """The requests that have a promise; used by the engine's executor thread."""

    def __init__(self) -> None:
        """Start with none."""
        self._states: dict[int, RequestState] = {}
        self._lost = Lost()

    def keep(self, engine: Engine, state: RequestState, promise: Promise) -> None:
        """Take a promise in; from now on it is taken or released."""
        state.promise = promise
        self._states[state.request_id] = state
        if promise.is_parked:
            engine.told[state.request_id] = False

    def take(self, engine: Engine, state: RequestState) -> Promise:
        """Hand the promise of a request over to the caller, who ends its leases."""
        promise, state.promise = state.promise, None
        assert promise is not None, "the caller has looked"
        del self._states[state.request_id]
        engine.told.pop(state.request_id, None)
        return promise

    def release(self, engine: Engine, state: RequestState) -> None:
        """Give up what a request was promised, if it was anything."""
        if state.promise is not None:
            release_prefix(engine, self.take(engine, state).prefix)

    def forget(self, request_id: int) -> None:
        """The request has ended, or begins anew: nothing of it is lost any more."""
        self._lost.forget(request_id)

    def check(self, request_id: int, position: int, tokens_per_block: int) -> None:
        """See `Lost.check`."""
        self._lost.check(request_id, position, tokens_per_block)

    def settle(self, engine: Engine) -> None:
        """Release what the pass did not use, but for what the engine may still come for.

        That is what a parked request waits for, until the engine was told that it may go on and
        `park_lease_s` longer; and every offer of a runtime that says itself what it will not use.
        """
        if not self._states:
            return
        now = time.monotonic()
        for state in list(self._states.values()):
            promise = state.promise
            assert promise is not None, "only requests with a promise are in the list"
            if promise.is_parked:
                if promise.expires_at is None and engine.was_told(state.request_id):
                    promise.expires_at = now + engine.config.connector.park_lease_s
                if promise.expires_at is None or now < promise.expires_at:
                    continue
            elif engine.takes_offers_later:
                continue
            self._lost.note(state.request_id, promise.first)
            self.release(engine, state)


class Lost:
    """Requests whose promise was given up, and how far each may still go without it."""

    def __init__(self) -> None:
        """Start with none."""
        self._blocks: OrderedDict[int, int] = OrderedDict()

    def note(self, request_id: int, first: int) -> None:
        """Remember that nothing after the first `first` blocks is promised any more."""
        self._blocks[request_id] = first
        if len(self._blocks) > _LOST_MAX:
            self._blocks.popitem(last=False)

    def forget(self, request_id: int) -> None:
        """The request was asked about anew, or has ended."""
        self._blocks.pop(request_id, None)

    def check(self, request_id: int, position: int, tokens_per_block: int) -> None:
        """Let a first report pass that stands where the engine is without the promise.

        Raises:
            LeaseExpired: the engine counts on what was given up.
        """
        first = self._blocks.pop(request_id, None)
        if first is not None and position > first * tokens_per_block:
            raise LeaseExpired(
                f"Request {request_id} comes back for tokens that were promised to it, but their"
                " lease has been given up; raise connector.park_lease_s if it was parked for long."
            )
