"""The leader's half of a connector: matches prompts, promises what is leased, plans each pass.

Everything here runs on the engine's executor thread. Nothing waits longer than the arena's
`lock_wait_s`, except for blocks that the shard stages: at most `stage_wait_s` a request.

A pass loads promised blocks before it, and saves full blocks after it. No call takes
a promise back from an engine. A promise that is used becomes a load. Any other is released: if the
engine counts on it after all, it must be stopped.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvray.engine.meta import ConnectorMeta, Honoured, LoadPlan, PageIds, Promise, SavePlan
from kvray.engine.prefix_finder import AskAgain, Found, PrefixFinder
from kvray.engine.request import Prompt, RequestState, UnwrittenTokens, read_priorities
from kvray.engine.shared_state import SharedState, registered_state
from kvray.errors import LeaseExpired
from kvray.identity.block import BlockKey
from kvray.identity.keys import request_seed
from kvray.node import PromptCounts
from kvray.trace.arrival import HERE, runs_between, source_of
from kvray.trace.reasons import DropReason, MissReason
from kvray.trace.request_note import NAME_MAX, RequestNote, sampled

_log = logging.getLogger("kvray.connector")

_STATES_MAX = 8192
"""Requests remembered at once. Cancelled ones end without a call; those unseen for longest go."""
_LOST_MAX = 65_536
"""Requests remembered whose promise was given up; those of longest ago are forgotten."""


class Answer(NamedTuple):
    """What a query was answered with, until it is counted."""

    request_id: int
    asked: Prompt | None = None  # None: it has no keys, and so nothing to find
    found: Found = Found()
    state: RequestState | None = None  # None: it came before its model had a name


class Leader:
    """Of the requests that one engine schedules."""

    def __init__(self, shared: SharedState, *, counts_later: bool = False) -> None:
        """Take `shared`, which `close` gives back.

        An engine may query a request and then not schedule it: with `counts_later` an answer is
        counted only when `count` is called.
        """
        self._own_shared = self.shared = shared
        self.states: OrderedDict[int, RequestState] = OrderedDict()
        self.promises, self.finder = Promises(), PrefixFinder()
        args = shared.args
        self._unwritten = UnwrittenTokens(args.tokens_per_block, finds_parts=args.finds_parts)
        self._ends: dict[int, int] = {}
        """Requests of the last pass -> leading tokens that are computed once it has run."""
        self._num_passes = 0  # how many had run when it was planned
        self._unfenced: set[int] = set()
        """Requests whose pages may still be read, and that were in every pass since."""
        self._counts_later = counts_later
        self._uncounted: dict[int, Answer] = {}
        self._weights_of: tuple[object, int] | None = None
        """The state, and its number of changes of weights, with which all requests were matched."""
        self._warned_unaligned = False
        self._is_closed = False

    def match(
        self,
        request_id: int,
        read: Callable[[], Prompt | str],
        honoured: Honoured | None = None,
    ) -> int | None:
        """Promise what can be loaded of a request; return how many tokens after the engine's own.

        None: the shard has been asked for more, and the engine is to ask again; only where it does
        so. Else that is the longest prefix of the prompt that is leased for every rank. `read`
        returns the request, or why it has no keys; `honoured` tells how many tokens of the offer
        were taken, if the engine may take less. The request is as new from here on.
        """
        if self.finder.is_pending(request_id):
            return None
        began_ns = time.perf_counter_ns()
        self.reset(request_id)
        try:
            # The worker may have registered its pool with another copy of the arguments.
            if not self.shared.identity.readings:
                self.shared = registered_state(self.shared)
            self._follow_weights()
            hit, answer = self._promise(request_id, self.shared.figures.told(read()), honoured)
            if self._counts_later and answer is not None:
                self._uncounted[request_id] = answer
            elif answer is not None:
                record(self.shared, answer)
            self.shared.figures.match_times.observe(time.perf_counter_ns() - began_ns)
        except Exception as error:  # noqa: BLE001 - as in `Boundary.around`, which costs four calls
            self.shared.boundary.stop("a request", error)
            self.forget(request_id)  # what was not answered is not promised either
            return 0
        return hit

    def count(self, request_id: int) -> None:
        """Count the last answer to a request: it will be computed."""
        answer = self._uncounted.pop(request_id, None)
        if answer is not None:
            with self.shared.boundary.around("the figures of a request"):
                record(self.shared, answer)

    def plan(self, reports: Sequence[tuple[Any, bool]]) -> ConnectorMeta:
        """Return what the ranks load before and save after the coming pass.

        `reports` are of its requests, each with whether the engine calls it new; their fields are
        those of `request.report`. LayoutMismatch, LeaseExpired: a promise has no place to go, or
        its lease has ended. The engine counts on it, so it must not go on.
        """
        began_ns = time.perf_counter_ns()
        shared = self.shared
        loads, saves, scheduled = list[LoadPlan](), list[SavePlan](), set[int]()
        self._follow_weights()
        self._measure(reports)
        self._confirm_pass()
        self._ends.clear()
        if shared.args.reuses_unwritten:
            with shared.boundary.around("what is computed of prompts"):
                self._follow_prompts(reports)
        for report, is_new in reports:
            state = self.states.get(report.request_id)
            if is_new or state is None or not state.is_reported:
                self.promises.check(report.request_id, report.computed_position)
            if state is None:
                continue
            self.states.move_to_end(report.request_id)  # `_drop_oldest` takes from the front
            if not is_new:
                scheduled.add(report.request_id)  # a replayed request has lost its pages
            if state.promise is not None:
                start, planned = self._plan_load(state, report, is_new=is_new)
                loads += planned
                self._ends[report.request_id] = start + report.num_scheduled_tokens
                with shared.boundary.around("a save"):
                    saves += self._plan_save(state, start + report.num_scheduled_tokens)
                continue
            with shared.boundary.around("a save"):
                _extend(state, report, is_new=is_new)
                state.rewind(report.computed_position)
                end = report.computed_position + report.num_scheduled_tokens
                saves += self._plan_save(state, end)
                continue
            self.forget(report.request_id)
        self.promises.settle(shared)
        # A request that is not in this pass may have ended, and its pages may have new owners. With
        # groups of pages those of any may: equal ones of others take the place of its own.
        own = scheduled if shared.identity.is_flat else set[int]()
        is_fenced = bool(self._unfenced - own) or shared.identity.has_windows
        if is_fenced:
            self._unfenced.clear()
        self._unfenced.update(plan.request_id for plan in saves)
        name, releases = shared.model_name, tuple(shared.to_release)
        shared.to_release.clear()
        meta = ConnectorMeta(
            namespace=shared.identity.common,
            loads=tuple(loads),
            saves=tuple(saves),
            releases=releases,
            is_fenced=is_fenced,
            replica=shared.replica,
            model=name.name if loads and not name.is_given else "",
            number=shared.identity.own.number if saves else 0,
        )
        shared.figures.plan_times.observe(time.perf_counter_ns() - began_ns)
        return meta

    def finish(self, request_id: int) -> None:
        """Forget a finished request; twice is fine. Its blocks may still be read, see `plan`."""
        self._confirm_pass()
        self._unwritten.end(request_id)
        self.reset(request_id)
        self.finder.forget(request_id)

    def pin(self, request_id: int) -> None:
        """Note that the engine keeps the blocks of a finished request until they were read."""
        if self.shared.identity.is_flat:  # else others may have them already, see `plan`
            self._unfenced.discard(request_id)

    def reset(self, request_id: int) -> None:
        """Forget a request whose blocks were taken away, or whose promise is to be replaced."""
        self.forget(request_id)
        self.promises.forget(request_id)

    def cancel(self, request_id: int, start: int, end: int, why: MissReason | None = None) -> None:
        """Keep less than was promised: tokens from `start` to `end` are not used, and missed."""
        state = self.states.get(request_id)
        if state is not None and state.promise is not None:
            state.promise.cancel(start, end)
            if not state.promise.num_blocks:
                self.promises.release(self.shared, state)
            self._note_miss(request_id, why)

    def decline(self, request_id: int, reason: MissReason | None = None) -> None:
        """Release what a request was promised: the engine takes nothing of it.

        `reason`: why what was promised is missed after all.
        """
        if (state := self.states.get(request_id)) is not None:
            self.promises.release(self.shared, state)
        self._note_miss(request_id, reason)

    def _note_miss(self, request_id: int, reason: MissReason | None) -> None:
        if reason is not None and (answer := self._uncounted.get(request_id)) is not None:
            found = answer.found._replace(reason=reason)
            self._uncounted[request_id] = answer._replace(found=found)

    def offer_again(self, request_id: int, num_computed: int, *, end: int) -> int:
        """Renew an offer that was not taken; return how many tokens after the engine's own it is.

        The engine has `num_computed` tokens itself by now, no fewer than when it was first made.
        Only the blocks before `end` can be loaded: what follows them proved wrong.
        """
        state = self.states.get(request_id)
        if state is None or state.promise is None:
            return 0
        promise = state.promise
        if end < promise.end:
            promise.end = end
            state.num_found, state.num_saved = min(state.num_found, end), min(state.num_saved, end)
            is_there = self.shared.link.arena is promise.lease.arena
            self._note_miss(request_id, "corrupt" if is_there else "store_down")
        promise.num_computed = min(num_computed, promise.end * state.tokens_per_block)
        answer = self._uncounted.get(request_id)
        if answer is not None and answer.asked is not None:
            asked = answer.asked._replace(num_computed=num_computed)
            self._uncounted[request_id] = answer._replace(asked=asked)
        return promise.num_tokens

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request, and its promise; what it has not saved is lost."""
        state = self.states.pop(request_id, None)
        self._uncounted.pop(request_id, None)
        if state is not None:
            self.promises.release(self.shared, state)
            if state.is_reported:  # else it may be asked about again
                self.shared.figures.log.prompts.note(state.keys, state.counts)
            is_down = self.shared.link.arena is None
            reason = DropReason.STORE_DOWN if is_down else DropReason.NO_PAGE
            self.shared.figures.drop(state.num_full - state.num_saved, state.unsaved or reason)

    def close(self) -> None:
        """Release what is promised and let go of the tier. Twice is fine."""
        for request_id in list(self.states):
            self.forget(request_id)
        if not self._is_closed:
            self._is_closed = True
            self.finder.close()
            self._own_shared.close()

    def _confirm_pass(self) -> None:
        """Note that prompts are computed to the end of the last pass, if that has run.

        Its saves go by the same. A prompt that is cancelled behind it is not reported again.
        """
        ends, num_passes = self._ends, self.shared.num_passes
        if num_passes != self._num_passes:
            self._ends, self._num_passes = {}, num_passes
            with self.shared.boundary.around("what is computed of prompts"):
                for request_id, end in ends.items():
                    self._unwritten.confirm(request_id, end)

    def _follow_prompts(self, reports: Sequence[tuple[Any, bool]]) -> None:
        """Note how far prompts are computed; save nothing behind tokens that may not be written.

        The engine has found those in its own prefix cache, where a prompt left them that is over.
        Requests that have no keys leave them as well.
        """
        begun = list[tuple[Any, Sequence[int], RequestState | None]]()
        for report, is_new in reports:
            state = self.states.get(report.request_id)
            self._ends[report.request_id] = report.computed_position + report.num_scheduled_tokens
            if is_new:
                begun.append((report, report.new_tokens, state))
            elif state is not None and state.prompt is not None:  # another life of its id
                begun.append((report, state.prompt, state))
            else:
                self._unwritten.confirm(report.request_id, report.computed_position)
        for report, tokens, state in begun:
            position = report.computed_position
            if self._unwritten.begin(report.request_id, tokens, position) and state is not None:
                state.unsaved = DropReason.UNWRITTEN

    def _follow_weights(self) -> None:
        """Store nothing more of requests that were asked about before the weights changed.

        Keys and blocks of theirs are of the weights before; those of later passes are of the new
        ones, or of both. What such a request was promised is loaded all the same: the engine counts
        on it as on its own blocks, which a change leaves to requests in flight, too.
        """
        shared = self.shared
        shared.complete_namespace()
        before, self._weights_of = self._weights_of, (shared, shared.identity.weights[0])
        if before == self._weights_of:
            return
        for request_id, state in list(self.states.items()):
            if state.promise is None:
                self.forget(request_id)
            else:
                state.unsaved = DropReason.NEW_WEIGHTS

    def _promise(
        self, request_id: int, asked: Prompt | None, honoured: Honoured | None
    ) -> tuple[int | None, Answer | None]:
        """Promise what can be loaded of a prompt; return how many tokens, and what to count.

        Neither: the shard has been called.
        """
        shared, identity = self.shared, self.shared.identity
        if asked is not None and shared.tenants is not None:
            salted = shared.under_tenant(asked.identity)
            asked = None if salted is None else asked._replace(identity=salted)
        if asked is None:
            return 0, Answer(request_id)
        if not identity.digest:
            why: MissReason = "weights_unnamed" if identity.model else "fingerprinting"
            return 0, Answer(request_id, asked, Found(reason=why))
        state = self._remember(asked)
        num_askable = asked.num_askable(state.tokens_per_block)
        keys = state.prompt_keys(asked.tokens)[:num_askable]
        first, part = divmod(asked.num_computed, state.tokens_per_block)
        state.counts = PromptCounts(len(asked.tokens), len(keys), first)
        # Even if nothing is looked up, it has keys: what it computes is saved.
        if asked.is_unread:
            found = Found(reason="skipped")
        elif part and first < len(keys) and not shared.args.owns_partial_blocks:
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
        hit = 0
        if lease is not None:
            state.arrivals = lease.arrivals
            promise = Promise(
                lease=lease,
                tokens_per_block=state.tokens_per_block,
                num_computed=asked.num_computed,
                end=lease.end,
                honoured=honoured,
            )
            if hit := promise.num_tokens:
                self.promises.keep(state, promise)
            else:
                shared.release_prefix(lease)
        return hit, Answer(request_id, asked, found, state)

    def _remember(self, asked: Prompt) -> RequestState:
        shared, identity = self.shared, asked.identity
        size, seed = shared.args.tokens_per_block, shared.identity.digest
        is_plain = identity.salt is None and identity.lora is None and not identity.media
        state = RequestState(
            request_id=asked.request_id,
            namespace=seed,
            seed=request_seed(seed, salt=identity.salt, lora=identity.lora),
            tokens_per_block=size,
            media=identity.media,
            tenant_id=identity.tenant_id,
            block_tokens=shared.figures.log.block_tokens if is_plain else None,
            windowed=shared.identity.windowed,
            savable_blocks=asked.prompt_len // size if shared.args.drafts_tokens else None,
        )
        self.states[asked.request_id] = state
        if len(self.states) > _STATES_MAX:
            self._drop_oldest()
        return state

    def _plan_load(
        self, state: RequestState, report: Any, *, is_new: bool
    ) -> tuple[int, list[LoadPlan]]:
        """Plan what the first report of a request takes of its promise, which ends with that.

        Returns where its pass begins for sure, and a load if anything is taken. The engine may not
        call the request new, see `RequestState.extend`. LayoutMismatch, LeaseExpired: the promise
        cannot be kept; the engine must not go on.
        """
        shared, start, plans = self.shared, report.computed_position, list[LoadPlan]()
        promise = self.promises.take(state)
        try:
            _extend(state, report, is_new=is_new)
            taken, is_sure = promise.taken(start, is_exact=shared.identity.is_flat)
            if taken:
                self._narrow(state, promise, taken)
                pages = state.load_pages(promise.first, promise.first + taken)
                plans.append(
                    LoadPlan(
                        request_id=state.request_id,
                        leased=promise.lease.leased,
                        leased_blocks=promise.lease.num_blocks,
                        first=promise.first,
                        pages=tuple(map(PageIds.of, pages)),
                        stored_by=promise.lease.stored_by,
                    )
                )
        finally:
            if not plans:
                shared.release_prefix(promise.lease)
        end = (promise.first + taken) * state.tokens_per_block
        return end if taken and is_sure else start, plans

    def _narrow(self, state: RequestState, promise: Promise, taken: int) -> None:
        """Have the leases of a promise name what the first `taken` blocks of the offer need."""
        shared, end = self.shared, promise.first + taken
        if end == promise.lease.num_blocks or not shared.identity.has_windows:
            return
        prefix = self.finder.narrow(shared, promise.lease, state.keys_until(end))
        if prefix is None:
            raise LeaseExpired(
                f"The engine took {taken} of {promise.num_blocks} blocks offered for request"
                f" {state.request_id}, whose last window is not in the tier, or cannot be leased."
            )
        shared.release_prefix(promise.lease)
        promise.lease = prefix

    def _plan_save(self, state: RequestState, computed_tokens: int) -> list[SavePlan]:
        """Plan the blocks that are full after the pass and not saved yet, if there are any."""
        shared, first, end = self.shared, state.num_saved, state.savable(computed_tokens)
        if end == first:
            return []
        if shared.link.arena is None:
            # The blocks stay as they are, the next pass may save them. But pages that a window has
            # passed, or that equal ones have replaced, are others' by then, and no report shows it.
            if any(state.windowed) or not shared.identity.is_flat:
                shared.figures.drop(end - first, DropReason.STORE_DOWN)
                state.num_saved = end
            return []
        plan = SavePlan(
            request_id=state.request_id,
            depth=first,
            keys=b"".join(state.keys_until(end)[max(0, first - 1) :]),
            pages=tuple(PageIds.of(group[first:end]) for group in state.pages),
            priorities=state.priorities_of(first, end),
            tenant_id=state.tenant_id,
        )
        state.num_saved = end
        return [plan]

    def _measure(self, reports: Sequence[tuple[Any, bool]]) -> None:
        """Keep the engine's speed up to date, where it decides anything."""
        if self.shared.may_stage or self.shared.args.holds_loads:
            with self.shared.boundary.around("the speed of prefill"):
                num_tokens = sum(report.num_scheduled_tokens for report, _ in reports)
                requests = {report.request_id for report, _ in reports}
                self.finder.rate.note_pass(requests, num_tokens, time.monotonic())

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
                " such requests load nothing. Set kv_cache_config.enable_partial_reuse: false.",
                num_computed_tokens,
            )


class Promises:
    """The requests that have a promise; used by the engine's executor thread."""

    def __init__(self) -> None:
        self._states: dict[int, RequestState] = {}
        self._lost: OrderedDict[int, int] = OrderedDict()
        """Requests whose promise was given up -> their own tokens, as far as they may still go."""

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

    def check(self, request_id: int, position: int) -> None:
        """Raise LeaseExpired if a first report's position counts on what was given up."""
        num_computed = self._lost.pop(request_id, None)
        if num_computed is not None and position > num_computed:
            raise LeaseExpired(
                f"Request {request_id} comes back for tokens that were promised to it for an"
                " earlier pass, and whose lease has ended; report this with TensorRT-LLM's version."
            )

    def settle(self, shared: SharedState) -> None:
        """Release promises that the pass did not use, unless the engine may still claim them.

        It may if the runtime itself says what it will not use.
        """
        for state in () if shared.args.takes_offers_later else list(self._states.values()):
            promise = self.take(state)
            self._lost[state.request_id] = promise.num_computed
            if len(self._lost) > _LOST_MAX:
                self._lost.popitem(last=False)
            shared.release_prefix(promise.lease)


def record(shared: SharedState, answer: Answer) -> None:
    """Count the outcome of a request, and note it for `kvray explain`."""
    request_id, asked, found, state = answer
    totals, size = shared.figures.totals, shared.args.tokens_per_block
    log = shared.figures.log
    if asked is None:
        totals["bypassed_requests"] += 1
        log.note(RequestNote(request_id, time.time(), 0, size, 0, 0, 0, "bypassed"))
        return
    first = asked.num_computed // size
    wanted = asked.num_askable(size) if state is None else state.counts.asked
    end, hit = min(first, wanted), 0
    step, missing = 1, tuple[BlockKey, ...]()
    arrivals = state.arrivals if state is not None and wanted else ()
    if state is not None and (promise := state.promise) is not None:
        end, hit = promise.end, promise.num_tokens
        came = {"host": 0, "disk": 0, "remote": 0}
        if promise.lease.stored_by != shared.args.num_parts_ranks:
            totals["resliced_tokens"] += hit
        if arrivals:
            for start, stop, way, source in runs_between(arrivals, promise.first, end):
                own = max(0, promise.num_computed - start * size)  # in the first block
                totals[f"hit_tokens_from_{way}"] += (stop - start) * size - own
                came[source_of(way, source)] += stop - start
        else:
            totals[f"hit_tokens_from_{HERE}"] += hit
        state.counts = state.counts._replace(
            hit=end - promise.first, disk=came["disk"], remote=came["remote"]
        )
    missed = wanted * size - asked.num_computed - hit
    totals["requests"] += 1
    totals["prompt_tokens"] += len(asked.tokens)
    totals["local_tokens"] += asked.num_computed
    totals["hit_tokens"] += hit
    if missed > 0:
        totals[f"miss_tokens_{found.reason}"] += missed
    if state is not None and end < wanted:
        step, missing = sampled(state.keys[:wanted], end)
    log.note(
        RequestNote(
            request_id=request_id,
            at=time.time(),
            num_tokens=len(asked.tokens),
            tokens_per_block=size,
            first=first,
            end=end,
            wanted=wanted,
            reason=found.reason if end < wanted else "none",
            arrivals=arrivals,
            stage_s=found.stage_s,
            lease_s=found.lease_s,
            step=step,
            name=asked.name[:NAME_MAX],
            keys=missing,
        )
    )


def _extend(state: RequestState, report: Any, *, is_new: bool) -> None:
    """Take a pass's report on a request.

    Source: `new_block_ids_by_layer_group`, a list, in some branches a mapping; empty, or not
    there, where there is one flat space, which `new_block_ids` has.
    """
    num_groups = len(state.windowed)
    by_group = getattr(report, "new_block_ids_by_layer_group", None)
    if not by_group:
        by_group = (report.new_block_ids or (), *((),) * (num_groups - 1))
    elif isinstance(by_group, dict):
        by_group = [by_group.get(group, ()) for group in range(num_groups)]
    state.extend(report.new_tokens, by_group, new=is_new, priorities=read_priorities(report))
