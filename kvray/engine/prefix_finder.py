"""Finds what of a prompt can be promised: here, or in time from disk and other nodes.

The engine's executor thread waits for the shard's reply, so a request costs at most `stage_wait_s`
of it, however often it is queried. An engine that can be made to ask again waits for nothing;
there the same time is the longest that its request waits. A prompt of which nobody stores more
costs one short call. The key of its first missing block is then remembered for `_ABSENT_S`, because
a full engine queries the same waiting requests in every pass. It is not remembered for longer: a
prompt that several nodes get at once is soon stored by one of them.

The ranks of one engine may be on several nodes. Then nothing is promised without the shard, which
has every other node lease the same blocks in its ranks' names: the leader cannot look there.

`LateStages` is for engines that take "ask again" for an answer and schedule others. Each call has a
deadline, and a thread of its own out of a few; with all of them busy a call waits for its turn,
which counts as part of its time.

`PrefillRate` is how fast this engine computes prompts, measured from its passes. Staging is worth
while only if it is faster than computing. The leader hears of a pass when it is planned, never when
it ends, so a pass is taken to last until the next is planned, if the engine goes straight on: if
the next pass has a request of this one. An engine that overlaps plans the next pass while this one
still runs, and the time shows one pass later; so the longer of the two that follow counts.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

from kvray.engine.cache_layout import Reading
from kvray.engine.meta import Place, PrefixLease
from kvray.engine.request import Prompt
from kvray.engine.shared_state import SharedState
from kvray.identity.block import BlockKey
from kvray.identity.keys import chain_keys, request_seed
from kvray.node import StageCalls, StageReply
from kvray.store import Arena, Held, PartRequest
from kvray.store.arena import lease
from kvray.trace.arrival import Arrivals, joined
from kvray.trace.reasons import MissReason

_log = logging.getLogger("kvray.connector")

_THREADS = 4
_COUNTED_ON_S = 10.0
"""Longest try for the lock where the alternative is the engine's end, beyond the time after which a
stopped process that has it is ended."""
_AGAIN_S = 0.001
_TOKENS_MIN = 128
"""Passes of fewer tokens tell more of what a pass costs than of what a token costs."""
_KEEP = 0.8
"""What is left of the sums after each further measurement."""
_ABSENT_S = 1.0
_REMEMBERED_MAX = 8192
_WORTH_S = 0.005
"""With less than this left of its time no call is made for a request."""
_MISSING = ("not_stored", "corrupt")
"""Reasons of a local match for which another node may have more."""
_HOPELESS = ("arena_busy", "none", "reuse_disabled")
"""Miss reasons after which no other namespace is tried."""
_NONE_AWAY: Mapping[int, Place] = {}
_NOTHING: tuple[float, Arrivals] = (0.0, ())

Stage = Callable[[StageCalls], StageReply]
"""One call to the shard; raises nothing of the shard's."""
Matched = tuple[PrefixLease | None, MissReason]
"""What was leased, which the caller must release; and why what follows it is missing."""


class Found(NamedTuple):
    """What of a prompt can be promised."""

    lease: PrefixLease | None = None  # which the caller must release
    reason: MissReason = "none"  # why what follows it is missing
    num_stored: int = 0  # leading blocks that are here as the engine itself stores them
    stage_s: float = 0.0  # how long the request has waited for the shard, now and before
    lease_s: float = 0.0  # how long all else took


class _Query(NamedTuple):
    """A prompt in one namespace."""

    request_id: int
    reading: Reading  # whose blocks are wanted
    keys: list[BlockKey]  # of its blocks there, as far as they may be promised
    first: int  # blocks that the engine has itself


class AskAgain(Exception):
    """The shard has been called; nothing is leased meanwhile."""


class PrefixFinder:
    """Of one leader; used by the engine's executor thread."""

    def __init__(self) -> None:
        self.rate = PrefillRate()
        """Of the engine, which its leader measures."""
        self._calls: StageCalls | None = None
        self._late: LateStages | None = None
        self._waits: OrderedDict[int, tuple[float, Arrivals]] = OrderedDict()
        """Request -> seconds that it has cost, and how blocks came that were staged for it."""
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        """Key that no node had -> until when that is taken for granted."""

    def is_pending(self, request_id: int) -> bool:
        """Whether the shard's reply for a request is under way."""
        return self._late is not None and self._late.is_pending(request_id)

    def find(self, shared: SharedState, asked: Prompt, keys: list[BlockKey]) -> Found:
        """Lease the longest prefix of `keys` that is here, or comes in time, for every rank.

        `keys` are those of the blocks of `asked` that may be promised. AskAgain: to an engine that
        does so.
        """
        first = asked.num_computed // shared.args.tokens_per_block
        query = _Query(asked.request_id, shared.identity.readings[0], keys, first)
        began, (waited_s, _) = time.monotonic(), self._waits.get(query.request_id, _NOTHING)
        arena, num_stored = shared.link.arena, 0
        matched: PrefixLease | None = None
        reason: MissReason = "none"
        if not shared.args.block_reuse:
            reason = "reuse_disabled"
        elif arena is None:
            reason = "store_down"
        elif len(keys) > first and shared.spans_nodes:
            matched, reason = self._find_across(shared, query)
            num_stored = matched.end if matched else 0
        elif len(keys) > first:
            late = self._late.take(query.request_id) if self._late is not None else None
            matched, reason = _lease_here(shared, query, arena)
            if late is not None or matched is None or matched.end < len(keys):
                matched, reason = self._find_more(shared, query, matched, reason, late=late)
            num_stored = matched.end if matched else 0
            if num_stored < len(keys) and len(shared.identity.readings) > 1:
                matched, reason = self._find_resliced(shared, query, asked, matched, reason)
        stage_s, arrivals = self._waits.get(query.request_id, _NOTHING)
        if matched is not None and arrivals:
            matched = replace(matched, arrivals=arrivals)
        lease_s = time.monotonic() - began - (stage_s - waited_s)
        return Found(matched, reason, num_stored, stage_s, lease_s)

    def narrow(
        self, shared: SharedState, prefix: PrefixLease, keys: list[BlockKey]
    ) -> PrefixLease | None:
        """Lease exactly `keys`, the first of those of `prefix`; None if they cannot be had."""
        if not prefix.away:
            return _lease_exactly(shared, prefix.arena, keys)
        until = time.monotonic() + shared.config.connector.stage_wait_s
        query = _Query(0, shared.identity.own, keys, len(keys))
        reply = _stage(shared, query, self._own_calls(shared), until=until)
        if reply.num_blocks < len(keys):
            shared.release_away(reply.leases)
            return None
        return _lease_along(shared, query, reply)[0]

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._waits.pop(request_id, None)
        if self._late is not None:
            self._late.forget(request_id)

    def close(self) -> None:
        """Hang up. Twice is fine."""
        if self._calls is not None:
            self._calls.close()
        if self._late is not None:
            self._late.close()

    def _find_more(
        self,
        shared: SharedState,
        query: _Query,
        matched: PrefixLease | None,
        reason: MissReason,
        *,
        late: "LateReply | None" = None,
    ) -> Matched:
        """Lease what the shard brings beyond `matched`; `late` is its reply to an earlier call.

        What is returned takes the place of `matched`; `reason` says why that ends.
        """
        args, own = shared.args, query.reading.stored_by == shared.args.num_parts_ranks
        valid = matched.end if matched else 0
        have = max(valid, query.first)
        if late is None:
            is_missing = have < len(query.keys) and reason in _MISSING and shared.may_stage
            if reason == "not_stored" and shared.is_cut_off:
                reason = "store_down"
            if not is_missing or (args.asks_again and not own):
                return matched, reason  # an engine that asks again has one call for each request
        try:
            if late is not None:
                have = max(late.have, query.first)
                reply = self._note_reply(shared, query, late)
            else:
                reply = self._call(shared, query, valid)
                if reply.num_blocks > have and not reply.leases:
                    # The arena may have been replaced meanwhile.
                    more, reason = _lease_here(shared, query, shared.link.arena, valid=valid)
                    if more is not None and more.end > have:
                        matched, more = more, matched
                    shared.release_prefix(more)
        except BaseException:
            shared.release_prefix(matched)
            raise
        if reply.leases:
            return self._note_spread(shared, matched, reply)
        gained = max(0, (matched.end if matched else 0) - have)
        shared.figures.totals["staged_tokens"] += gained * args.tokens_per_block
        return matched, _reason(reason, reply)

    def _find_resliced(
        self,
        shared: SharedState,
        query: _Query,
        asked: Prompt,
        matched: PrefixLease | None,
        reason: MissReason,
    ) -> Matched:
        """Lease a longer prefix than `matched`, if an engine with more or fewer ranks stored one.

        `query` found `matched`, which is released where there is more; `reason` says why it ends.
        """
        have = max(query.first, matched.end if matched else 0)
        if have >= len(query.keys) or reason in _HOPELESS or shared.spans_nodes:
            return matched, reason
        try:
            for reading in shared.stored_by_others():
                if have >= len(query.keys):
                    break
                other = _queried_in(shared, reading, query, asked)
                found, why = _lease_here(shared, other, shared.link.arena)
                found, why = self._find_more(shared, other, found, why)
                if found is None or found.end <= have:
                    shared.release_prefix(found)
                    continue
                shared.release_prefix(matched)
                matched, reason, have = found, why, found.end
        except BaseException:
            shared.release_prefix(matched)
            raise
        return matched, reason

    def _find_across(self, shared: SharedState, query: _Query) -> Matched:
        """Lease what all ranks have on their nodes, which only the shard can find out."""
        if not shared.may_stage:
            return None, "store_down"
        reply = self._call(shared, query, query.first)
        if reply.num_blocks <= query.first:
            shared.release_away(reply.leases)
            return None, _reason("not_stored", reply)
        return _lease_along(shared, query._replace(keys=query.keys[: reply.num_blocks]), reply)

    def _note_spread(
        self, shared: SharedState, matched: PrefixLease | None, reply: StageReply
    ) -> Matched:
        """Promise nothing this time: ranks of the engine turn out to be on other nodes."""
        shared.spans_nodes = True
        _log.warning(
            "kvray: ranks of this engine are on several nodes, but it does not say so; set"
            " %s to how many of them a node has.",
            shared.args.spread_setting,
        )
        shared.release_away(reply.leases)
        shared.release_prefix(matched)
        return None, "store_down"

    def _call(self, shared: SharedState, query: _Query, have: int) -> StageReply:
        """Call the shard for what follows `have` blocks, unless that is known or would be late."""
        began, key = time.monotonic(), query.keys[have]
        waited_s, _ = self._waits.get(query.request_id, _NOTHING)
        wait_s = shared.config.connector.stage_wait_s
        left_s = wait_s - waited_s
        if began < self._absent.get(key, 0.0):
            return StageReply(num_blocks=0, reason="not_stored")
        if left_s < min(wait_s, _WORTH_S):
            return StageReply(num_blocks=0, reason="too_slow")
        # Blocks outside this node's arena can only be checked by the node that has them.
        verify_from = have if shared.spans_nodes and shared.verifies_promises else None
        stage = partial(
            _stage,
            shared,
            query,
            until=began + left_s,
            tokens_per_s=self.rate.tokens_per_s,
            verify_from=verify_from,
        )
        if shared.args.asks_again and not shared.spans_nodes:
            if self._late is None:
                self._late = LateStages(shared.link.directory)
            self._late.begin(query.request_id, stage, began=began, have=have)
            raise AskAgain
        calls = self._own_calls(shared)
        if not calls.can_ask:
            return StageReply(num_blocks=0, reason="store_down")
        return self._note_reply(shared, query, LateReply(stage(calls), began, have))

    def _note_reply(self, shared: SharedState, query: _Query, late: "LateReply") -> StageReply:
        """Note what the shard has replied, and return it."""
        reply, began, have = late
        took_s = time.monotonic() - began
        shared.figures.totals["stage_calls"] += 1
        shared.figures.totals["stage_wait_us"] += int(1e6 * took_s)
        shared.figures.stage_times.observe(int(1e9 * took_s))
        waited_s, arrivals = self._waits.get(query.request_id, _NOTHING)
        if reply.arrivals:
            arrivals = joined(arrivals, reply.arrivals)
        _remember(self._waits, query.request_id, (waited_s + took_s, arrivals))
        if reply.num_blocks <= have and reply.reason == "not_stored":
            _remember(self._absent, query.keys[have], began + took_s + _ABSENT_S)
        return reply

    def _own_calls(self, shared: SharedState) -> StageCalls:
        if self._calls is None:
            self._calls = StageCalls(shared.link.directory)
        return self._calls


def _lease_here(
    shared: SharedState,
    query: _Query,
    arena: Arena | None,
    *,
    valid: int = 0,
    away: Mapping[int, Place] = _NONE_AWAY,
) -> Matched:
    """Lease the prefix of a query that is here; return it, and why what follows is missing.

    Blocks before `query.first` are the engine's own, those before `valid` in another lease that is
    still held; neither are checked. `away` has the leases of ranks on other nodes.
    """
    if arena is None:
        return None, "store_down"
    readers: Sequence[Sequence[PartRequest]] = query.reading.part_requests
    if away:
        readers = [parts for rank, parts in enumerate(readers) if rank not in away]
    began_ns = time.perf_counter_ns()
    held = arena.lease_for(query.keys, readers)
    shared.figures.lease_times.observe(time.perf_counter_ns() - began_ns)
    if held is None:
        return None, "arena_busy"
    if not held.num_blocks:
        return None, "not_stored"
    end, start, seen = held.num_blocks, max(query.first, valid), set[PartRequest]()
    try:
        checked = zip(held.leases, held.slots, readers, strict=True)
        for one, slots, requests in checked if end > start and shared.verifies_promises else ():
            found = lease.places(requests, held.num_blocks, first=start, stop=held.num_blocks)
            for request, (block, places) in zip(requests, found, strict=True):
                if request in seen:
                    continue  # several ranks read the same slots
                seen.add(request)
                valid_here = arena.valid(one, places, slots_known=slots)
                if 0 in valid_here.tobytes():
                    end = min(end, block + int(valid_here.argmin()))
    except BaseException:
        shared.release_leases(arena, *held.leases)
        raise
    reason: MissReason = "corrupt" if end < held.num_blocks else "not_stored"
    if end < held.num_blocks and shared.identity.has_windows:
        end = start  # a shorter prefix is of no use without its whole window
    return _prefix(query.reading, arena, held, end, away), reason


def _lease_exactly(shared: SharedState, arena: Arena, keys: list[BlockKey]) -> PrefixLease | None:
    """Lease all of `keys`, the engine's own, again; None if they are not all here any more.

    A prefix of a leased prefix may need other blocks of a group with a window than were leased. The
    engine counts on them, so a busy arena is tried for longer than for a promise.
    """
    requests = shared.identity.own.part_requests
    left_s = shared.config.arena.stopped_s + _COUNTED_ON_S
    deadline = time.monotonic() + left_s
    held = arena.lease_for(keys, requests, is_counted_on=True, wait_s=left_s)
    while held is None and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(_AGAIN_S)  # it may lack room, and others give some back
        held = arena.lease_for(keys, requests, is_counted_on=True, wait_s=left_s)
    if held is None:
        return None
    if held.num_blocks < len(keys):
        shared.release_leases(arena, *held.leases)
        return None
    return _prefix(shared.identity.own, arena, held, held.num_blocks, _NONE_AWAY)


def _prefix(
    reading: Reading, arena: Arena, held: Held, end: int, away: Mapping[int, Place]
) -> PrefixLease:
    """Return the leases `held` here, and those of ranks `away`, as one of all ranks."""
    leased = tuple(zip(repeat(arena.arena_id), held.leases))
    if away:
        here, num_ranks = iter(leased), len(reading.part_requests)
        leased = tuple(away.get(rank) or next(here) for rank in range(num_ranks))
    return PrefixLease(
        arena=arena,
        leased=leased,
        num_blocks=held.num_blocks,
        stored_by=reading.stored_by,
        end=end,
    )


def _lease_along(shared: SharedState, query: _Query, reply: StageReply) -> Matched:
    """Lease here all of `query.keys`, which ranks on other nodes have leased, or none of them."""
    matched: PrefixLease | None = None
    try:
        matched, reason = _lease_here(shared, query, shared.link.arena, away=reply.leases)
    finally:
        if matched is None:  # else it ends theirs, too
            shared.release_away(reply.leases)
    if matched is None or matched.num_blocks < len(query.keys):
        shared.release_prefix(matched)
        return None, reason
    return matched, _reason(reason, reply)


def _queried_in(shared: SharedState, reading: Reading, query: _Query, asked: Prompt) -> _Query:
    """Return a query for the same blocks in another namespace."""
    size, identity = shared.args.tokens_per_block, asked.identity
    seed = request_seed(reading.digest, salt=identity.salt, lora=identity.lora)
    tokens = asked.tokens[: len(query.keys) * size]
    keys = chain_keys(tokens, tokens_per_block=size, seed=seed, media=identity.media)
    return query._replace(reading=reading, keys=keys)


def _stage(
    shared: SharedState,
    query: _Query,
    calls: StageCalls,
    *,
    until: float,
    tokens_per_s: float = 0.0,
    verify_from: int | None = None,
) -> StageReply:
    """Call the shard, unless it has not replied lately or it is too late."""
    if not calls.can_ask:
        return StageReply(num_blocks=0, reason="store_down")
    wait_s, stored_by = until - time.monotonic(), query.reading.stored_by
    if wait_s <= 0:
        return StageReply(num_blocks=0, reason="too_slow")
    return calls.stage(
        query.keys,
        replica=shared.replica,
        rank=shared.rank,
        wait_s=wait_s,
        tokens_per_s=tokens_per_s,
        verify_from=verify_from,
        stored_by=None if stored_by == shared.args.num_parts_ranks else stored_by,
    )


def _reason(local: MissReason, reply: StageReply) -> MissReason:
    """Return why there is not more: the shard's reason, unless this node knows a better one."""
    return reply.reason if local == "not_stored" and reply.reason != "none" else local


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED_MAX:
        known.popitem(last=False)


class LateReply(NamedTuple):
    """A reply of the shard."""

    reply: StageReply
    began: float  # when the call began
    have: int  # leading blocks that were here then


class LateStages:
    """The calls of one leader; used by the engine's executor thread.

    What crosses threads: the calls, and their replies through futures. Each thread has connections
    of its own, which `close` hangs up; a call under way ends by its deadline.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._local = threading.local()
        self._calls: list[StageCalls] = []
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvray-stage")
        self._pending: dict[int, Future[LateReply]] = {}

    def begin(self, request_id: int, stage: Stage, *, began: float, have: int) -> None:
        """Have the shard called for a request; `take` has the reply, with `began` and `have`."""
        self._pending[request_id] = self._threads.submit(self._do, stage, began, have)

    def is_pending(self, request_id: int) -> bool:
        """Whether a request has a call without a reply."""
        call = self._pending.get(request_id)
        return call is not None and not call.done()

    def take(self, request_id: int) -> LateReply | None:
        """Return the reply, once; None: there was no call for the request."""
        call = self._pending.pop(request_id, None)
        return None if call is None else call.result()

    def forget(self, request_id: int) -> None:
        """Drop a request's call, if it has not begun, or its reply."""
        call = self._pending.pop(request_id, None)
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """End the threads; nobody waits for the calls that are under way. Twice is fine."""
        for call in self._pending.values():
            call.cancel()
        for calls in self._calls:
            calls.interrupt()
        self._threads.shutdown()
        for calls in self._calls:
            calls.close()

    def _do(self, stage: Stage, began: float, have: int) -> LateReply:
        calls = getattr(self._local, "calls", None)
        if calls is None:
            calls = self._local.calls = StageCalls(self._directory)
            self._calls.append(calls)
        return LateReply(stage(calls), began, have)


class PrefillRate:
    """Tokens per second, the latest passes and the largest counting most."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._requests: set[int] = set()
        self._planned_at = 0.0
        self._pending: tuple[int, float] | None = None
        """Tokens of the pass before the last, and how long it was until the last was planned."""
        self._last_tokens = 0

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 while it is unknown."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def note_pass(self, requests: Collection[int], num_tokens: int, now: float) -> None:
        """Note a pass of `requests` that computes `num_tokens` in all, planned at `now`."""
        goes_on = not self._requests.isdisjoint(requests)
        seconds = now - self._planned_at
        if goes_on and self._pending is not None:
            tokens, before = self._pending
            longer = max(before, seconds)
            if longer > 0:
                self._tokens = _KEEP * self._tokens + tokens
                self._seconds = _KEEP * self._seconds + longer
        big = goes_on and self._last_tokens >= _TOKENS_MIN
        self._pending = (self._last_tokens, seconds) if big else None
        self._requests, self._last_tokens, self._planned_at = set(requests), num_tokens, now
