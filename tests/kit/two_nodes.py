"""Two nodes in one process: real shards on arenas of their own that call each other without Ray."""

import asyncio
import functools
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.config import load_config
from kvray.connector.base import SchedulerOutput
from kvray.engine.meta import ConnectorMeta
from kvray.engine.shared_state import SharedState
from kvray.errors import ShardUnavailable
from kvray.store import Arena
from tests.kit.connector import Pair, Request, args_for, parallel
from tests.unit.actors.small_shard import Line, wait_until_serving
from tests.waiting import wait_for

NAMES = ("kvray-shard-a", "kvray-shard-b")
PATIENT = {
    "CONNECTOR__STAGE_WAIT_S": "5",
    "STAGING__CALL_TIMEOUT_S": "60",
    "STAGING__DEADLINE_S": "60",
}
"""Settings of their tier, so that a busy machine makes no miss."""


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
            self.shards[name] = self.line.follow(Shard(name, settings, ask=self._ask))
            self.shards[name].start()
        for shard in self.shards.values():
            wait_until_serving(shard)

    def wait_for_ranks(self, engine: SharedState) -> None:
        """Return once the shards know of an engine's two ranks, and the engine of them."""

        def are_known() -> bool:
            known = self.line.lookup.replica(engine.replica)
            return len(known) == 2 and engine.may_stage

        wait_for(are_known, "the ranks' registration")

    def leased(self) -> list[int]:
        """Return how many blocks of each node are leased to others than the shards."""
        return [int(shard.status()["arena"]["leased_blocks"]) for shard in self.shards.values()]

    def wait_for_release(self) -> None:
        wait_for(lambda: self.leased() == [0, 0], "the end of every lease")

    def drop_handovers(self) -> None:
        """Have the shards give up what they keep for whoever asked."""
        for shard in self.shards.values():
            expire = shard._require_serving().stager._stager.handovers.expire
            shard._loop.call(functools.partial(expire, float("inf")), 10)

    def clear(self) -> None:
        self.drop_handovers()
        for shard in self.shards.values():
            shard.clear(10)

    def close(self) -> None:
        for shard in self.shards.values():
            shard.stop(retire=True, timeout_s=10)

    async def _ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """See `Ask`."""
        if actor == LOOKUP_NAME:
            with self.line.followers.query() as lookup:
                return getattr(lookup, method)(*args)
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
    """An engine of two ranks, one on each node."""

    def __init__(self, nodes: TwoNodes, *, is_spread: bool = True) -> None:
        number = next(_NUMBERS)
        self.ranks: list[Pair] = []
        for rank, directory in enumerate(nodes.directories):
            os.environ["KVRAY_ARENA__DIR"] = str(directory)
            os.environ["KVRAY_CONNECTOR__REPLICA"] = f"process-{rank}-{number}"
            args = args_for(
                tensor_parallel_size=2,
                gpus_per_node=1 if is_spread else 2,
                parallel_config=parallel(rank),
            )
            self.ranks.append(Pair(args, rank=rank))
        self.leader, self.follower = self.ranks
        self.scheduler = self.leader.scheduler

    @property
    def totals(self) -> dict[str, int]:
        return self.leader.totals

    @property
    def arenas(self) -> list[Arena]:
        return [rank.arena for rank in self.ranks]

    def meet(self, nodes: TwoNodes) -> None:
        """Do a pass, from which on the ranks have one name, and wait until the shards know it."""
        self.serve(Request(0, list(range(3))))
        nodes.wait_for_ranks(self.leader.engine)

    def query(self, request: Request, computed: int = 0) -> int:
        matched = self.leader.query(request, computed)
        self.follower.pool[request.block_ids] = -1.0
        return matched

    def plan(self, request: Request, *, accepted: bool = True) -> ConnectorMeta:
        """Plan the pass that computes the rest, and have the ranks load."""
        return self._begin(self.leader.plan(request, accepted=accepted))

    def pass_on(self) -> ConnectorMeta:
        """Do a pass without requests."""
        return self._begin(self.scheduler.build_connector_meta(SchedulerOutput()))

    def _begin(self, meta: ConnectorMeta) -> ConnectorMeta:
        """Send the metadata of a pass to every rank as an engine does."""
        for rank in self.ranks:
            rank.worker.bind_connector_meta(pickle.loads(pickle.dumps(meta)))  # noqa: S301 - ours
        for rank in self.ranks:
            rank.worker.start_load_kv(None)
        return meta

    def check(self, request: Request, matched: int) -> None:
        """Every rank has loaded its own bytes."""
        for rank in self.ranks:
            rank.check(request, matched)

    def serve(self, request: Request) -> int:
        """Do all of it; return how many tokens were loaded."""
        matched = self.query(request)
        self.plan(request)
        self.check(request, matched)
        for rank in self.ranks:
            rank.compute(request)
        self.leader.finish(request)
        return matched

    def flush(self) -> None:
        """Return when all that was saved is committed."""
        for rank in self.ranks:
            rank.worker._rank.saver.close(10)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
