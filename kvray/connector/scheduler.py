"""The leader's half of the connector: matches prompts, promises what is leased, plans each pass.

Everything here runs on the engine's executor thread and makes no remote call; nothing waits
longer than the arena's `lock_wait_s`.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvray.block import BlockKey
from kvray.connector.base import KvCacheConnectorScheduler
from kvray.connector.engine import (
    Engine,
    engine_for,
    fingerprints_dir,
    registered_engine,
    release_leases,
    shut_down_at_exit,
)
from kvray.connector.identity import identify
from kvray.connector.plan import (
    ConnectorMeta,
    LoadPlan,
    Promise,
    RequestState,
    SavePlan,
    promised_blocks_max,
)
from kvray.fingerprint import fingerprint_model
from kvray.keys import request_seed

_log = logging.getLogger("kvray.connector")

_STATES_MAX = 8192
"""Requests remembered at once. Cancelled ones end without a call; those unseen for longest go."""


class KvRayScheduler(KvCacheConnectorScheduler):
    """`connector_scheduler_class` for `KvCacheConnectorConfig`; on rank 0 only."""

    config_path: str | None = None
    """Configuration file; None: what `load_config` finds."""

    def __init__(self, llm_args: Any) -> None:
        """Attach to the node's tier if there is one.

        Raises:
            ConfigError: a setting cannot be used; the engine's start-up fails with the sentence.
        """
        super().__init__(llm_args)
        self._engine = engine_for(llm_args, self.config_path)
        self._states: OrderedDict[int, RequestState] = OrderedDict()
        self._promising: dict[int, RequestState] = {}
        self._namespace = b""
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
            (tokens after `num_computed_tokens` that will be loaded, False: before this pass).
        """
        self._forget(request.request_id)
        with self._engine.boundary.around("a request"):
            engine = registered_engine(self._engine)
            self._namespace = engine.namespace_digest
            return self._match(engine, request, num_computed_tokens), False
        self._forget(request.request_id)  # what was not answered is not promised either
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Nothing: the blocks of synchronous loads stand in the coming pass's report."""

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMeta:
        """Return what the workers load before and save after the coming pass.

        Raises:
            LayoutMismatch: what was promised has no place to go. The engine counts on it and
                cannot be told, so it must not go on.
        """
        loads: list[LoadPlan] = []
        saves: list[SavePlan] = []
        for report, is_new in _reports(scheduler_output):
            state = self._states.get(report.request_id)
            if state is None:
                continue
            self._states.move_to_end(report.request_id)
            if is_new and state.promise is not None:
                self._plan(state, report, is_new, loads, saves)
                continue
            with self._engine.boundary.around("a save"):
                self._plan(state, report, is_new, loads, saves)
                continue
            self._forget(report.request_id)
        return self._hand_over(loads, saves)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Return False: what is saved of a request was read at the end of each of its passes."""
        self._forget(request.request_id)
        return False

    def wait_for_initialization(self) -> None:
        """Nothing to wait for: an engine without its tier starts all the same."""

    def shutdown(self) -> None:
        """Release what is promised and let go of the tier. Twice is fine."""
        for request_id in list(self._states):
            self._forget(request_id)
        if not self._is_shut_down:
            self._is_shut_down = True
            self._engine.close()

    def _match(self, engine: Engine, request: Any, num_computed_tokens: int) -> int:
        """Return how many tokens are promised to `request`, and count the rest by reason."""
        totals = engine.totals
        state = self._remember(engine, request)
        if state is None:
            totals["bypassed_requests"] += 1
            return 0
        tokens_per_block = state.tokens_per_block
        keys = state.prompt_keys(request.get_tokens(0))
        wanted = keys[: promised_blocks_max(state.num_tokens, tokens_per_block)]
        reason = "unaligned"
        if num_computed_tokens % tokens_per_block:
            self._warn_unaligned(num_computed_tokens)
        else:
            reason = self._lease(engine, state, wanted, num_computed_tokens // tokens_per_block)
        hit = state.promise.num_blocks * tokens_per_block if state.promise else 0
        totals["requests"] += 1
        totals["prompt_tokens"] += state.num_tokens
        totals["local_tokens"] += num_computed_tokens
        totals["hit_tokens"] += hit
        missed = len(wanted) * tokens_per_block - num_computed_tokens - hit
        if missed > 0:
            totals[f"miss_tokens_{reason}"] += missed
        return hit

    def _remember(self, engine: Engine, request: Any) -> RequestState | None:
        """Open the state of a request; None if it cannot be told what enters its KV."""
        identity = identify(
            request, lambda path: fingerprint_model(path, cache_dir=fingerprints_dir())
        )
        if identity is None:
            return None
        state = RequestState(
            request_id=request.request_id,
            seed=request_seed(self._namespace, salt=identity.salt, lora=identity.lora),
            tokens_per_block=engine.args.tokens_per_block,
            media=identity.media,
        )
        self._states[state.request_id] = state
        if len(self._states) > _STATES_MAX:
            self._forget(next(iter(self._states)))
        return state

    def _lease(self, engine: Engine, state: RequestState, keys: list[BlockKey], first: int) -> str:
        """Lease the run of `keys` that is here and promise what lies after `first`.

        Returns:
            Why what lies after it is missing.
        """
        if not engine.args.block_reuse:
            return "reuse_disabled"
        arena = engine.link.arena
        if arena is None:
            return "store_down"
        if len(keys) <= first:
            return "none"
        leases = arena.lease(keys, num_parts=engine.args.num_ranks)
        if leases is None:
            return "arena_busy"
        if not leases:
            return "not_stored"
        found = run = leases[0].num_slots
        # Entered before anything can fail: what is leased is released with its promise.
        state.promise = Promise(
            arena=arena, leases=tuple(leases), first=first, num_blocks=max(0, found - first)
        )
        self._promising[state.request_id] = state
        if found > first and engine.verifies_loads:
            run = first + min(arena.sound_run(one, first=first) for one in leases)
            state.promise = replace(state.promise, num_blocks=run - first)
        # A corrupt block, and what follows it, is saved anew when it is computed.
        state.num_saved = run
        if run <= first:
            self._release(state)
        return "corrupt" if run < found else "not_stored"

    def _plan(
        self,
        state: RequestState,
        report: Any,
        is_new: bool,
        loads: list[LoadPlan],
        saves: list[SavePlan],
    ) -> None:
        """Add what one request needs in the coming pass."""
        state.extend(report.new_tokens, report.new_block_ids, new=is_new)
        start = report.computed_position
        if is_new and state.promise is not None:
            load = state.take_load(start)
            if load is not None:
                loads.append(load)
            # The engine subtracts what it was offered, whether or not it took it.
            start += state.promise.num_blocks * state.tokens_per_block
        save = state.take_save(start + report.num_scheduled_tokens)
        if save is not None:
            saves.append(save)

    def _hand_over(self, loads: list[LoadPlan], saves: list[SavePlan]) -> ConnectorMeta:
        """Leave the leases of `loads` to the workers, and release what no load took."""
        for load in loads:
            self._promising.pop(load.request_id).promise = None
        for state in list(self._promising.values()):
            self._release(state)
        return ConnectorMeta(namespace=self._namespace, loads=tuple(loads), saves=tuple(saves))

    def _forget(self, request_id: int) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._release(state)

    def _release(self, state: RequestState) -> None:
        """Give a promise up; the leases go now, or from the background if the arena is busy."""
        promise, state.promise = state.promise, None
        self._promising.pop(state.request_id, None)
        if promise is not None:
            release_leases(self._engine, promise.arena, *promise.leases)

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
