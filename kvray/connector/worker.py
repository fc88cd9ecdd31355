"""Every rank's half of the connector: copies promised blocks in, and computed blocks out.

The pool is written by the engine's executor thread alone, and only for requests of the metadata
bound to this pass. It is read by the saver's thread, fenced off as `saver` says.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvray.connector.base import KvCacheConnectorWorker
from kvray.connector.device.gpu import Pool, open_pool
from kvray.connector.key_board import read_keys
from kvray.connector.loader import Loader, release_plans
from kvray.connector.meta import Board, ConnectorMeta, KeyRun
from kvray.connector.model.cache_layout import CacheLayout, Part
from kvray.connector.model.read_layout import layout_of_tensor, read_layout
from kvray.connector.model.refusals import refuse_flat_pool
from kvray.connector.parking import Parking
from kvray.connector.saver import Job, Saver
from kvray.connector.shared_state import shared_state_for, shut_down_at_exit
from kvray.errors import ConfigError, LayoutMismatch
from kvray.identity.block import BlockKey, namespace_id, split_keys
from kvray.store import Arena
from kvray.trace.reasons import DropReason

if TYPE_CHECKING:
    import torch

_FLUSH_S = 5.0


class KvRayWorker(KvCacheConnectorWorker):
    """`connector_worker_class` for `KvCacheConnectorConfig`; one on every rank."""

    supports_attention_dp = True

    config_path: str | None = None  # configuration file; None: what `load_config` finds

    def __init__(self, llm_args: Any) -> None:
        """Attach to the node's tier, touch no device; ConfigError: a setting cannot be used."""
        super().__init__(llm_args)
        self._shared = shared_state_for(llm_args, self.config_path)
        self._parts: tuple[Part, ...] = ()
        self._pool: Pool | None = None
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._attended: Arena | None = None
        self._parking = Parking(self._shared)
        self._started: object | None = None
        self._saved: object | None = None
        self._jobs: list[Job] = []
        self._saving: list[int] = []
        self._is_shut_down = False
        shut_down_at_exit(self)

    def register_kv_caches(self, kv_cache_tensor: "torch.Tensor") -> None:
        """Take the pool, shaped [num_blocks, num_layers, kv_factor, block_elems].

        ConfigError: kvray cannot serve it. LayoutMismatch: as `RegisteredPool.register`.
        """
        refuse_flat_pool(self._shared.args, tuple(kv_cache_tensor.shape))
        self._register(layout_of_tensor(kv_cache_tensor, may_be_latent=self._may_be_latent))

    def register_kv_cache_layout(self, layout: Any) -> None:
        """Take a cache with layer groups, a `KvCacheLayout`; errors as `register_kv_caches`."""
        read = read_layout(layout, may_be_latent=self._may_be_latent)
        if read.tokens_per_block != self._shared.args.tokens_per_block:
            raise ConfigError(
                f"The KV cache has {read.tokens_per_block} tokens in a block, the engine's"
                f" arguments say {self._shared.args.tokens_per_block}; set"
                " kv_cache_config.tokens_per_block to what the cache has."
            )
        self._register(read)

    def start_load_kv(self, stream: Any) -> None:
        """Begin to copy what the bound metadata promises; what is saved of the pass is noted.

        Twice for one metadata is fine. LayoutMismatch (the promise is of another layout than this
        rank's pool), LeaseExpired and CorruptBlock stop the engine: wrong tokens would follow.
        """
        meta = self._metadata
        if not isinstance(meta, ConnectorMeta) or meta is self._started:
            return
        was_dropped = self._started is not None and self._started is not self._saved
        self._started, self._jobs = meta, []
        for release in meta.releases:
            if release.rank == self._shared.args.part_rank:
                self._shared.release_at(release.arena_id, release.lease)
        pool, saver, loader = self._pool, self._saver, self._loader
        shared = self._shared
        if pool is None or saver is None or loader is None or not shared.pool.may_load(meta):
            self._refuse(meta)
            return
        shared.pool.follow(meta.replica)
        if meta.is_fenced or was_dropped:
            saver.fence()
            pool.fence(stream)
        self._attend()
        for park in meta.parks:
            self._parking.begin(park)
        loader.load(meta.loads, stream)
        if meta.saves and shared.pool.namespace_digest:
            saver.namespace = namespace_id(shared.pool.namespace_digest)
            with self._shared.boundary.around("a save"):
                self._jobs = list(self._jobs_of(pool, meta))
                return
            self._drop(_num_saved(meta), DropReason.ERROR)
        elif meta.saves:
            self._drop(_num_saved(meta), DropReason.NO_POOL)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Have what follows on `stream` wait for the layer's loaded bytes."""
        if self._pool is not None:
            self._pool.wait_for_layer(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a block is saved whole, after the pass."""

    def wait_for_save(self, stream: Any) -> None:
        """Save the blocks that this pass filled; what can be read later is not waited for.

        Blocks in host memory are read before this returns: the engine may free those of a
        cancelled request right after, and tells nobody. On a device whatever writes them later
        waits, but for the copies of partly reused blocks, which go by a stream of the engine's.
        The engine must not go on after LayoutMismatch (the pass did not wait for all that it
        needed), CorruptBlock or LeaseExpired (what it loaded may be wrong).
        """
        meta, pool, saver, loader = self._metadata, self._pool, self._saver, self._loader
        if meta is not self._started or meta is self._saved:
            return
        self._saved = meta
        if pool is None or saver is None or loader is None:
            return
        try:
            mark = pool.mark(stream)
            loader.settle()
        except Exception as error:
            loader.fail(error)
            self._drop(sum(len(job.keys) for job in self._jobs), DropReason.VOID)
            raise
        with self._shared.boundary.around("a save"):
            for job in self._jobs:
                saver.submit(replace(job, mark=mark))
        if self._jobs and pool.is_host:
            saver.fence()
        elif self._jobs and self._shared.args.partial_reuse:
            saver.drain()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests whose blocks are read no more, and those that may be scheduled.

        Each id is returned once, after it was handed in. Takes no lock and makes no call, but for
        the loads of a pass that was dropped. Raises as `wait_for_save`, after which not every
        runtime ends the engine.
        """
        if self._loader is not None:
            self._loader.settle()
        self._saving += finished_gen_req_ids
        saved = [one for one in self._saving if not self._shared.is_being_read(one)]
        if saved:
            self._saving = [one for one in self._saving if one not in saved]
        return saved, self._parking.finished(started_loading_req_ids)

    def take_failed_load_requests(self) -> set[int]:
        """Return no request: a load that fails in its pass is raised, before the pass."""
        return set()

    def take_failed_async_load_requests(self) -> set[int]:
        """Return parked requests that were said to be ready, and whose blocks proved wrong.

        A runtime that asks takes their pages back and computes them; any other is stopped when
        such a request comes back. Source: mooncake_store's `worker.py` on a branch of TensorRT-LLM.
        """
        return self._parking.take_failed()

    def shutdown(self) -> None:
        """Flush saves for a bounded time and let go of the tier. Twice is fine."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._close_pool()
        self._parking.close()
        self._shared.pool.unregister()
        self._shared.close()

    @property
    def _may_be_latent(self) -> bool:
        return self._shared.args.checkpoint.is_mla is not False

    def _register(self, layout: CacheLayout) -> None:
        shared = self._shared
        self._close_pool()
        shared.pool.register(layout)
        self._parts = layout.parts(
            shared.args.part_rank,
            shared.args.num_parts_ranks,
            shared.args.tokens_per_block,
            ranks_per_node=shared.args.ranks_per_node,
        )
        self._pool = open_pool(layout, self._parts, has_hooks=not shared.args.is_compiled)
        self._saver = Saver(
            shared.link,
            saves_max=shared.config.connector.saves_max,
            figures=shared.figures,
            boundary=shared.boundary,
            reads=shared.pending_reads,
        )
        self._loader = Loader(shared, self._parts, self._pool, self._parking)
        self._attended = None
        self._attend()

    def _attend(self) -> None:
        arena, pool = self._shared.link.arena, self._pool
        if arena is not None and arena is not self._attended and pool is not None:
            with self._shared.boundary.around("the arena's registration"):
                pool.attend(arena)
            self._attended = arena

    def _drop(self, num_blocks: int, reason: DropReason) -> None:
        self._shared.figures.dropped.count(num_blocks, reason)

    def _refuse(self, meta: ConnectorMeta) -> None:
        """Release what was promised for a pool that is not this rank's; stop if it is anything."""
        release_plans(self._shared, meta.loads)
        self._drop(_num_saved(meta), DropReason.NO_POOL)
        if meta.loads:
            raise LayoutMismatch(
                "The leader promised blocks of another namespace than this rank's pool; give every"
                " rank the same engine arguments."
            )

    def _jobs_of(self, pool: Pool, meta: ConnectorMeta) -> Iterator[Job]:
        """Yield a job for each run of blocks of each part that this rank stores."""
        stored = [part for part in self._parts if part.is_stored_here]
        for plan in meta.saves if stored else ():
            keys = self._keys_of(plan.keys, meta.board)
            if keys is None:
                self._drop(plan.pages[0].num_blocks, DropReason.KEYS_LOST)
                continue
            before = len(keys) - plan.pages[0].num_blocks
            for part in stored:
                pages = plan.pages[part.group].ids()
                for start, stop in _runs(pages >= 0):
                    at = start + before
                    yield Job(
                        request_id=plan.request_id,
                        pool=pool,
                        part=part,
                        keys=keys[at : stop + before],
                        parent=keys[at - 1] if at else None,
                        depth=plan.depth + start,
                        pages=pages[start:stop],
                        priorities=plan.priorities[start:stop],
                        tenant_id=plan.tenant_id,
                    )

    def _keys_of(self, keys: KeyRun | bytes, board: Board | None) -> list[BlockKey] | None:
        """Return the keys of a save; None if they are nowhere any more."""
        if isinstance(keys, bytes):
            return split_keys(keys)
        arena = None if board is None else self._shared.link.arena_named(board.arena_id)
        return None if arena is None or board is None else read_keys(arena, board, keys)

    def _close_pool(self) -> None:
        if self._loader is not None:
            self._loader.close()
        if self._saver is not None:
            self._saver.close(_FLUSH_S)
            self._saver = self._loader = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _num_saved(meta: ConnectorMeta) -> int:
    return sum(plan.pages[0].num_blocks for plan in meta.saves if plan.pages)


def _runs(here: Any) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], here, [False])).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
