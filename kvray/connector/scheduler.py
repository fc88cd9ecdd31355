"""The leader's half of the connector: matches prompts, promises what is leased, plans each pass.

Everything here runs on the engine's executor thread. Nothing waits longer than the arena's
`lock_wait_s`, except for blocks that the shard stages: at most `stage_wait_s` a request.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from kvray.connector.base import KvCacheConnectorScheduler
from kvray.connector.meta import ConnectorMeta
from kvray.connector.pass_plan import PassPlanner
from kvray.connector.prefill_rate import PrefillRate
from kvray.connector.prefix_finder import PrefixFinder, PromptQuery
from kvray.connector.promise import Promise
from kvray.connector.promises import Promises
from kvray.connector.request.fields import NO_REQUEST, id_of, only_generates
from kvray.connector.request_identifier import AskedRequest
from kvray.connector.request_outcome import record_answer, record_bypassed
from kvray.connector.request_state import RequestState
from kvray.connector.shared_state import registered_state, shared_state_for, shut_down_at_exit
from kvray.errors import ConfigError
from kvray.identity.block import BlockKey
from kvray.identity.keys import request_seed
from kvray.trace.prefix_digest import prefix_digest
from kvray.trace.reasons import DropReason, MissReason

_log = logging.getLogger("kvray.connector")

_STATES_MAX = 8192
"""Requests remembered at once. Cancelled ones end without a call; those unseen for longest go."""


class KvRayScheduler(KvCacheConnectorScheduler):
    """`connector_scheduler_class` for `KvCacheConnectorConfig`.

    On rank 0, or with attention data parallelism on every rank, for that rank's own requests.
    """

    supports_attention_dp = True

    config_path: str | None = None  # configuration file; None: what `load_config` finds

    def __init__(self, llm_args: Any) -> None:
        """Attach to the node's tier if there is one; ConfigError: a setting cannot be used."""
        super().__init__(llm_args)
        self._own_shared = self._shared = shared_state_for(llm_args, self.config_path)
        self._states: OrderedDict[int, RequestState] = OrderedDict()
        self._promises = Promises()
        self._finder = PrefixFinder()
        self._planner = PassPlanner(self._finder)
        self._prefill = PrefillRate()
        self._warned_unaligned = False
        self._is_shut_down = False
        shut_down_at_exit(self)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens after the engine's own are promised, and whether to park for them.

        That is the longest prefix of the prompt that is leased for every rank.
        """
        began_ns = time.perf_counter_ns()
        request_id = id_of(request)
        if request_id == NO_REQUEST:
            self._shared.figures.totals["bypassed_requests"] += 1
            return 0, False
        self.request_reset(request)
        with self._shared.boundary.around("a request"):
            self._shared = registered_state(self._shared)
            hit = self._match(request, num_computed_tokens)
            self._shared.figures.match_times.observe(time.perf_counter_ns() - began_ns)
            return hit, hit > 0 and self._shared.loads_later
        self._forget(request_id)  # what was not answered is not promised either
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Note the pages of a request, and check its promise against the engine's own request.

        The first cache manager asks with a copy of it, which lacks what Python knows of it.
        ConfigError: it was promised tokens, and has media that the copy did not show.
        """
        self.update_state_after_alloc_by_layer_group(request, [block_ids])
        state = self._states.get(id_of(request))
        if state is not None and self._shared.pool.is_flat:
            self._confirm(state, request)

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """Note the pages of a request, in case its reports do not name them."""
        with self._shared.boundary.around("an allocation"):
            state = self._states.get(id_of(request))
            if state is not None and (state.is_reported or only_generates(request)):
                # Another request of this id, which was not asked about: it has other tokens.
                self._forget(state.request_id)
            elif state is not None:
                state.allocated = block_ids_by_layer_group

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMeta:
        """Return what the workers load before and save after the coming pass.

        LayoutMismatch, LeaseExpired: a promise has no place to go, or its lease has ended. The
        engine counts on it and cannot be told, so it must not go on.
        """
        began_ns = time.perf_counter_ns()
        shared = self._shared
        plan = self._planner.begin(shared)
        reports = list(_reports(scheduler_output))
        self._measure(reports)
        for report, is_new in reports:
            state = self._states.get(report.request_id)
            if is_new or state is None or not state.is_reported:
                self._promises.check(shared, report.request_id, report.computed_position)
            if state is None:
                continue
            self._states.move_to_end(report.request_id)
            if state.promise is not None:
                plan.add_load(state, report, self._promises.take(shared, state), is_new=is_new)
                continue
            with shared.boundary.around("a save"):
                plan.add(state, report, is_new=is_new)
                continue
            self._forget(report.request_id)
        self._promises.settle(shared)
        meta = plan.finish()
        shared.figures.plan_times.observe(time.perf_counter_ns() - began_ns)
        return meta

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Return whether a save still reads the blocks of the finished request; twice is fine."""
        request_id = id_of(request)
        self._forget(request_id)
        self._promises.forget(request_id)
        self._finder.forget(request_id)
        is_read = self._shared.is_being_read(request_id)
        if is_read:
            self._planner.pin(request_id)
        return is_read

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """As `request_finished`, which does not need the blocks."""
        return self.request_finished(request, [])

    def request_reset(self, request: Any) -> None:
        """Forget a request whose blocks were taken away, or whose promise is to be replaced."""
        self._forget(id_of(request))
        self._promises.forget(id_of(request))

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Keep less than was promised: the engine will not use the tokens from `start` to `end`."""
        state = self._states.get(id_of(request))
        if state is None or state.promise is None:
            return
        state.promise.cancel(start, end, state.tokens_per_block)
        if not state.promise.num_blocks:
            self._promises.release(self._shared, state)

    def wait_for_initialization(self) -> None:
        """Return at once: an engine starts without its tier all the same."""

    def shutdown(self) -> None:
        """Release what is promised and let go of the tier. Twice is fine."""
        for request_id in list(self._states):
            self._forget(request_id)
        if not self._is_shut_down:
            self._is_shut_down = True
            self._promises.close()
            with self._shared.boundary.around("the end"):
                self._planner.close()
            self._finder.close()
            self._own_shared.close()

    def _match(self, request: Any, num_computed_tokens: int) -> int:
        """Promise what can be loaded of a prompt, record it, and return how many tokens it is."""
        shared = self._shared
        asked = shared.identifier.read(request, num_computed_tokens)
        if asked is None:
            record_bypassed(shared, request.request_id)
            return 0
        if not shared.pool.complete_namespace():
            record_answer(shared, asked, reason="fingerprinting")
            return 0
        state = self._remember(asked)
        keys = state.prompt_keys(asked.tokens)[: asked.num_askable(state.tokens_per_block)]
        first = asked.num_computed // state.tokens_per_block
        state.asked = len(asked.tokens), len(keys), first
        began, waited_s = time.monotonic(), self._finder.waited_s(asked.request_id)
        reason = self._promise(state, request, keys, num_computed_tokens)
        stage_s = self._finder.waited_s(asked.request_id)
        lease_s = time.monotonic() - began - (stage_s - waited_s)
        record_answer(
            shared, asked, reason=reason, state=state, keys=keys, stage_s=stage_s, lease_s=lease_s
        )
        return state.promise.num_blocks * state.tokens_per_block if state.promise else 0

    def _remember(self, asked: AskedRequest) -> RequestState:
        shared, identity = self._shared, asked.identity
        size, seed = shared.args.tokens_per_block, shared.pool.namespace_digest
        state = RequestState(
            request_id=asked.request_id,
            seed=request_seed(seed, salt=identity.salt, lora=identity.lora),
            tokens_per_block=size,
            media=identity.media,
            tenant_id=identity.tenant_id,
            block_tokens=shared.figures.block_tokens if identity.is_plain else None,
            windowed=shared.pool.windowed,
        )
        if asked.num_askable(size):
            state.prefix_digest = prefix_digest(
                asked.tokens, salt=identity.salt, lora=identity.lora, media=identity.media
            )
        self._states[asked.request_id] = state
        if len(self._states) > _STATES_MAX:
            self._drop_oldest()
        return state

    def _promise(
        self, state: RequestState, request: Any, keys: list[BlockKey], num_computed_tokens: int
    ) -> MissReason:
        """Promise what of `keys` is here after the engine's own tokens; return why not more."""
        shared = self._shared
        first, rest = divmod(num_computed_tokens, state.tokens_per_block)
        if rest:
            self._warn_unaligned(num_computed_tokens)
            return "unaligned"
        query = PromptQuery(state.request_id, keys, first, self._prefill.tokens_per_s)
        matched, reason = self._finder.find(shared, query)
        if matched is None:
            return reason
        # A corrupt block, and what follows it, is saved again once it is computed.
        state.num_found = state.num_saved = matched.end
        state.arrivals = matched.arrivals
        if matched.end <= first:
            shared.release_prefix(matched.prefix)
            return reason
        promise = Promise(
            prefix=matched.prefix,
            first=first,
            end=matched.end,
            request=request,
            is_parked=shared.loads_later,
        )
        self._promises.keep(shared, state, promise)
        if promise.is_parked:
            self._planner.park(state.request_id, promise)
        return reason

    def _confirm(self, state: RequestState, request: Any) -> None:
        """Check that the request is the one that was keyed; save nothing of it if it is not."""
        shared, shown = self._shared, None
        with shared.boundary.around("a request"):
            shown = shared.identifier.identify(request)
        unlike_at: int | None = 0
        if shown is None:
            shared.identifier.hides_media = True
        else:
            digest = shared.pool.namespace_digest
            seed = request_seed(digest, salt=shown.salt, lora=shown.lora)
            unlike_at = state.unlike_at(seed, shown.media)
        if unlike_at is None:
            return
        state.is_unsaved = True
        if state.promise is not None and state.promise.end * state.tokens_per_block > unlike_at:
            raise ConfigError(
                f"Request {state.request_id} was promised tokens as one of text and has more than"
                " text; the engine must not go on. Set kv_cache_config.use_kv_cache_manager_v2:"
                " true where there is one, or serve this model without kv_connector_config."
            )

    def _measure(self, reports: list[tuple[Any, bool]]) -> None:
        """Keep the engine's speed up to date, where it decides anything."""
        if self._shared.may_stage:
            with self._shared.boundary.around("the speed of prefill"):
                num_tokens = sum(report.num_scheduled_tokens for report, _ in reports)
                requests = {report.request_id for report, _ in reports}
                self._prefill.plan(requests, num_tokens, time.monotonic())

    def _forget(self, request_id: int) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._promises.release(self._shared, state)
            if state.is_reported:  # else it may be asked about again
                self._shared.figures.prompts.note(state.keys, *state.asked)
            is_down = self._shared.link.arena is None
            reason = DropReason.STORE_DOWN if is_down else DropReason.NO_PAGE
            self._shared.figures.dropped.count(state.num_full - state.num_saved, reason)

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
