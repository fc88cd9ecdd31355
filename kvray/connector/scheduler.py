"""The leader's half of the connector, in TensorRT-LLM's own calls; `engine.leader` does the work.

They all come on the executor thread.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from kvray.connector.base import KvCacheConnectorScheduler
from kvray.connector.request import NO_REQUEST, RequestReader, id_of, only_generates
from kvray.connector.start import state_for
from kvray.engine.leader import Leader
from kvray.engine.meta import ConnectorMeta
from kvray.engine.request import RequestState
from kvray.engine.shared_state import SharedState, shut_down_at_exit
from kvray.errors import ConfigError
from kvray.identity.keys import request_seed
from kvray.trace.reasons import DropReason


class KvRayScheduler(KvCacheConnectorScheduler):
    """`connector_scheduler_class` for `KvCacheConnectorConfig`.

    On rank 0, or with attention data parallelism on every rank, for that rank's own requests.
    """

    supports_attention_dp = True

    config_path: str | None = None  # configuration file; None: what `load_config` finds

    def __init__(self, llm_args: Any) -> None:
        """Attach to the node's tier if there is one; ConfigError: a setting cannot be used."""
        super().__init__(llm_args)
        self._leader = Leader(state_for(llm_args, self.config_path))
        self._reader = RequestReader(self._shared.args)
        shut_down_at_exit(self)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens after the engine's own are promised; no request waits for them.

        That is the longest prefix of the prompt that is leased for every rank.
        """
        request_id = id_of(request)
        if request_id == NO_REQUEST:
            self._shared.figures.totals["bypassed_requests"] += 1
            return 0, False
        read = partial(self._reader.read, request, num_computed_tokens)
        hit = self._leader.match(request_id, read, partial(_num_taken, request)) or 0
        return hit, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Note the pages of a request, and check its promise against the engine's own request.

        The first cache manager asks with a copy of it, which lacks what Python knows of it.
        ConfigError: it was promised tokens, and has media that the copy did not show.
        """
        self.update_state_after_alloc_by_layer_group(request, [block_ids])
        state = self._leader.states.get(id_of(request))
        if state is not None and self._shared.identity.is_flat:
            self._confirm(state, request)

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        """Note the pages of a request, in case its reports do not name them."""
        with self._shared.boundary.around("an allocation"):
            state = self._leader.states.get(id_of(request))
            if state is not None and (state.is_reported or only_generates(request)):
                # Another request of this id, which was not asked about: it has other tokens.
                self._leader.forget(state.request_id)
            elif state is not None:
                state.allocated = block_ids_by_layer_group

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMeta:
        """Return what the workers load before and save after the coming pass; as `Leader.plan`."""
        return self._leader.plan(list(_reports(scheduler_output)))

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Return False: the engine may have its blocks at once, as the next pass waits for saves.

        Asked to keep them, the first cache manager would keep equal blocks of its tree in their
        place, and before 1.3.0rc11 give those to two owners.

        Source: `WindowBlockManager::storeBlocks` with `pinBlocks`, and `unpinBlocksById`.
        """
        self._leader.finish(id_of(request))
        return False

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        """As `request_finished`, which does not need the blocks."""
        return self.request_finished(request, [])

    def request_reset(self, request: Any) -> None:
        """Forget a request whose blocks were taken away, or whose promise is to be replaced."""
        self._leader.reset(id_of(request))

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Keep less than was promised: the engine will not use the tokens from `start` to `end`."""
        self._leader.cancel(id_of(request), start, end)

    def wait_for_initialization(self) -> None:
        """Return at once: an engine starts without its tier all the same."""

    def shutdown(self) -> None:
        """Release what is promised and let go of the tier. Twice is fine."""
        self._leader.close()

    @property
    def _shared(self) -> SharedState:
        return self._leader.shared

    def _confirm(self, state: RequestState, request: Any) -> None:
        """Check that the request is the one that was keyed; save nothing of it if it is not."""
        shared, shown = self._shared, None
        with shared.boundary.around("a request"):
            shown = self._reader.identify(request, with_told=False)
            shown = None if shown is None else shared.under_tenant(shown)
        # Whatever is said of media changes nothing before the first of them.
        unlike_at: int | None = min((item.position for item in state.media), default=0)
        if shown is None:
            self._reader.hides_media |= not state.media
        else:
            seed = request_seed(state.namespace, salt=shown.salt, lora=shown.lora)
            unlike_at = state.unlike_at(seed, shown.media)
        if unlike_at is None:
            return
        state.unsaved = DropReason.NOT_SHOWN
        if state.promise is not None and state.promise.end * state.tokens_per_block > unlike_at:
            raise ConfigError(
                f"Request {state.request_id} was promised tokens as one of text and has more than"
                " text; the engine must not go on. Set kv_cache_config.use_kv_cache_manager_v2:"
                " true where there is one, or serve this model without kv_connector_config."
            )


def _num_taken(request: Any) -> object:
    """Return how many tokens of an offer the engine took.

    Source: `commit_new_matched_tokens`, which notes it at the request.
    """
    return getattr(request, "py_num_connector_matched_tokens", None)


def _reports(scheduler_output: Any) -> Iterator[tuple[Any, bool]]:
    """Yield (a request's report, whether it is its first) of one pass."""
    for report in getattr(scheduler_output, "new_requests", None) or ():
        yield report, True
    for report in getattr(scheduler_output, "cached_requests", None) or ():
        yield report, False
