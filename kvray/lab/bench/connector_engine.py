"""A reference engine whose passes compute nothing, so that the connector's own time is seen.

Executor, cache manager and connector manager are the reference engine's, and so is the order of
their calls; the connector is the real one over a real arena. Only the model is missing. All ranks
of one engine share this process: the workers of the others are called after that of rank 0.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import yaml

from kvray import connector, node, wire
from kvray.config import KVRayConfig, environ_for
from kvray.errors import KVRayError
from kvray.lab.bench.runner import TOKENS_PER_BLOCK, Runner, bench_spec, timed
from kvray.lab.bench.worker import Worker, call_all, hash_bare
from kvray.lab.reference.cache_manager import KVCacheManager
from kvray.lab.reference.connector_manager import KvCacheConnectorManager
from kvray.lab.reference.engine_options import EngineOptions
from kvray.lab.reference.executor import Executor
from kvray.lab.reference.intake import Intake, Orders
from kvray.lab.reference.llm_args import KvCacheConfig, LlmArgs, ParallelConfig
from kvray.lab.reference.model import KVGeometry
from kvray.lab.reference.request import LlmRequest, ScheduledRequests
from kvray.node import BlockTokens, NodeLink
from kvray.store import ArenaOwner

if TYPE_CHECKING:
    from kvray.lab.reference.model_engine import ModelEngine

_LEADER_CALLS = {
    "get_num_new_matched_tokens": "match",
    "update_state_after_alloc": "alloc",
    "build_connector_meta": "plan",
    "request_finished": "finish",
}
_CLUSTER = "bench"
_ELEMENT_BYTES = 4
_NUM_LAYERS = 2
_NEW_TOKEN = 0

BLOCK_STEP = _NUM_LAYERS * 2 * TOKENS_PER_BLOCK * _ELEMENT_BYTES
"""A block's bytes are a multiple of this: one element of a head, in all layers and tokens."""

Prompt = list[int]

Neighbour = Literal["churn", "spin"]
"""A call of `Worker`: it stores, leases and releases; or it only keeps a core busy."""


class ConnectorTier:
    """An arena without a shard, in a directory that ends with the run.

    It leads all connectors of this process to the arena.

    Raises:
        CapacityError: the arena does not fit into the memory.
        ConfigError: no directory can be made in `arena.dir`.
    """

    def __init__(
        self, settings: KVRayConfig, *, capacity: int, block_bytes: int, runner: Runner
    ) -> None:
        self.block_bytes = block_bytes
        self._settings = settings
        self._runner = runner
        self._directory = runner.make_directory(settings.arena.dir)
        # Every configuration that is loaded meanwhile is this one, without overrides.
        runner.stack.callback(os.environ.update, dict(os.environ))
        runner.stack.callback(os.environ.clear)
        os.environ.update(environ_for(self.config_path(verify=False)))
        self._node_dir = self._directory / f"kvray-{_CLUSTER}"
        self._node_dir.mkdir()
        spec = bench_spec(capacity, slot_min=block_bytes)
        self.clear = ArenaOwner(runner.make_arena(self._node_dir, spec)).clear

    def config_path(self, *, verify: bool) -> Path:
        """Return a configuration file that leads to this tier."""
        mode = "auto" if verify else "never"  # auto: the bench's pools are in host memory
        values = self._settings.model_dump(mode="json")
        values["cluster_name"] = _CLUSTER
        values["arena"]["dir"] = str(self._directory)
        values["connector"] |= {"model_key": "bench", "load": "sync", "verify_on_load": mode}
        path = self._directory / f"verify-{mode}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def attach(self) -> NodeLink:
        """Return the link that the connectors of this process share; `detach` gives it back."""
        return node.attach(
            self._node_dir,
            label="bench",
            lock_wait_s=self._settings.arena.lock_wait_s,
            attach_retry_s=self._settings.connector.attach_retry_s,
        )

    @contextmanager
    def beside(self, neighbour: Neighbour) -> Iterator[None]:
        """Run another process of the node that does what `neighbour` names without a pause."""
        with self._runner.scope() as runner:
            worker = Worker.start(runner)
            call_all([worker], "attach", directory=str(self._node_dir))
            worker.send(neighbour, block_bytes=self.block_bytes)
            yield
            worker.send("detach")  # which ends the other call
            worker.receive()
            worker.receive()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times of one batch of requests, from its arrival to its end."""

    calls: dict[str, float]
    """Seconds by name: `match`, `alloc`, `plan` and `finish` of the leader, `load` of its worker;
    and `pickle`, of the metadata of their pass."""
    hash_s: float
    """Bare hashing of the same prompts, right after."""
    meta_bytes: int
    """The metadata, pickled."""
    hit_tokens: list[int]
    """Promised to each request."""

    @property
    def leader_s(self) -> float:
        """The time of all of the leader's calls for one request."""
        seconds = sum(self.calls.get(name, 0.0) for name in _LEADER_CALLS.values())
        return seconds / len(self.hit_tokens)


class BenchEngine:
    """One replica; `with` ends it and waits until its saves are done."""

    def __init__(
        self,
        tier: ConnectorTier,
        *,
        num_ranks: int,
        num_blocks: int,
        verify: bool = False,
        is_published: bool = False,
        chunk_tokens: int | None = None,
    ) -> None:
        """Start it.

        Args:
            tier: where blocks are stored.
            num_ranks: ranks that each hold a part of every block.
            num_blocks: blocks in its pool; the connector is asked for all others.
            verify: whether blocks are checked before they are promised.
            is_published: whether it tells the tokens of its blocks, as to a shard with KV events.
            chunk_tokens: the longest piece of a prompt in one pass; None: all of it.
        """
        self._options = EngineOptions(
            num_blocks=num_blocks,
            tokens_per_block=TOKENS_PER_BLOCK,
            max_batch_size=num_blocks,
            enable_chunked_prefill=chunk_tokens is not None,
            chunk_tokens=chunk_tokens,
            num_threads=1,
        )
        geometry = KVGeometry(
            num_layers=_NUM_LAYERS, num_kv_heads=1, head_dim=tier.block_bytes // BLOCK_STEP
        )
        self._cache = KVCacheManager(geometry, self._options)
        pool = self._cache.get_unique_primary_pool()
        # Both halves of the connector as TensorRT-LLM finds them, with a configuration file.
        config_path = tier.config_path(verify=verify)
        scheduler_class, worker_class = (
            getattr(connector, f"{name}@{config_path}")
            for name in ("KvRayScheduler", "KvRayWorker")
        )
        args = [_args_of(rank, num_ranks) for rank in range(num_ranks)]
        self._scheduler: Any = scheduler_class(args[0])
        self._workers = [worker_class(one) for one in args]
        for rank, worker in enumerate(self._workers):
            worker.register_kv_caches(torch.zeros_like(pool) if rank else pool)
        self._link = tier.attach()
        if self._link.arena is None:
            raise KVRayError("The bench's engine did not find its arena; run it again.")
        self._seconds: dict[str, float] = defaultdict(float)
        self._meta: object = None
        self._time_calls()
        self._manager = KvCacheConnectorManager(_AllRanks(self._workers), self._scheduler)
        self._cache.connector = self._manager
        self._request_ids = itertools.count(1)
        self._teller = _Teller(self._scheduler._shared.figures.block_tokens)
        if is_published:
            self._teller.start()

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._teller.close()
        self._scheduler.shutdown()
        for worker in self._workers:
            worker.shutdown()
        self._link.detach()

    def serve(self, batches: Iterable[Sequence[Prompt]], note: Callable[[Sample], None]) -> None:
        """Answer one batch of prompts after the other with one token each.

        Args:
            batches: prompts; those of one batch are in one pass.
            note: is given the times of each batch when it has ended.

        Raises:
            Exception: whatever ended the engine.
        """
        requests = (
            [LlmRequest(next(self._request_ids), prompt, max_new_tokens=1) for prompt in batch]
            for batch in batches
        )
        arrivals = _Arrivals(requests, lambda done: note(self._sample(done)))
        executor = Executor(
            cast("ModelEngine", _NoModel(self._manager.worker)),
            self._cache,
            cast("Intake", arrivals),
            self._options,
            self._manager,
        )
        executor.run()
        if executor.failure is not None:
            raise executor.failure

    def _time_calls(self) -> None:
        """Time the calls of the leader and of its worker; keep the metadata of each pass."""
        build = self._scheduler.build_connector_meta

        def build_and_keep(output: Any) -> object:
            self._meta = build(output)
            return self._meta

        self._scheduler.build_connector_meta = build_and_keep
        for method, name in _LEADER_CALLS.items():
            self._watch(self._scheduler, method, name)
        self._watch(self._link.arena, "read_slots", "copy")
        self._watch(self._workers[0], "start_load_kv", "load")

    def _watch(self, target: Any, method: str, name: str) -> None:
        """Time every call of a method of one object, without the copies that it makes."""
        call = getattr(target, method)

        def timed_call(*args: Any) -> Any:
            copied_s, began = self._seconds["copy"], time.perf_counter()
            try:
                return call(*args)
            finally:
                seconds = time.perf_counter() - began
                self._seconds[name] += seconds - (self._seconds["copy"] - copied_s)

        vars(target)[method] = timed_call

    def _sample(self, done: Sequence[LlmRequest]) -> Sample:
        pickled = timed(lambda: pickle.dumps(self._meta))
        calls, self._seconds = {**self._seconds, "pickle": pickled.seconds}, defaultdict(float)
        prompts = [request.get_tokens(0)[: request.prompt_len] for request in done]
        hashed = timed(lambda: [hash_bare(prompt) for prompt in prompts])
        return Sample(
            calls=calls,
            hash_s=hashed.seconds / len(done),
            meta_bytes=len(pickle.dumps(self._meta)),
            hit_tokens=[request.py_num_connector_matched_tokens for request in done],
        )


class _Teller:
    """In place of a link to a shard with KV events: takes tokens, and packs them, once a second."""

    def __init__(self, tokens: BlockTokens) -> None:
        self._tokens = tokens
        tokens.hear(None)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="teller")

    def start(self) -> None:
        self._tokens.hear(1)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(1.0):
            while chains := self._tokens.take(TOKENS_PER_BLOCK):
                wire.encode({"op": "describe", "chains": chains})


class _AllRanks:
    """In place of rank 0's worker: passes each call on to the workers of all ranks in turn."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Do nothing: each rank has registered a pool of its own."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            # Rank 0's answer: no save of the bench outlives its pass.
            answers = [getattr(worker, name)(*args) for worker in self._workers]
            return answers[0]

        return call


class _NoModel:
    """In place of `ModelEngine`: the calls around each layer, and a token for each request."""

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks

    def forward(self, batch: ScheduledRequests, _: Mapping[int, int]) -> dict[int, int]:
        for layer in range(_NUM_LAYERS):
            self._hooks.wait_for_layer_load(layer, None)
            self._hooks.save_kv_layer(layer, None)
        return {
            request.request_id: _NEW_TOKEN
            for request in batch.all_requests()
            if request.is_last_context_chunk
        }


class _Arrivals:
    """In place of `Intake`: a batch arrives when the one before it has ended."""

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

    def end(self, request: LlmRequest, error: KVRayError | None = None) -> None:
        if error is not None:
            raise error
        self._done.append(request)
        if len(self._done) == self._num_due:
            done, self._done = self._done, []
            self._note(done)

    def close(self, make_error: Callable[[], KVRayError]) -> None:
        pass


def _args_of(rank: int, num_ranks: int) -> LlmArgs:
    return LlmArgs(
        model="bench",
        tensor_parallel_size=num_ranks,
        parallel_config=ParallelConfig(rank=rank),
        kv_cache_config=KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK),
    )
