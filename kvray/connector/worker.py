"""Every rank's half of the connector: copies promised blocks in, and computed blocks out.

The pool is written by the engine's executor thread alone, and only for requests of the metadata
bound to this pass. It is read by the saver's thread, while the executor's waits in `wait_for_save`.
"""

import logging
from typing import TYPE_CHECKING, Any

from kvray.connector.base import KvCacheConnectorWorker
from kvray.connector.engine import engine_for, release_leases, shut_down_at_exit
from kvray.connector.plan import ConnectorMeta, LoadPlan, unpack_ids
from kvray.connector.pool import Pool, open_pool
from kvray.connector.saver import Job, Saver
from kvray.errors import LayoutMismatch, LeaseExpired

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvray.connector")

_FLUSH_S = 5.0


class KvRayWorker(KvCacheConnectorWorker):
    """`connector_worker_class` for `KvCacheConnectorConfig`; one on every rank."""

    config_path: str | None = None
    """Configuration file; None: what `load_config` finds."""

    def __init__(self, llm_args: Any) -> None:
        """Attach to the node's tier if there is one; touches no device.

        Raises:
            ConfigError: a setting cannot be used; the engine's start-up fails with the sentence.
        """
        super().__init__(llm_args)
        self._engine = engine_for(llm_args, self.config_path)
        self._namespace = b""
        self._pool: Pool | None = None
        self._saver: Saver | None = None
        self._started: object | None = None
        self._saved: object | None = None
        self._is_shut_down = False
        shut_down_at_exit(self)

    def register_kv_caches(self, kv_cache_tensor: "torch.Tensor") -> None:
        """Take the pool, shaped [num_blocks, num_layers, kv_factor, block_elems].

        Raises:
            ConfigError: the pool's layout, or a model that cannot be told from others.
            LayoutMismatch: another replica claims the same `model_key` with another layout.
        """
        engine = self._engine
        pool = open_pool(kv_cache_tensor)
        self._namespace = engine.register(
            shape=tuple(kv_cache_tensor.shape),
            dtype=str(kv_cache_tensor.dtype).removeprefix("torch."),
            block_bytes=pool.block_bytes,
            is_host=pool.is_host,
        ).digest()
        self._close_saver()
        self._pool = pool
        self._saver = Saver(
            engine.link,
            part=engine.args.rank,
            saves_max=engine.config.connector.saves_max,
            totals=engine.totals,
        )

    def start_load_kv(self, stream: Any) -> None:
        """Copy what the bound metadata promises; the blocks are in place when this returns.

        Called twice for one metadata it does nothing the second time.

        Raises:
            LayoutMismatch: the promise is of another layout than this rank's pool.
            LeaseExpired: what was promised is gone; wrong tokens would follow, so the engine stops.
            CorruptBlock: likewise, the bytes changed under a lease.
        """
        meta = self._metadata
        if not isinstance(meta, ConnectorMeta) or meta is self._started:
            return
        self._started = meta
        try:
            for plan in meta.loads:
                self._load(plan, meta.namespace)
        finally:
            self._release(meta.loads)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: `start_load_kv` returns when every layer is in place."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a block is saved whole, after the pass."""

    def wait_for_save(self, stream: Any) -> None:
        """Save the blocks that this pass filled; what can be read later is not waited for.

        Blocks in host memory are read before this returns: the engine may free those of a
        cancelled request right after, and tells nobody.
        """
        meta = self._metadata
        if not isinstance(meta, ConnectorMeta) or meta is self._saved:
            return
        self._saved = meta
        if self._pool is None or self._saver is None or meta.namespace != self._namespace:
            return
        with self._engine.boundary.around("a save"):
            for plan in meta.saves:
                rows, block_ids = self._pool.source(unpack_ids(plan.block_ids))
                job = Job(plan=plan, rows=rows, block_ids=block_ids, is_lent=self._pool.is_host)
                self._saver.submit(job)
        if meta.saves and self._pool.is_host:
            self._saver.fence()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests that are done: those just finished, as nothing outlives a pass.

        Takes no lock and makes no call. Nothing is ever loaded asynchronously.
        """
        return list(finished_gen_req_ids), []

    def shutdown(self) -> None:
        """Flush saves for a bounded time and let go of the tier. Twice is fine."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._close_saver()
        self._engine.unregister()
        self._engine.close()

    def _load(self, plan: LoadPlan, namespace: bytes) -> None:
        engine, pool = self._engine, self._pool
        if pool is None or namespace != self._namespace:
            raise LayoutMismatch(
                "The leader promised blocks of another namespace than this rank's pool; give every"
                " rank the same engine arguments."
            )
        arena = engine.link.arena_named(plan.arena_id)
        if arena is None:
            raise LeaseExpired(
                f"Arena {plan.arena_id}, of which the leader promised blocks, is not attached here;"
                " every rank must see its leader's arena."
            )
        block_ids = unpack_ids(plan.block_ids)
        lease = plan.leases[engine.args.rank]
        pool.load(arena, lease, block_ids, first=plan.first, verify=engine.verifies_loads)
        engine.totals["loaded_blocks"] += len(block_ids)

    def _release(self, loads: tuple[LoadPlan, ...]) -> None:
        """End this rank's leases of a pass, each once, also when a load failed."""
        for arena_id in {plan.arena_id for plan in loads}:
            arena = self._engine.link.arena_named(arena_id)
            if arena is not None:
                rank = self._engine.args.rank
                own = [plan.leases[rank] for plan in loads if plan.arena_id == arena_id]
                release_leases(self._engine, arena, *own)

    def _close_saver(self) -> None:
        if self._saver is not None:
            self._saver.close(_FLUSH_S)
            self._saver = None
