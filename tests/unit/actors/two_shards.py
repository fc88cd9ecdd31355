"""Two shards without Ray, and an engine: what it asks of one comes from the other."""

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.shard import Shard
from kvray.config import StagingConfig
from kvray.identity.block import BlockKey
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, ArenaOwner
from tests.unit.actors.nodes import SETTINGS, Nodes
from tests.unit.actors.small_shard import (
    NAMESPACE,
    Line,
    nvme_for,
    open_arena,
    settings_for,
    wait_until_serving,
)
from tests.unit.store.small_arena import num_here, store
from tests.waiting import wait_for

MINE = replace(NAMESPACE, part_bytes=4096)
HURRIED = SETTINGS.model_copy(update={"handover_s": 0.5})
"""For tests in which something is frozen."""
PATIENT = HURRIED.model_copy(update={"deadline_s": 60.0, "call_timeout_s": 60.0})
"""For all others: what a starved machine does late has come all the same."""


class Calls:
    """The `Ask` of both shards; the nodes are there once the shards serve, and are waited for.

    A call that failed before would keep a shard from the lookup for a while.
    """

    nodes: Nodes | None = None

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        while self.nodes is None:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)
        return await self.nodes.ask(actor, method, *args, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Shards `a` and `b`, which has a disk, and an engine at `a`."""

    a: Shard
    b: Shard
    line: Line
    nodes: Nodes
    engine: ShardSocket

    def arena(self, node: str) -> Arena:
        return self.nodes[node].arena

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self.engine.call(op, timeout_s=60, replica="r", rank=0, **fields)

    def stage(self, keys: list[BlockKey], wait_s: float = 30.0) -> dict[str, Any]:
        return self.ask("stage", keys=b"".join(keys), wait_s=wait_s, tokens_per_s=0)

    def locate(self, keys: list[BlockKey]) -> list[tuple[int, set[str]]]:
        return [(run.stop, set(run.holders)) for run in self.line.locate(b"".join(keys))]

    def is_known(self, keys: list[BlockKey]) -> bool:
        runs = self.locate(keys)
        return bool(runs) and runs[-1][0] == len(keys)

    def has(self, node: str, keys: list[BlockKey]) -> bool:
        return bool(num_here(self.arena(node), keys) == len(keys))

    def store_far(self, keys: list[BlockKey]) -> None:
        """Have `b` hold `keys`, and the lookup know it."""
        store(self.arena("b"), keys)
        wait_for(lambda: self.is_known(keys))

    def demote(self, keys: list[BlockKey]) -> None:
        """Have `b` hold `keys` in memory and on its disk, which has nothing else."""
        store(self.arena("b"), keys)
        wait_for(lambda: self.b.status()["nvme"]["demoted_blocks"] == len(keys))

    def lose_from_memory(self, keys: list[BlockKey]) -> None:
        assert ArenaOwner(self.arena("b")).clear() == len(keys)


@contextlib.contextmanager
def make_tier(*, staging: StagingConfig = PATIENT, **changes: Any) -> Iterator[Tier]:
    """Have the shards `a` and `b` with these settings."""
    line, calls = Line(), Calls()
    with contextlib.ExitStack() as stack:
        parent, disk = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where, prefix="kvray-test-")))
            for where in ("/dev/shm", None)
        )
        shards = {}
        for name in "ab":
            settings = settings_for(
                parent / name,
                staging=staging,
                nvme=nvme_for(disk) if name == "b" else None,
                admission="all",
                **changes,
            )
            shards[name] = line.follow(Shard(f"kvray-shard-{name}", settings, ask=calls))
            stack.callback(sweep, parent / name)
            shards[name].start()
            stack.callback(shards[name].stop, retire=False, timeout_s=10)
        for shard in shards.values():
            wait_until_serving(shard)
        nodes = Nodes({name: open_arena(parent / name) for name in shards})
        stack.callback(nodes.close)
        nodes.others |= {f"{shard.name}.room": shard.requests.room for shard in shards.values()}
        nodes.others["kvray-lookup.locate"] = line.locate
        nodes.others["kvray-lookup.targets"] = line.targets
        nodes.others["kvray-shard-b.promote"] = shards["b"].requests.promote
        calls.nodes = nodes
        engine = stack.enter_context(contextlib.closing(ShardSocket(parent / "a")))
        made = Tier(**shards, line=line, nodes=nodes, engine=engine)
        made.ask("register", namespace=MINE.to_wire(), wanted=[[0, None]])
        wait_for(lambda: made.ask("report", counters={})["peers"], "hearing of the other")
        yield made
