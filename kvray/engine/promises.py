"""All promises of one engine: kept while it may claim them, then released and remembered as lost.

An engine cannot be told that a promise is taken back. A promise that is used becomes a load. Any
other is released and remembered as lost: if the engine counts on it after all, it must be stopped.
"""

import threading
import time
from collections import OrderedDict

from kvray.engine.promise import Promise
from kvray.engine.request.state import RequestState
from kvray.engine.shared_state import SharedState
from kvray.errors import LeaseExpired

_LOST_MAX = 65_536
"""Requests remembered whose promise was given up; those of longest ago are forgotten."""

_CLOSE_S = 5.0


class Promises:
    """The requests that have a promise; used by the engine's executor thread.

    What crosses threads: `_parked`, guarded by the lock. A parked request may be cancelled without
    a word, and an idle engine makes no pass that could give its promise up, so a thread does that.
    Whichever thread takes a promise out of `_parked` ends its leases: the executor's thread after
    loading from them, or the watching thread, after which nothing can load from them.
    """

    def __init__(self) -> None:
        self._states: dict[int, RequestState] = {}
        self._lost: OrderedDict[int, int] = OrderedDict()
        """Requests whose promise was given up -> their own blocks, as far as they may still go."""
        self._lock = threading.Lock()
        self._parked: dict[int, tuple[SharedState, Promise]] = {}
        self._watcher: threading.Thread | None = None
        self._closing = threading.Event()

    def keep(self, shared: SharedState, state: RequestState, promise: Promise) -> None:
        """Take a promise in; from now on it is taken or released."""
        state.promise = promise
        self._states[state.request_id] = state
        if promise.is_parked:
            promise.heard_at = time.monotonic()
            shared.parked[state.request_id] = promise
            with self._lock:
                self._parked[state.request_id] = shared, promise
                if self._watcher is None or not self._watcher.is_alive():
                    self._watcher = threading.Thread(
                        target=self._watch, name="kvray-promises", daemon=True
                    )
                    self._watcher.start()

    def take(self, shared: SharedState, state: RequestState) -> Promise:
        """Hand a promise over to the caller, who ends its leases; LeaseExpired: they have ended."""
        promise = self._take(shared, state)
        if promise is None:
            raise _given_up(state.request_id)
        return promise

    def release(self, shared: SharedState, state: RequestState) -> None:
        """Give up what a request was promised, if it was anything."""
        if state.promise is not None:
            promise = self._take(shared, state)
            if promise is not None:
                shared.release_prefix(promise.prefix)

    def forget(self, request_id: int) -> None:
        """The request has ended, or starts over: nothing of it is lost any more."""
        self._lost.pop(request_id, None)

    def check(self, shared: SharedState, request_id: int, position: int) -> None:
        """Raise LeaseExpired if a first report's position counts on what was given up."""
        state = self._states.get(request_id)
        if state is not None and state.promise is not None and state.promise.is_given_up:
            self._lose(shared, state)
        first = self._lost.pop(request_id, None)
        if first is not None and position > first * shared.args.tokens_per_block:
            raise _given_up(request_id)

    def settle(self, shared: SharedState) -> None:
        """Release promises that the pass did not use, unless the engine may still claim them.

        It may if the request is parked, or if the runtime itself says what it will not use.
        """
        for state in list(self._states.values()):
            promise = state.promise
            assert promise is not None, "only requests with a promise are in the list"
            is_awaited = promise.is_parked or shared.args.takes_offers_later
            if promise.is_given_up or not is_awaited:
                self._lose(shared, state)

    def close(self) -> None:
        """End the thread; all promises have been released. Twice is fine."""
        self._closing.set()
        with self._lock:
            watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.join(_CLOSE_S)

    def _lose(self, shared: SharedState, state: RequestState) -> None:
        assert state.promise is not None, "the caller has looked"
        self._lost[state.request_id] = state.promise.first
        if len(self._lost) > _LOST_MAX:
            self._lost.popitem(last=False)
        self.release(shared, state)

    def _take(self, shared: SharedState, state: RequestState) -> Promise | None:
        """Take a promise out; None if its leases have ended by time."""
        promise, state.promise = state.promise, None
        assert promise is not None, "the caller has looked"
        del self._states[state.request_id]
        shared.parked.pop(state.request_id, None)
        with self._lock:
            self._parked.pop(state.request_id, None)
            return None if promise.is_given_up else promise

    def _watch(self) -> None:
        """Give up late promises until none is parked; runs in a thread of its own."""
        wait_s: float | None = 0.0
        while wait_s is not None and not self._closing.wait(wait_s):
            wait_s = self._give_up_late()

    def _give_up_late(self) -> float | None:
        """End leases that nobody asks about; return when to look again, None if never."""
        now, late, left_s = time.monotonic(), list[tuple[SharedState, Promise]](), list[float]()
        with self._lock:
            for request_id, (shared, promise) in list(self._parked.items()):
                left_s.append(promise.heard_at + shared.config.connector.park_lease_s - now)
                if left_s[-1] <= 0:
                    promise.is_given_up = True
                    late.append(self._parked.pop(request_id))
            if not self._parked:
                self._watcher = None  # whoever parks next starts another
        for shared, promise in late:
            shared.release_prefix(promise.prefix)
        return min((one for one in left_s if one > 0), default=None)


def _given_up(request_id: int) -> LeaseExpired:
    return LeaseExpired(
        f"Request {request_id} comes back for tokens that were promised to it, but their lease has"
        " been given up; raise connector.park_lease_s if it was parked for long."
    )
