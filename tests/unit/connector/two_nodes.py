"""Two nodes in one process: real shards on arenas of their own that call each other without Ray."""

import asyncio
import functools
import itertools
import os
import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.connector import KvRayScheduler, KvRayWorker
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine.meta import ConnectorMeta
from kvray.errors import ShardUnavailable
from kvray.store import Arena
from tests.unit.actors.small_shard import Line, wait_until_serving
from tests.unit.connector.pair import BLOCK, NUM_BLOCKS, Request, args_for
from tests.waiting import wait_for

NAMES = ("kvray-shard-a", "kvray-shard-b")


class TwoNodes:
    """A lookup and two shards."""

    def __init__(self, parent: Path) -> None:
        self.line = Line()
        self.gone: set[str] = set()
        """Shards that nobody can call."""
        self.directories = [parent / "a", parent / "b"]
        self.shards: dict[str, Shard] = {}
        for name, directory in zip(NAMES, self.directories, strict=True):
            directory.mkdir()
            os.environ["KVRAY_ARENA__DIR"] = str(directory)
            settings = ShardSettings.of(load_config())
            self.shards[name] = Shard(name, settings, [self.line.announce], ask=self._ask)
            self.shards[name].start()
        for shard in self.shards.values():
            wait_until_serving(shard)

    def leased(self) -> list[int]:
        """Return how many blocks of each node are leased to others than the shards."""
        return [int(shard.status()["arena"]["leased_blocks"]) for shard in self.shards.values()]

    def drop_handovers(self) -> None:
        """Have the shards give up what they keep for whoever asked."""
        for shard in self.shards.values():
            shard._loop.call(shard._require_serving().stager._stager.handovers.close, 10)

    def clear(self) -> None:
        self.drop_handovers()
        for shard in self.shards.values():
            shard.clear(10)

    def close(self) -> None:
        for shard in self.shards.values():
            shard.stop(retire=True, timeout_s=10)

    async def _ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Ask`."""
        if actor == LOOKUP_NAME and method == "shards":
            return self.line.lookup.shards()
        if actor == LOOKUP_NAME:
            return getattr(self.line.lookup, method)(*args, time.monotonic())
        if actor in self.gone or actor not in self.shards:
            raise ShardUnavailable(f"{actor} is gone.")
        call = functools.partial(getattr(self.shards[actor].requests, method), *args)
        answer = asyncio.get_running_loop().run_in_executor(None, call)
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise ShardUnavailable(f"{actor} did not answer in time.") from None


_NUMBERS = itertools.count()
"""Not `id`: a new engine may have that of one that the tier has not forgotten yet."""


class SpreadReplica:
    """An engine of two ranks, one on each node; every rank's rows are functions of the tokens."""

    def __init__(self, nodes: TwoNodes, *, is_spread: bool = True, **changes: Any) -> None:
        number = next(_NUMBERS)
        self.workers: list[KvRayWorker] = []
        self.pools: list[torch.Tensor] = []
        for rank, directory in enumerate(nodes.directories):
            mapping = SimpleNamespace(rank=rank)
            args = args_for(
                tensor_parallel_size=2,
                gpus_per_node=1 if is_spread else 2,
                parallel_config=SimpleNamespace(to_mapping=lambda mapping=mapping: mapping),
                **changes,
            )
            os.environ["KVRAY_ARENA__DIR"] = str(directory)
            os.environ["KVRAY_CONNECTOR__REPLICA"] = f"process-{rank}-{number}"
            self.workers.append(KvRayWorker(args))
            if rank == 0:
                self.scheduler = KvRayScheduler(args)
            self.pools.append(torch.full((NUM_BLOCKS, 2, 2, 8), -1.0))
        for worker, pool in zip(self.workers, self.pools, strict=True):
            worker.register_kv_caches(pool)
        self._next_block = 0
        self.sent: list[ConnectorMeta] = []
        """Metadata of all passes."""

    @property
    def engine(self) -> Any:
        return self.workers[0]._rank.shared

    @property
    def arenas(self) -> list[Arena]:
        return [worker._rank.shared.link.arena for worker in self.workers]

    def meet(self, nodes: TwoNodes) -> None:
        """Do a pass, from which on the ranks have one name, and wait until the shards know it."""
        self.serve(Request(0, list(range(3))))
        lookup = nodes.line.lookup
        wait_for(
            lambda: (
                len(lookup.replica(self.engine.pool.replica, time.monotonic())) == 2
                and self.engine.may_stage
            ),
            "the ranks' registration",
        )

    def query(self, request: Request, computed: int = 0) -> tuple[int, bool]:
        count = -(-len(request.tokens) // BLOCK)
        first = self._next_block
        self._next_block += count
        request.block_ids = [(first + at) % NUM_BLOCKS for at in range(count)]
        for pool in self.pools:
            pool[request.block_ids] = -1.0
        request.matched, is_later = self.scheduler.get_num_new_matched_tokens(request, computed)
        return request.matched, is_later

    def plan(self, request: Request, *, position: int = 0) -> None:
        """Build the metadata of the pass that computes the rest, and have the ranks load."""
        count = len(request.tokens) - request.matched
        report = RequestData(
            request.request_id, list(request.tokens), list(request.block_ids), position, count
        )
        self.do(SchedulerOutput(new_requests=[report]))

    def do(self, output: SchedulerOutput) -> None:
        """Send the metadata of a pass to every rank as an engine does."""
        sent = pickle.dumps(self.scheduler.build_connector_meta(output))
        self.sent.append(pickle.loads(sent))  # noqa: S301
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(sent))  # noqa: S301
        for worker in self.workers:
            worker.start_load_kv(None)

    def check(self, request: Request, matched: int) -> None:
        """Every rank has loaded its own bytes."""
        for rank in range(2):
            for index in range(matched // BLOCK):
                row = self.pools[rank][request.block_ids[index]]
                assert (row == self.content(request, index, rank)).all(), (rank, index)

    def end_pass(self, request: Request) -> None:
        for rank, worker in enumerate(self.workers):
            for index, block_id in enumerate(request.block_ids):
                self.pools[rank][block_id] = self.content(request, index, rank)
            worker.wait_for_save(None)

    def serve(self, request: Request) -> int:
        """Do all of it; return how many tokens were loaded."""
        matched, is_later = self.query(request)
        assert not is_later
        self.plan(request)
        self.check(request, matched)
        self.end_pass(request)
        self.scheduler.request_finished(request, request.block_ids)
        return matched

    def flush(self) -> None:
        """Return when all that was saved is committed."""
        for worker in self.workers:
            worker._rank.saver.close(10)

    def content(self, request: Request, index: int, rank: int) -> float:
        tokens = request.tokens[: (index + 1) * BLOCK]
        return float(sum((at + 1) * t for at, t in enumerate(tokens)) + 0.5 * (rank + 1))

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
