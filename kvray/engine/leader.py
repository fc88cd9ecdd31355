"""The leader's half of a connector: matches prompts, promises what is leased, plans each pass.

Everything here runs on the engine's executor thread. Nothing waits longer than the arena's
`lock_wait_s`, except for blocks that the shard stages: at most `stage_wait_s` a request.

`record_answer` counts the outcome of a request, and notes it for `kvray explain`.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvray.engine.meta import ConnectorMeta, Honoured, Promise
from kvray.engine.pass_plan import PassPlanner, Promises
from kvray.engine.prefix_finder import AskAgain, Found, PrefixFinder
from kvray.engine.request import Prompt, RequestState
from kvray.engine.shared_state import SharedState, registered_state
from kvray.identity.block import BlockKey
from kvray.identity.keys import request_seed
from kvray.trace.arrival import Arrivals, runs_between
from kvray.trace.reasons import DropReason, MissReason
from kvray.trace.request_note import RequestNote, sampled

_log = logging.getLogger("kvray.connector")

_STATES_MAX = 8192
"""Requests remembered at once. Cancelled ones end without a call; those unseen for longest go."""


class Leader:
    """Of the requests that one engine schedules."""

    def __init__(
        self, shared: SharedState, *, asks_in_vain: bool = False, unaligned_advice: str = ""
    ) -> None:
        """Take `shared`, which `close` gives back.

        An engine that `asks_in_vain` may ask about a request and then not schedule it; an answer is
        counted only when `count` is called. `unaligned_advice` says what to set if the engine has
        parts of blocks of its own.
        """
        self._own_shared = self.shared = shared
        self.states: OrderedDict[int, RequestState] = OrderedDict()
        self.promises = Promises()
        self.finder = PrefixFinder()
        self._planner = PassPlanner(self.finder)
        self._asks_in_vain = asks_in_vain
        self._uncounted: dict[int, partial[None]] = {}
        """Requests that were answered -> what counts the answer."""
        self._unaligned_advice = unaligned_advice
        self._weights_of: tuple[object, int] | None = None
        """The pool and its `changes` of weights that everything here was asked about with."""
        self._warned_unaligned = False
        self._is_closed = False

    def ask(
        self,
        request_id: int,
        read: Callable[[SharedState], Prompt | None],
        honoured: Honoured | None = None,
    ) -> int | None:
        """Promise what can be loaded of a request; return how many tokens after the engine's own.

        None: the shard has been asked for more, and the engine is to ask again; only where it does
        so. Else that is the longest prefix of the prompt that is leased for every rank. `read`
        returns the request, None if it has no keys; `honoured` tells how many tokens of the offer
        were taken, if the engine may take less. The request is as new from here on.
        """
        if self.finder.is_pending(request_id):
            return None
        began_ns = time.perf_counter_ns()
        if request_id in self.states:
            self.forget(request_id)
        self.promises.forget(request_id)
        try:
            if self.shared.pool.identity.own is None:
                self.shared = registered_state(self.shared)
            self._follow_weights()
            hit, count = self._match(request_id, read(self.shared), honoured)
            if self._asks_in_vain and count is not None:
                self._uncounted[request_id] = count
            elif count is not None:
                count()
            self.shared.figures.match_times.observe(time.perf_counter_ns() - began_ns)
        except Exception as error:  # noqa: BLE001 - as in `Boundary.around`, which costs four calls
            self.shared.boundary.stop("a request", error)
            self.forget(request_id)  # what was not answered is not promised either
            return 0
        return hit

    def count(self, request_id: int) -> None:
        """Count the last answer to a request: it will be computed."""
        count = self._uncounted.pop(request_id, None)
        if count is not None:
            with self.shared.boundary.around("the figures of a request"):
                count()

    def plan(self, reports: Sequence[tuple[Any, bool]]) -> ConnectorMeta:
        """Return what the ranks load before and save after the coming pass.

        `reports` are of its requests, each with whether the engine calls it new; their fields are
        those of `request.report`. LayoutMismatch, LeaseExpired: a promise has no place to go, or
        its lease has ended. The engine counts on it and cannot be told, so it must not go on.
        """
        began_ns = time.perf_counter_ns()
        shared = self.shared
        self._follow_weights()
        plan = self._planner.begin(shared)
        self._measure(reports)
        for report, is_new in reports:
            state = self.states.get(report.request_id)
            if is_new or state is None or not state.is_reported:
                self.promises.check(shared, report.request_id, report.computed_position)
            if state is None:
                continue
            self.states.move_to_end(report.request_id)
            if state.promise is not None:
                plan.add_load(state, report, self.promises.take(state), is_new=is_new)
                continue
            with shared.boundary.around("a save"):
                plan.add(state, report, is_new=is_new)
                continue
            self.forget(report.request_id)
        self.promises.settle(shared)
        meta = plan.finish()
        shared.figures.plan_times.observe(time.perf_counter_ns() - began_ns)
        return meta

    def finish(self, request_id: int) -> bool:
        """Return whether a save still reads the blocks of the finished request; twice is fine."""
        self.reset(request_id)
        self.finder.forget(request_id)
        is_read = self.shared.is_being_read(request_id)
        if is_read:
            self.pin(request_id)
        return is_read

    def pin(self, request_id: int) -> None:
        """Note that the engine keeps the blocks of a finished request until they were read."""
        self._planner.pin(request_id)

    def reset(self, request_id: int) -> None:
        """Forget a request whose blocks were taken away, or whose promise is to be replaced."""
        self.forget(request_id)
        self.promises.forget(request_id)

    def cancel(self, request_id: int, start: int, end: int) -> None:
        """Keep less than was promised: the engine will not use the tokens from `start` to `end`."""
        state = self.states.get(request_id)
        if state is None or state.promise is None:
            return
        state.promise.cancel(start, end, state.tokens_per_block)
        if not state.promise.num_blocks:
            self.promises.release(self.shared, state)

    def decline(self, request_id: int, reason: MissReason | None = None) -> None:
        """Release what a request was promised: the engine takes nothing of it.

        `reason`: why what was promised is missed after all.
        """
        state, count = self.states.get(request_id), self._uncounted.get(request_id)
        if state is not None:
            self.promises.release(self.shared, state)
        if reason is not None and count is not None:
            self._uncounted[request_id] = partial(count, reason=reason)

    def offer_again(self, request_id: int, num_computed: int, *, end: int) -> int:
        """Renew an offer that was not taken; return how many tokens after the engine's own it is.

        The engine has `num_computed` tokens itself by now, no fewer than when it was first made.
        Only the blocks before `end` can be loaded: what follows them proved wrong.
        """
        state, count = self.states.get(request_id), self._uncounted.get(request_id)
        if state is None or state.promise is None:
            return 0
        promise, size = state.promise, state.tokens_per_block
        changes: dict[str, Any] = {}
        if end < promise.end:
            promise.end = end
            state.num_found, state.num_saved = min(state.num_found, end), min(state.num_saved, end)
            changes["reason"] = "corrupt"
        promise.first = min(num_computed // size, promise.end)
        if count is not None:
            asked = count.keywords["asked"]._replace(num_computed=num_computed)
            self._uncounted[request_id] = partial(count, asked=asked, **changes)
        return promise.num_blocks * size

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request, and its promise; what it has not saved is lost."""
        state = self.states.pop(request_id, None)
        self._uncounted.pop(request_id, None)
        if state is not None:
            self.promises.release(self.shared, state)
            if state.is_reported:  # else it may be asked about again
                self.shared.figures.log.prompts.note(state.keys, *state.asked)
            is_down = self.shared.link.arena is None
            reason = DropReason.STORE_DOWN if is_down else DropReason.NO_PAGE
            self.shared.figures.dropped.count(state.num_full - state.num_saved, reason)

    def close(self) -> None:
        """Release what is promised and let go of the tier. Twice is fine."""
        for request_id in list(self.states):
            self.forget(request_id)
        if not self._is_closed:
            self._is_closed = True
            self.finder.close()
            self._own_shared.close()

    def _follow_weights(self) -> None:
        """Store nothing more of requests that were asked about before the weights changed.

        Keys and blocks of theirs are of the weights before; those of later passes are of the new
        ones, or of both. What such a request was promised is loaded all the same: the engine counts
        on it as on its own blocks, which a change leaves to requests in flight, too.
        """
        pool = self.shared.pool
        pool.complete_namespace()
        before, self._weights_of = self._weights_of, (pool, pool.identity.weights[0])
        if before == self._weights_of:
            return
        for request_id, state in list(self.states.items()):
            if state.promise is None:
                self.forget(request_id)
            else:
                state.is_unsaved = True

    def _match(
        self, request_id: int, asked: Prompt | None, honoured: Honoured | None
    ) -> tuple[int | None, partial[None] | None]:
        """Promise what can be loaded of a prompt; return how many tokens it is, and what counts it.

        Neither: the shard has been asked.
        """
        shared = self.shared
        if asked is None:
            return 0, partial(record_bypassed, shared, request_id)
        if not shared.pool.identity.digest:
            unnamed = Found(reason=shared.pool.unnamed)
            return 0, partial(record_answer, shared, asked=asked, found=unnamed)
        state = self._remember(asked)
        num_askable = asked.num_askable(state.tokens_per_block)
        keys = state.prompt_keys(asked.tokens)[:num_askable]
        first = asked.num_computed // state.tokens_per_block
        state.asked = len(asked.tokens), len(keys), first
        if asked.is_unread:
            found = Found(reason="skipped")
        elif asked.num_computed % state.tokens_per_block:
            self._warn_unaligned(asked.num_computed)
            found = Found(reason="unaligned")
        else:
            try:
                found = self.finder.find(shared, asked, keys)
            except AskAgain:
                self.forget(request_id)
                return None, None
        lease = found.lease
        # A corrupt block, and what follows it, is saved again once it is computed. So is what is
        # loaded from an engine with another number of ranks.
        state.num_found = state.num_saved = found.num_stored
        num_blocks = 0
        if lease is not None:
            state.arrivals, num_blocks = lease.arrivals, max(0, lease.end - first)
            if num_blocks:
                promise = Promise(lease=lease, first=first, end=lease.end, honoured=honoured)
                self.promises.keep(state, promise)
            else:
                shared.release_prefix(lease)
        count = partial(record_answer, shared, asked=asked, found=found, state=state)
        return num_blocks * state.tokens_per_block, count

    def _remember(self, asked: Prompt) -> RequestState:
        shared, identity = self.shared, asked.identity
        size, seed = shared.args.tokens_per_block, shared.pool.identity.digest
        is_plain = identity.salt is None and identity.lora is None and not identity.media
        state = RequestState(
            request_id=asked.request_id,
            namespace=seed,
            seed=request_seed(seed, salt=identity.salt, lora=identity.lora),
            tokens_per_block=size,
            media=identity.media,
            tenant_id=identity.tenant_id,
            block_tokens=shared.figures.log.block_tokens if is_plain else None,
            windowed=shared.pool.identity.windowed,
            savable_blocks=asked.prompt_len // size if shared.args.drafts_tokens else None,
        )
        self.states[asked.request_id] = state
        if len(self.states) > _STATES_MAX:
            self._drop_oldest()
        return state

    def _measure(self, reports: Sequence[tuple[Any, bool]]) -> None:
        """Keep the engine's speed up to date, where it decides anything."""
        if self.shared.may_stage:
            with self.shared.boundary.around("the speed of prefill"):
                num_tokens = sum(report.num_scheduled_tokens for report, _ in reports)
                requests = {report.request_id for report, _ in reports}
                self.finder.rate.plan(requests, num_tokens, time.monotonic())

    def _drop_oldest(self) -> None:
        """Forget the request unseen for longest that the engine does not wait for."""
        for request_id, state in self.states.items():
            if state.promise is None:
                self.forget(request_id)
                return

    def _warn_unaligned(self, num_computed_tokens: int) -> None:
        if not self._warned_unaligned:
            self._warned_unaligned = True
            _log.warning(
                "kvray: the engine has %d tokens of a prompt, which is no whole number of blocks;"
                " such requests load nothing.%s",
                num_computed_tokens,
                self._unaligned_advice,
            )


def record_answer(
    shared: SharedState,
    *,
    asked: Prompt,
    found: Found,
    state: RequestState | None = None,
    reason: MissReason | None = None,
) -> None:
    """Record a request that was just answered with what was `found`.

    `reason` says why it has no more after all. A request that came before its model had a name has
    no state: nothing was looked up.
    """
    reason = reason or found.reason
    totals, size = shared.figures.totals, shared.args.tokens_per_block
    first = asked.num_computed // size
    wanted = asked.num_askable(size) if state is None else state.asked[1]
    end, hit = min(first, wanted), 0
    arrivals: Arrivals = ()
    step = 1
    missing: tuple[BlockKey, ...] = ()
    promise = None if state is None else state.promise
    if state is not None and promise is not None:
        end, hit = promise.end, (promise.end - promise.first) * size
        if promise.lease.stored_by != shared.args.num_parts_ranks:
            totals["resliced_tokens"] += hit
        for start, stop, way, _ in runs_between(state.arrivals, promise.first, end):
            totals[f"hit_tokens_from_{way}"] += (stop - start) * size
    missed = wanted * size - asked.num_computed - hit
    totals["requests"] += 1
    totals["prompt_tokens"] += len(asked.tokens)
    totals["local_tokens"] += asked.num_computed
    totals["hit_tokens"] += hit
    if missed > 0:
        totals[f"miss_tokens_{reason}"] += missed
    if state is not None and wanted:
        arrivals = state.arrivals
        if end < wanted:
            step, missing = sampled(state.keys[:wanted], end)
    shared.figures.log.requests.note(
        RequestNote(
            request_id=asked.request_id,
            at=time.time(),
            num_tokens=len(asked.tokens),
            tokens_per_block=size,
            first=first,
            end=end,
            wanted=wanted,
            reason=reason if end < wanted else "none",
            arrivals=arrivals,
            stage_s=found.stage_s,
            lease_s=found.lease_s,
            step=step,
            keys=missing,
        )
    )


def record_bypassed(shared: SharedState, request_id: int) -> None:
    """Record a request that has no keys, and so nothing to find."""
    shared.figures.totals["bypassed_requests"] += 1
    size = shared.args.tokens_per_block
    shared.figures.log.requests.note(
        RequestNote(request_id, time.time(), 0, size, 0, 0, 0, "bypassed")
    )
