"""Plans one pass: promised blocks to load before it, full blocks to save after it.

`Promises` are those of one engine: kept while it may claim them, then released and remembered as
lost. An engine cannot be told that a promise is taken back. A promise that is used becomes a load.
Any other is released: if the engine counts on it after all, it must be stopped.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvray.engine.meta import ConnectorMeta, LoadPlan, PageIds, Promise, SavePlan
from kvray.engine.prefix_finder import PrefixFinder
from kvray.engine.request import RequestState, read_priorities
from kvray.engine.shared_state import SharedState
from kvray.errors import LeaseExpired
from kvray.trace.reasons import DropReason

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


class PassPlanner:
    """Plans pass after pass for one engine; used by its executor thread."""

    def __init__(self, finder: PrefixFinder) -> None:
        self._finder = finder
        self._loads: list[LoadPlan] = []
        self._saves: list[SavePlan] = []
        self._unfenced: set[int] = set()
        """Requests whose pages may still be read, and that were in every pass since."""
        self._scheduled: set[int] = set()

    def begin(self, shared: SharedState) -> "PassPlanner":
        """Begin the plan of the coming pass."""
        self._shared = shared
        self._loads, self._saves = [], []
        self._scheduled.clear()
        return self

    def pin(self, request_id: int) -> None:
        """Note that the engine keeps the pages of a finished request until they were read."""
        self._unfenced.discard(request_id)

    def add_load(self, state: RequestState, report: Any, promise: Promise, *, is_new: bool) -> None:
        """Plan a request that was promised blocks and is scheduled for the first time.

        The engine may not call it new, see `RequestState.extend`. LayoutMismatch, LeaseExpired: the
        promise cannot be kept; the engine must not go on.
        """
        shared, tokens_per_block = self._shared, state.tokens_per_block
        try:
            self._extend(state, report, is_new=is_new)
            taken, is_sure = promise.taken(
                report.computed_position, tokens_per_block, is_exact=shared.pool.identity.is_flat
            )
            if taken:
                promise = self._narrow(state, promise, taken)
                pages = state.load_pages(promise.first, promise.first + taken)
                load = LoadPlan(
                    request_id=state.request_id,
                    leased=promise.lease.leased(),
                    leased_blocks=promise.lease.num_blocks,
                    first=promise.first,
                    pages=tuple(map(PageIds.of, pages)),
                    stored_by=promise.lease.stored_by,
                )
        except BaseException:
            shared.release_prefix(promise.lease)
            raise
        if taken:
            self._loads.append(load)
        else:
            shared.release_prefix(promise.lease)
        start = report.computed_position
        if is_sure:
            start += taken * tokens_per_block
        with shared.boundary.around("a save"):
            self._save(state, start + report.num_scheduled_tokens)

    def add(self, state: RequestState, report: Any, *, is_new: bool) -> None:
        """Plan any other request."""
        self._extend(state, report, is_new=is_new)
        state.rewind(report.computed_position)
        self._save(state, report.computed_position + report.num_scheduled_tokens)

    def finish(self) -> ConnectorMeta:
        """Return the metadata of the pass."""
        shared = self._shared
        is_fenced = bool(self._unfenced - self._scheduled) or shared.pool.identity.has_windows
        if is_fenced:
            self._unfenced.clear()
        self._unfenced.update(plan.request_id for plan in self._saves)
        releases = tuple(shared.to_release)
        shared.to_release.clear()
        name = shared.pool.model_name
        return ConnectorMeta(
            namespace=shared.pool.identity.common,
            loads=tuple(self._loads),
            saves=tuple(self._saves),
            releases=releases,
            is_fenced=is_fenced,
            replica=shared.pool.replica,
            model=name.name if self._loads and not name.is_given else "",
            number=shared.pool.own.number if self._saves else 0,
        )

    def _extend(self, state: RequestState, report: Any, *, is_new: bool) -> None:
        if not is_new:
            self._scheduled.add(state.request_id)  # a replayed request has lost its pages
        pages = _pages(report, len(state.windowed))
        state.extend(report.new_tokens, pages, new=is_new, priorities=read_priorities(report))

    def _narrow(self, state: RequestState, promise: Promise, taken: int) -> Promise:
        """Return a promise whose leases have what the first `taken` blocks of the offer need."""
        end = promise.first + taken
        if end == promise.lease.num_blocks or not self._shared.pool.identity.has_windows:
            return promise
        prefix = self._finder.narrow(self._shared, promise.lease, state.keys_until(end))
        if prefix is None:
            raise LeaseExpired(
                f"The engine took {taken} of {promise.num_blocks} blocks offered for request"
                f" {state.request_id}, whose last window is not in the tier."
            )
        self._shared.release_prefix(promise.lease)
        promise.lease = prefix
        return promise

    def _save(self, state: RequestState, computed_tokens: int) -> None:
        """Plan the blocks that are full after the pass and not saved yet."""
        first, end = state.num_saved, state.savable(computed_tokens)
        if end == first:
            return
        if self._shared.link.arena is None:
            # The blocks stay as they are, the next pass may save them. But pages that a window has
            # passed are given to others by then, and no report says so.
            if any(state.windowed):
                self._shared.figures.dropped.count(end - first, DropReason.STORE_DOWN)
                state.num_saved = end
            return
        before = 1 if first else 0
        self._saves.append(
            SavePlan(
                request_id=state.request_id,
                depth=first,
                keys=b"".join(state.keys_until(end)[first - before :]),
                pages=tuple(PageIds.of(group[first:end]) for group in state.pages),
                priorities=state.priorities.of(first, end),
                tenant_id=state.tenant_id,
            )
        )
        state.num_saved = end


def _pages(report: Any, num_groups: int) -> Sequence[Sequence[int]]:
    """Return the report's new pages, one list a layer group.

    Source: `new_block_ids_by_layer_group`, a list, in some branches a mapping; empty, or not
    there, where there is one flat space, which `new_block_ids` has.
    """
    by_group = getattr(report, "new_block_ids_by_layer_group", None)
    if not by_group:
        flat: Sequence[int] = report.new_block_ids or ()
        return (flat, *((),) * (num_groups - 1))
    if isinstance(by_group, dict):
        return [by_group.get(group, ()) for group in range(num_groups)]
    return list(by_group)
