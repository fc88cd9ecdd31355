"""The leader's half of the connector: matches prompts, promises what is leased, plans each pass.

Everything here runs on the engine's executor thread. Nothing waits longer than the arena's
`lock_wait_s`, but for blocks of other nodes (`staging`), at most `stage_wait_s` a request.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from kvray.arrival import runs_between
from kvray.connector.base import KvCacheConnectorScheduler
from kvray.connector.engine import (
    Engine,
    engine_for,
    registered_engine,
    release_prefix,
    shut_down_at_exit,
)
from kvray.connector.identity import Identity
from kvray.connector.meta import ConnectorMeta
from kvray.connector.noting import note_bypassed, note_request
from kvray.connector.pass_plan import PassPlanner
from kvray.connector.prefill_rate import PrefillRate
from kvray.connector.promise import Promise
from kvray.connector.promises import Promises
from kvray.connector.request_state import RequestState, promised_blocks_max
from kvray.connector.staging import Staging
from kvray.keys import request_seed
from kvray.opening import opening_digest

_log = logging.getLogger("kvray.connector")

_STATES_MAX = 8192
"""Requests remembered at once. Cancelled ones end without a call; those unseen for longest go."""


class KvRayScheduler(KvCacheConnectorScheduler):
    """`connector_scheduler_class` for `KvCacheConnectorConfig`.

    On rank 0, or with attention data parallelism on every rank, for that rank's own requests.
    """

    supports_attention_dp = True

    config_path: str | None = None
    """Configuration file; None: what `load_config` finds."""

    def __init__(self, llm_args: Any) -> None:
        """Attach to the node's tier if there is one.

        Raises:
            ConfigError: a setting cannot be used; the engine's start-up fails with the sentence.
        """
        super().__init__(llm_args)
        self._own_engine = self._engine = engine_for(llm_args, self.config_path)
        self._states: OrderedDict[int, RequestState] = OrderedDict()
        self._promises = Promises()
        self._staging = Staging()
        self._planner = PassPlanner(self._staging)
        self._prefill = PrefillRate()
        self._warned_unaligned = False
        self._is_shut_down = False
        shut_down_at_exit(self)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Promise the longest prefix of the prompt that is leased for every rank.

        Args:
            request: the engine's request.
            num_computed_tokens: leading tokens that the engine has itself.

        Returns:
            (tokens after `num_computed_tokens` that will be loaded, whether the request is to wait
            for them instead of taking part in the coming pass).
        """
        began_ns = time.perf_counter_ns()
        self.request_reset(request)
        with self._engine.boundary.around("a request"):
            self._engine = registered_engine(self._engine)
            hit = self._match(self._engine, request, num_computed_tokens)
            self._engine.timings.match.observe(time.perf_counter_ns() - began_ns)
            return hit, hit > 0 and self._engine.loads_later
        self._forget(request.request_id)  # what was not answered is not promised either
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Nothing: pages are taken from the reports, which also have those of later chunks."""

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """Nothing; see `update_state_after_alloc`."""

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMeta:
        """Return what the workers load before and save after the coming pass.

        Raises:
            LayoutMismatch, LeaseExpired: what was promised has no place to go, or is held no
                longer. The engine counts on it and cannot be told, so it must not go on.
        """
        began_ns = time.perf_counter_ns()
        engine = self._engine
        plan = self._planner.begin(engine)
        reports = list(_reports(scheduler_output))
        self._measure(engine, reports)
        for report, is_new in reports:
            state = self._states.get(report.request_id)
            if is_new:
                self._promises.check(
                    report.request_id, report.computed_position, engine.args.tokens_per_block
                )
            if state is None:
                continue
            self._states.move_to_end(report.request_id)
            if is_new and state.promise is not None:
                plan.add_load(state, report, self._promises.take(engine, state))
                continue
            with engine.boundary.around("a save"):
                plan.add(state, report, is_new=is_new)
                continue
            self._forget(report.request_id)
        self._promises.settle(engine)
        meta = plan.finish()
        engine.timings.plan.observe(time.perf_counter_ns() - began_ns)
        return meta

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Return whether a save still reads the blocks of the finished request; twice is fine."""
        self._forget(request.request_id)
        self._promises.forget(request.request_id)
        self._staging.forget(request.request_id)
        is_read = self._engine.is_being_read(request.request_id)
        if is_read:
            self._planner.pin(request.request_id)
        return is_read

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """See `request_finished`."""
        return self.request_finished(request, [])

    def request_reset(self, request: Any) -> None:
        """Forget a request whose blocks were taken away; it begins anew, or is asked about anew."""
        self._forget(request.request_id)
        self._promises.forget(request.request_id)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Keep less than was promised: the engine will not use the tokens from `start` to `end`."""
        state = self._states.get(request.request_id)
        if state is None or state.promise is None:
            return
        promise, size = state.promise, state.tokens_per_block
        if end >= promise.end * size:
            promise.end = min(promise.end, max(promise.first, -(-start // size)))
        elif start <= promise.first * size:
            # Of a block of which only a part is handed back all is loaded.
            promise.first = max(promise.first, end // size)
        if not promise.num_blocks:
            self._promises.release(self._engine, state)

    def wait_for_initialization(self) -> None:
        """Nothing to wait for: an engine without its tier starts all the same."""

    def shutdown(self) -> None:
        """Release what is promised and let go of the tier. Twice is fine."""
        for request_id in list(self._states):
            self._forget(request_id)
        if not self._is_shut_down:
            self._is_shut_down = True
            with self._engine.boundary.around("the end"):
                self._planner.close()
            self._staging.close()
            self._own_engine.close()

    def _match(self, engine: Engine, request: Any, num_computed_tokens: int) -> int:
        """Return how many tokens are promised to `request`, and count the rest by reason."""
        totals, tokens_per_block = engine.totals, engine.args.tokens_per_block
        identity = engine.identify(request)
        if identity is None:
            totals["bypassed_requests"] += 1
            note_bypassed(engine, request.request_id)
            return 0
        state = self._remember(engine, request.request_id, identity)
        tokens = request.get_tokens(0)
        keys = state.prompt_keys(tokens)
        wanted = keys[: promised_blocks_max(len(tokens), tokens_per_block)]
        first, rest = divmod(num_computed_tokens, tokens_per_block)
        reason = "unaligned"
        began, waited_s = time.monotonic(), self._staging.waited_s(request.request_id)
        if rest:
            self._warn_unaligned(num_computed_tokens)
        else:
            reason = self._promise(engine, state, request, wanted, first)
        stage_s = self._staging.waited_s(request.request_id)
        lease_s = time.monotonic() - began - (stage_s - waited_s)
        hit = state.promise.num_blocks * tokens_per_block if state.promise else 0
        totals["requests"] += 1
        totals["prompt_tokens"] += len(tokens)
        totals["local_tokens"] += num_computed_tokens
        totals["hit_tokens"] += hit
        if state.promise is not None:
            ways = runs_between(state.arrivals, state.promise.first, state.promise.end)
            for start, stop, way, _ in ways:
                totals[f"hit_tokens_from_{way}"] += (stop - start) * tokens_per_block
        missed = len(wanted) * tokens_per_block - num_computed_tokens - hit
        if missed > 0:
            totals[f"miss_tokens_{reason}"] += missed
        if wanted:
            state.opening = opening_digest(
                tokens, salt=identity.salt, lora=identity.lora, media=identity.media
            )
            if state.num_saved:
                engine.openings.note_stored(state.opening)
            elif reason == "not_stored":
                engine.openings.note_missed(state.opening, missed)
        note_request(
            engine,
            state,
            wanted=wanted,
            first=first,
            reason=reason,
            stage_s=stage_s,
            lease_s=lease_s,
        )
        return hit

    def _remember(self, engine: Engine, request_id: int, identity: Identity) -> RequestState:
        """Open the state of a request."""
        state = RequestState(
            request_id=request_id,
            seed=request_seed(engine.namespace_digest, salt=identity.salt, lora=identity.lora),
            tokens_per_block=engine.args.tokens_per_block,
            media=identity.media,
            tenant_id=identity.tenant_id,
            windowed=engine.windowed,
        )
        self._states[request_id] = state
        if len(self._states) > _STATES_MAX:
            self._drop_oldest()
        return state

    def _promise(
        self, engine: Engine, state: RequestState, request: Any, keys: list[Any], first: int
    ) -> str:
        """Promise what of `keys` is here after the first `first`; return why not more."""
        matched, reason = self._staging.match(
            engine, state.request_id, keys, first, tokens_per_s=self._prefill.tokens_per_s
        )
        if matched is None:
            return reason
        # A corrupt block, and what follows it, is saved anew when it is computed.
        state.num_found = state.num_saved = matched.end
        state.arrivals = matched.arrivals
        if matched.end <= first:
            release_prefix(engine, matched.prefix)
            return reason
        promise = Promise(
            prefix=matched.prefix,
            first=first,
            end=matched.end,
            request=request,
            is_parked=engine.loads_later,
        )
        self._promises.keep(engine, state, promise)
        if promise.is_parked:
            self._planner.park(state.request_id, promise)
        return reason

    def _measure(self, engine: Engine, reports: list[tuple[Any, bool]]) -> None:
        """Keep the engine's speed up to date, where it decides anything."""
        if engine.asks_peers:
            with engine.boundary.around("the speed of prefill"):
                num_tokens = sum(report.num_scheduled_tokens for report, _ in reports)
                requests = {report.request_id for report, _ in reports}
                self._prefill.plan(requests, num_tokens, time.monotonic())

    def _forget(self, request_id: int) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._promises.release(self._engine, state)

    def _drop_oldest(self) -> None:
        """Forget the request unseen for longest that the engine does not wait for."""
        for request_id, state in self._states.items():
            if state.promise is None:
                self._forget(request_id)
                return

    def _warn_unaligned(self, num_computed_tokens: int) -> None:
        if not self._warned_unaligned:
            self._warned_unaligned = True
            _log.warning(
                "kvray: the engine has %d tokens of a prompt, which is no whole number of blocks;"
                " such requests load nothing. Set kv_cache_config.enable_partial_reuse: false.",
                num_computed_tokens,
            )


def _reports(scheduler_output: Any) -> Iterator[tuple[Any, bool]]:
    """Yield (a request's report, whether it is its first) of one pass."""
    for report in getattr(scheduler_output, "new_requests", None) or ():
        yield report, True
    for report in getattr(scheduler_output, "cached_requests", None) or ():
        yield report, False
