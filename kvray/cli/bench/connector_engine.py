"""A reference engine whose passes compute nothing, so that the connector's own time is seen.

Executor, cache manager and connector manager are the reference engine's, and so is the order of
their calls; the connector is the real one over a real arena. Only the model is not there. The
ranks of one engine share this process: the workers of the others are called after that of rank 0.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from kvray import connector
from kvray.cli.bench.connector_probe import Copies, Stopwatch, TimedScheduler, TimedWorkers
from kvray.cli.bench.connector_stage import ConnectorStage
from kvray.cli.bench.scale import TOKENS_PER_BLOCK
from kvray.cli.bench.work import hash_bare
from kvray.errors import KVRayError
from kvray.reference.cache_manager import KVCacheManager
from kvray.reference.connector_manager import KvCacheConnectorManager
from kvray.reference.executor import Executor
from kvray.reference.intake import Orders
from kvray.reference.llm_args import KvCacheConfig, LlmArgs, ParallelConfig
from kvray.reference.llm_args import Mapping as RankMapping
from kvray.reference.model import KVGeometry
from kvray.reference.request import LlmRequest
from kvray.reference.scheduler import ScheduledRequests

if TYPE_CHECKING:
    from kvray.reference.model_engine import ModelEngine

_LEADER_CALLS = ("match", "alloc", "plan", "finish")
_ELEMENT_BYTES = 4
_NUM_LAYERS = 2
_NEW_TOKEN = 0

BLOCK_STEP = _NUM_LAYERS * 2 * TOKENS_PER_BLOCK * _ELEMENT_BYTES
"""A block has a multiple of so many bytes: one element of a head, in all layers and tokens."""

Prompt = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one batch of requests took, from its arrival to its end; seconds."""

    num_requests: int
    calls: dict[str, float]
    """By name: `match`, `alloc`, `plan` and `finish` of the leader, `load` of its worker;
    and `pickle`, of the metadata of their pass."""
    hash_s: float
    """Bare hashing of the same prompts, right after."""
    meta_bytes: int
    """The metadata, pickled."""
    hit_tokens: list[int]
    """Promised to each request."""

    @property
    def leader_s(self) -> float:
        """All that the leader did, a request."""
        return sum(self.calls.get(name, 0.0) for name in _LEADER_CALLS) / self.num_requests


class BenchEngine:
    """One replica; `with` ends it and waits until what it saves is saved."""

    def __init__(
        self,
        stage: ConnectorStage,
        *,
        num_ranks: int,
        num_blocks: int,
        verify: bool = False,
        chunk_tokens: int | None = None,
    ) -> None:
        """Start it.

        Args:
            stage: where its tier is.
            num_ranks: ranks that each hold a part of every block.
            num_blocks: blocks in its pool; what is in no block there is asked of the connector.
            verify: whether blocks are checked before they are promised.
            chunk_tokens: the longest piece of a prompt in one pass; None: all of it.
        """
        self._chunk_tokens = chunk_tokens
        self._watch = Stopwatch()
        config_path = stage.config_path(verify=verify)
        args = [_args_of(rank, num_ranks) for rank in range(num_ranks)]
        self._cache = KVCacheManager(
            _geometry(stage.block_bytes), num_blocks=num_blocks, tokens_per_block=TOKENS_PER_BLOCK
        )
        pool = self._cache.get_unique_primary_pool()
        self._scheduler = _bound("KvRayScheduler", config_path)(args[0])
        self._workers = [_bound("KvRayWorker", config_path)(one) for one in args]
        for rank, worker in enumerate(self._workers):
            worker.register_kv_caches(torch.zeros_like(pool) if rank else pool)
        self._link = stage.attach()
        if self._link.arena is None:
            raise KVRayError("The bench's engine did not find its arena; run it again.")
        copies = Copies(self._link.arena)
        self._timed_scheduler = TimedScheduler(self._scheduler, self._watch)
        self._manager = KvCacheConnectorManager(
            TimedWorkers(self._workers, self._watch, copies), self._timed_scheduler
        )
        self._cache.connector = self._manager
        self._request_ids = itertools.count(1)

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._scheduler.shutdown()
        for worker in self._workers:
            worker.shutdown()
        self._link.detach()

    def serve(self, batches: Iterable[Sequence[Prompt]], note: Callable[[Sample], None]) -> None:
        """Have one batch of prompts after the other answered with one token each.

        Args:
            batches: prompts; those of one batch are in one pass.
            note: is given what each batch took when it has ended.

        Raises:
            Exception: whatever ended the engine.
        """
        arrivals = _Arrivals(self._requests(batches), lambda done: note(self._sample(done)))
        executor = Executor(
            cast("ModelEngine", _NoModel(self._manager)),
            self._cache,
            arrivals,
            connector=self._manager,
            max_batch_size=self._cache.get_max_resource_count(),
            chunk_tokens=self._chunk_tokens,
            num_threads=1,
        )
        executor.run()
        if executor.failure is not None:
            raise executor.failure

    def _requests(self, batches: Iterable[Sequence[Prompt]]) -> Iterator[list[LlmRequest]]:
        for batch in batches:
            yield [
                LlmRequest(next(self._request_ids), prompt, max_new_tokens=1) for prompt in batch
            ]

    def _sample(self, done: Sequence[LlmRequest]) -> Sample:
        meta = self._timed_scheduler.meta
        packed = self._watch.time("pickle", lambda: pickle.dumps(meta))
        calls = self._watch.take()
        prompts = [request.get_tokens(0)[: request.prompt_len] for request in done]
        began = time.perf_counter()
        for prompt in prompts:
            hash_bare(prompt)
        return Sample(
            num_requests=len(done),
            calls=calls,
            hash_s=(time.perf_counter() - began) / len(done),
            meta_bytes=len(packed),
            hit_tokens=[request.py_num_connector_matched_tokens for request in done],
        )


class _NoModel:
    """In place of `ModelEngine`: the calls around each layer, and a token for each request."""

    def __init__(self, hooks: KvCacheConnectorManager) -> None:
        self._hooks = hooks

    def forward(self, batch: ScheduledRequests, _: Mapping[int, int]) -> dict[int, int]:
        for layer in range(_NUM_LAYERS):
            self._hooks.layer_pre_hook(layer)
            self._hooks.layer_post_hook(layer)
        return {
            request.request_id: _NEW_TOKEN
            for request in batch.all_requests()
            if request.is_last_context_chunk
        }


class _Arrivals:
    """The executor's `Intake`: a batch arrives when the one before it has ended."""

    def __init__(
        self, batches: Iterator[list[LlmRequest]], note: Callable[[list[LlmRequest]], None]
    ) -> None:
        self._batches = batches
        self._note = note
        self._done: list[LlmRequest] = []
        self._num_due = 0

    def take(self, *, has_work: bool) -> Orders:
        if has_work:
            return Orders()
        batch = next(self._batches, None)
        if batch is None:
            return Orders(is_stop=True)
        self._num_due = len(batch)
        return Orders(submitted=batch)

    def pause(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def progress(self, requests: Iterable[LlmRequest]) -> None:
        pass

    def resolve(self, request: LlmRequest) -> None:
        self._done.append(request)
        if len(self._done) == self._num_due:
            done, self._done = self._done, []
            self._note(done)

    def fail(self, request: LlmRequest, error: KVRayError) -> None:
        raise error

    def close(self, make_error: Callable[[], KVRayError]) -> None:
        pass


def _args_of(rank: int, num_ranks: int) -> LlmArgs:
    mapping = RankMapping(world_size=num_ranks, rank=rank, tp_size=num_ranks)
    return LlmArgs(
        model="bench",
        tensor_parallel_size=num_ranks,
        parallel_config=ParallelConfig(mapping=mapping),
        kv_cache_config=KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK),
    )


def _bound(name: str, config_path: object) -> Any:
    """Return a class of the connector as TensorRT-LLM finds it, with a configuration file."""
    return getattr(connector, f"{name}@{config_path}")


def _geometry(block_bytes: int) -> KVGeometry:
    """Return layers and heads whose keys and values are `block_bytes` in a block."""
    return KVGeometry(num_layers=_NUM_LAYERS, num_kv_heads=1, head_dim=block_bytes // BLOCK_STEP)
