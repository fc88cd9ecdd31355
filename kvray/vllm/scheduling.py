"""The scheduler's half of the connector: vLLM's requests as the leader knows requests.

vLLM names requests by text, the leader by number; each gets a number when it is first asked about.

A request is promised nothing at first. What the leader has leased for it is held by every rank
(see `held`), while vLLM is made to ask again and schedules others. Then what all ranks hold is
promised, and no load can fail. vLLM's own recovery is never called on: it undoes a pass, which goes
wrong when the request is preempted meanwhile, and on some runners always.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from kvray.engine.leader import Leader
from kvray.engine.meta import ConnectorMeta, LoadPlan
from kvray.engine.request import PassReport
from kvray.engine.shared_state import SharedState
from kvray.errors import ConfigError
from kvray.trace.reasons import DropReason, MissReason
from kvray.vllm.held import Asked, HeldLoad, Holds
from kvray.vllm.read import RequestReader
from kvray.vllm.start import HoldAnswers, PassMetadata, PoolMetadata

_log = logging.getLogger("kvray.connector")

_HOLD_WAIT_S = 10.0
"""Longest wait for ranks to copy what they are to hold, which takes them some 0.1 s a GiB, and for
room to hold it."""


@dataclass(slots=True, kw_only=True)
class _Known:
    """A request between its first query and its end."""

    number: int
    request: Any  # vLLM's own, which has the tokens
    asked_at: float  # when it was first asked about, or asked again after a pass
    held: Asked | None = None  # what the ranks hold for it
    held_at: float = 0.0  # since when they do
    num_needed: int = 0  # blocks for which there was no room when it was last asked about
    num_external: int = 0
    """Tokens that vLLM took of the last offer and whose pass is not planned yet."""
    num_hit: int | None = None  # tokens that it did not have to compute the first time
    is_begun: bool = False  # whether a pass has had it
    is_saved: bool = False  # whether a pass has saved blocks of it


class _PrefixCache:
    """Tells whether vLLM's own has blocks of weights before, as it was not reset with them.

    What follows such a block would be saved under the new weights' version, for all replicas.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        """vLLM's blocks, once it has named them."""
        self.has_old_blocks = False
        self._table: Any = None  # of its blocks; a reset makes another one
        self._version: str | None = None  # of the weights when it was first seen

    def follow(self, version: str | None) -> None:
        """Take the weights' present version; of a table that has none nothing is known."""
        table = getattr(self.pool, "cached_block_hash_to_block", None)
        if table is not self._table:
            self._table, self._version, self.has_old_blocks = table, version, False
        elif None not in (self._version, version) and version != self._version:
            if not self.has_old_blocks:
                _log.warning(
                    "kvray: vLLM's prefix cache was not reset since the weights were of version"
                    " %r; what is computed behind its blocks may be wrong and is not saved. Call"
                    " reset_prefix_cache until it succeeds.",
                    self._version,
                )
            self.has_old_blocks = True


class SchedulingHalf:
    """Used by the thread of vLLM's scheduler."""

    def __init__(self, shared: SharedState, *, tells_events: bool = False) -> None:
        self._leader = Leader(shared, counts_later=True)
        self._reader = RequestReader(shared.args)
        self._known: dict[str, _Known] = {}
        self._numbers = count()
        self._holds = Holds(num_ranks=shared.args.num_ranks, num_blocks=0)
        self._changes = 0  # of the weights, as far as they were followed
        self._planned: dict[int, str] = {}
        """The requests of the pass that is being planned: number -> vLLM's name."""
        self._cache = _PrefixCache()
        self._events: Any = None  # `TierEvents`, where vLLM publishes them
        if tells_events:
            with shared.boundary.around("vLLM's events"):
                from kvray.vllm.tier_events import TierEvents

                self._events = TierEvents(shared)

    def lead(self, ranks: Mapping[int, Any]) -> None:
        """Take what the ranks have registered, by rank; nothing is promised before.

        ConfigError: it is another connector's, or ranks are on several nodes, which `nnodes` does
        not say of ranks that Ray has placed: each would find its own node's blocks alone.
        """
        first = ranks[0]
        if not isinstance(first, PoolMetadata):
            raise ConfigError(
                f"vLLM's MultiConnector gave kvray what {type(first).__module__} has registered;"
                " it passes on that of one connector only, so leave the other one out."
            )
        if len(hosts := {one.host for one in ranks.values()}) > 1:
            raise ConfigError(
                f"The engine's ranks are on several nodes ({', '.join(sorted(hosts))}); kvray"
                " serves vLLM on one, so leave --kv-transfer-config out or have fewer ranks."
            )
        shared = self._leader.shared
        self._holds = Holds(num_ranks=shared.args.num_ranks, num_blocks=first.hold_blocks)
        shared.lead(first.identity)

    def match(self, request: Any, num_computed: int) -> int | None:
        """Promise what can be loaded after vLLM's own tokens; return how many tokens that is.

        None: the shard has been asked, or the ranks do not hold it yet, and vLLM is to ask again.
        """
        known = self._known.get(request.request_id)
        if known is None or known.request is not request:
            if known is not None:
                self._drop(known)
            now = time.monotonic()
            known = _Known(number=next(self._numbers), request=request, asked_at=now)
            self._known[request.request_id] = known
        known.num_external = 0
        self._follow_weights()
        if known.held is not None and not self._has_shrunk(known, known.held, num_computed):
            return self._offer(known, known.held, num_computed)
        if known.num_needed > self._holds.room and not self._is_late(known):
            return None
        read = partial(self._reader.read, request, known.number, num_computed)
        hit = self._leader.match(known.number, read)
        return self._hold(known) if hit else hit

    def take_answers(self, answers: HoldAnswers) -> None:
        """Take what ranks hold by now."""
        self._holds.take_answers(answers.num_valid, answers.num_ranks)

    def allocated(self, request: Any, num_external: int) -> None:
        """Note how much of the offer vLLM takes: all of it or nothing."""
        known = self._known.get(request.request_id)
        if known is not None:
            known.num_external = num_external
            if known.num_hit is None:
                known.num_hit = num_external
            if not num_external:
                self._drop(known)
            self._leader.count(known.number)

    def plan(self, output: Any) -> PassMetadata:
        """Return what the ranks do in the coming pass."""
        self._planned.clear()
        self._cache.follow(self._leader.shared.identity.weights[1])
        reports = list(self._reports(output))
        meta = self._leader.plan([(report, report.is_new) for report in reports])
        shared, names = self._leader.shared, dict[int, str]()
        is_read_by_then = shared.identity.is_host or shared.args.has_writes_aside
        for plan in () if is_read_by_then else meta.saves:
            name = self._planned[plan.request_id]
            if not self._known[name].is_saved:
                self._known[name].is_saved, names[plan.request_id] = True, name
        if self._events is not None:
            with shared.boundary.around("vLLM's events"):
                self._note_events(meta)
        loads = tuple(map(self._held_load, meta.loads))
        holds, drops = self._holds.take()
        model = shared.model_name
        if holds and not model.is_given:
            meta = meta._replace(model=model.name)
        return PassMetadata(
            meta=meta._replace(loads=()), holds=holds, drops=drops, loads=loads, names=names
        )

    def finish(self, name: str) -> tuple[bool, int]:
        """Return whether a save still reads blocks of a request that has ended, and its hits."""
        known = self._known.pop(name, None)
        if known is None:
            return False, 0
        self._drop(known)
        self._leader.finish(known.number)
        if known.is_saved:
            self._leader.pin(known.number)  # the ranks report when they have read its blocks
        return known.is_saved, known.num_hit or 0

    def watch(self, pool: Any) -> None:
        """Follow what vLLM does with its own blocks."""
        self._cache.pool = pool
        if self._events is not None:
            self._events.pool = pool

    def take_events(self) -> Iterable[Any]:
        """Return what vLLM is to publish of the tier since the last call."""
        if self._events is not None:
            with self._leader.shared.boundary.around("vLLM's events"):
                return self._events.take()  # type: ignore[no-any-return]
        return ()

    def reset(self) -> None:
        """Go without the tier until a version is named: the weights may have been replaced."""
        self._leader.shared.name_weights(None)

    def close(self) -> None:
        """Release what is promised and let go of the tier. Twice is fine."""
        self._leader.close()

    def _follow_weights(self) -> None:
        """Let go of what is held of the weights before, but for what vLLM has taken already."""
        shared = self._leader.shared
        shared.complete_namespace()
        if self._changes != shared.identity.weights[0]:
            self._changes = shared.identity.weights[0]
            for known in self._known.values():
                if not known.num_external:
                    self._drop(known)

    def _hold(self, known: _Known) -> int | None:
        """Have the ranks hold what the leader has leased, as far as it fits into their memory."""
        size = self._leader.shared.args.tokens_per_block
        promise = self._leader.states[known.number].promise
        assert promise is not None, "it has just been made"
        if promise.num_blocks > self._holds.capacity:
            end = promise.first + self._holds.capacity
            self._leader.cancel(known.number, end * size, promise.end * size, "hold_full")
        known.held = self._holds.begin(promise.lease.leased, first=promise.first, stop=promise.end)
        if known.held is not None:
            known.num_needed, known.held_at = 0, time.monotonic()
            return None
        known.num_needed = promise.num_blocks
        self._leader.decline(known.number, "hold_full")
        return 0 if self._is_late(known) else None

    def _has_shrunk(self, known: _Known, held: Asked, num_computed: int) -> bool:
        """Let go of a hold before which vLLM lacks blocks by now: it is asked for those as well.

        For a bounded time: vLLM's own cache may lose more meanwhile.
        """
        has_all = num_computed // self._leader.shared.args.tokens_per_block >= held.hold.first
        if has_all or time.monotonic() >= known.asked_at + _HOLD_WAIT_S:
            return False
        self._drop(known)
        return True

    def _offer(self, known: _Known, held: Asked, num_computed: int) -> int | None:
        """Return what of a hold follows vLLM's own tokens, once every rank has answered."""
        if not held.is_answered:
            if time.monotonic() < known.held_at + _HOLD_WAIT_S:
                return None
            self._drop(known, "too_slow")
            return 0
        first, rest = divmod(num_computed, self._leader.shared.args.tokens_per_block)
        hit = 0
        if not rest and first >= held.hold.first:
            hit = self._leader.offer_again(known.number, num_computed, end=held.end)
        if not hit:  # it has more of its own by now, or less than the hold begins with
            self._drop(known)
        return hit

    def _drop(self, known: _Known, reason: MissReason | None = None) -> None:
        """Let go of what was offered; its tokens are missed for `reason`, if that is known."""
        self._leader.decline(known.number, reason)
        if known.held is not None:
            self._holds.drop(known.held)
            known.held = None

    def _is_late(self, known: _Known) -> bool:
        """Whether a request has waited for room for as long as it may.

        It may wait for what computing the blocks would take: passes of others give room back.
        """
        shared, rate = self._leader.shared, self._leader.finder.rate.tokens_per_s
        compute_s = known.num_needed * shared.args.tokens_per_block / rate if rate else 0.0
        wait_s = max(shared.config.connector.stage_wait_s, min(compute_s, _HOLD_WAIT_S))
        return time.monotonic() - known.asked_at >= wait_s

    def _note_events(self, meta: ConnectorMeta) -> None:
        """Have events tell of what the pass loads and saves."""
        loads = [(plan.request_id, plan.first, plan.pages) for plan in meta.loads]
        saves = [(plan.request_id, plan.depth, plan.pages) for plan in meta.saves]
        for number, first, pages in loads + saves:
            keys = self._leader.states[number].keys[first : first + pages[0].num_blocks]
            self._events.note(self._known[self._planned[number]].request, keys, first)

    def _held_load(self, load: LoadPlan) -> HeldLoad:
        """Return a load as the ranks do it: from what they hold, and no longer from the arena."""
        known = self._known[self._planned[load.request_id]]
        held, known.held = known.held, None
        assert held is not None, "only what is held is promised"
        self._holds.loaded(held)
        return HeldLoad(held.hold.hold_id, load.first - held.hold.first, load.pages[0])

    def _reports(self, output: Any) -> Iterator[PassReport]:
        """Yield what the pass has of each request that was asked about.

        Source: `SchedulerOutput`. A request that comes back after it was preempted has all its
        blocks named again, as one that is new.
        """
        for data in output.scheduled_new_reqs:
            position, scheduled = data.num_computed_tokens, output.num_scheduled_tokens
            yield from self._report(data.req_id, data.block_ids, position, scheduled, is_new=True)
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for name, block_ids, position in rows:
            is_new = name in cached.resumed_req_ids
            scheduled = output.num_scheduled_tokens
            yield from self._report(name, block_ids, position, scheduled, is_new=is_new)

    def _report(
        self,
        name: str,
        block_ids: tuple[list[int], ...] | None,
        position: int,
        scheduled: dict[str, int],
        *,
        is_new: bool,
    ) -> Iterator[PassReport]:
        known = self._known.get(name)
        state = None if known is None else self._leader.states.get(known.number)
        if known is None or state is None:
            return
        if is_new and known.is_begun:  # it was preempted
            self._leader.shared.figures.totals["resumed_requests"] += 1
        num_external, known.num_external = known.num_external, 0
        known.is_begun, known.asked_at = True, time.monotonic()
        self._planned[known.number] = name
        if is_new and position > num_external and self._cache.has_old_blocks:
            state.unsaved = DropReason.NEW_WEIGHTS
        reported = 0 if is_new else state.num_tokens
        yield PassReport(
            request_id=known.number,
            new_tokens=list(known.request.all_token_ids[reported:]),
            new_block_ids=list(block_ids[0]) if block_ids else [],
            computed_position=position - num_external,
            num_scheduled_tokens=scheduled[name],
            is_new=is_new,
        )
