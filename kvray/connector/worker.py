"""Every rank's half of the connector, in TensorRT-LLM's own calls; `engine.rank` does the work."""

from typing import TYPE_CHECKING, Any

from kvray.connector.base import KvCacheConnectorWorker
from kvray.connector.read_layout import layout_of_tensor, read_layout
from kvray.connector.refusals import refuse_flat_pool, refuse_layout
from kvray.connector.start import state_for
from kvray.engine.meta import ConnectorMeta
from kvray.engine.rank import RankWorker
from kvray.engine.shared_state import SharedState, shut_down_at_exit

if TYPE_CHECKING:
    import torch


class KvRayWorker(KvCacheConnectorWorker):
    """`connector_worker_class` for `KvCacheConnectorConfig`; one on every rank.

    This engine cannot be told that a load failed. What does not have the promised bytes is raised
    in every call from then on, before and after the pass: wrong tokens would follow. A runtime may
    fail the requests of the pass and go on, with their pages in its own reuse tree.
    """

    supports_attention_dp = True

    config_path: str | None = None  # configuration file; None: what `load_config` finds

    def __init__(self, llm_args: Any) -> None:
        """Attach to the node's tier, touch no device; ConfigError: a setting cannot be used."""
        super().__init__(llm_args)
        self._rank = RankWorker(state_for(llm_args, self.config_path))
        shut_down_at_exit(self)

    def register_kv_caches(self, kv_cache_tensor: "torch.Tensor") -> None:
        """Take the pool, shaped [num_blocks, num_layers, kv_factor, block_elems].

        ConfigError: kvray cannot serve it. LayoutMismatch: as `SharedState.register`.
        """
        refuse_flat_pool(self._shared.args, tuple(kv_cache_tensor.shape))
        layout = layout_of_tensor(
            kv_cache_tensor,
            may_be_latent=self._may_be_latent,
            is_head_major=self._is_head_major,
        )
        self._rank.register(layout)

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Take a cache with layer groups, a `KvCacheLayout`; errors as `register_kv_caches`."""
        read = read_layout(
            layout, may_be_latent=self._may_be_latent, is_head_major=self._is_head_major
        )
        refuse_layout(self._shared.args, read)
        self._rank.register(read)

    def start_load_kv(self, stream: Any) -> None:
        """Begin to copy what the bound metadata promises; what is saved of the pass is noted.

        Twice for one metadata is fine. LayoutMismatch (the promise is of another layout than this
        rank's pool), LeaseExpired and CorruptBlock stop the engine: wrong tokens would follow.
        """
        if isinstance(self._metadata, ConnectorMeta):
            self._rank.begin(self._metadata, stream)
            self._stop_if_failed()

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Have what follows on `stream` wait for the layer's loaded bytes."""
        self._rank.wait_for_layer(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a block is saved whole, after the pass."""

    def wait_for_save(self, stream: Any) -> None:
        """Save the blocks that this pass filled, see `RankWorker.end`.

        The engine must not go on after LayoutMismatch (the pass did not wait for all that it
        needed), CorruptBlock or LeaseExpired (what it loaded may be wrong).
        """
        if self._metadata is self._rank.started:
            self._rank.end(stream)
            self._stop_if_failed()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests whose blocks are read no more; none waits for a load.

        Each id is returned once, after it was handed in. Raises as `wait_for_save`, after which not
        every runtime ends the engine.
        """
        ended = self._rank.read_ended(finished_gen_req_ids)
        self._stop_if_failed()
        return ended, []

    def take_failed_load_requests(self) -> set[int]:
        """Return no request: a load that fails in its pass is raised, before the pass."""
        return set()

    def take_failed_async_load_requests(self) -> set[int]:
        """Return no request: none waits for a load."""
        return set()

    def shutdown(self) -> None:
        """Flush saves for a bounded time and let go of the tier. Twice is fine."""
        self._rank.close()

    @property
    def _shared(self) -> SharedState:
        return self._rank.shared

    @property
    def _may_be_latent(self) -> bool:
        return self._shared.args.checkpoint.is_mla is not False

    @property
    def _is_head_major(self) -> bool:
        """Whether a layer's keys are one head after the other, each with its tokens.

        Source: `getKVLocalIdx` in `kvCacheUtils.h`. FLASHINFER had the tokens first up to 1.1, and
        sparse attention may have them so.
        """
        args = self._shared.args
        return args.attention_backend in ("TRTLLM", "default") and not args.is_sparse

    def _stop_if_failed(self) -> None:
        for error in self._rank.failed:
            raise error
