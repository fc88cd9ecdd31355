"""Nodes in one process: real arenas, and what their shards would call over Ray; or two shards."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvray.actors.mover.orders import FetchOrder, FetchReport, SourceReport, Span
from kvray.actors.owner.ownership import sweep
from kvray.actors.ray_glue.arguments import unpacked
from kvray.actors.shard.shard import Shard
from kvray.actors.staging.peers import Peers
from kvray.actors.staging.plan import Prefix
from kvray.actors.staging.replica_stager import ReplicaStager
from kvray.actors.staging.replicas import Reader, Replicas
from kvray.actors.staging.stager import Stager
from kvray.config import StagingConfig
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey, split_keys
from kvray.index import Index, Run
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, ArenaOwner, PartRequest
from tests.unit.actors.small_shard import (
    NAMESPACE,
    Line,
    nvme_for,
    open_arena,
    settings_for,
    wait_until_serving,
)
from tests.unit.store.small_arena import PATIENT_S, SLOT, make_arena, num_here, spec, store
from tests.waiting import wait_for

SETTINGS = StagingConfig(deadline_s=2.0, call_timeout_s=0.2, handover_s=5.0, fetches_max=2)

Answer = Callable[..., Any]


class Node:
    """A node's arena as its shard and its mover have it mapped."""

    def __init__(self, name: str, arena: Arena) -> None:
        self.name = name
        self.arena = arena
        self.mover = Arena(arena.directory, lock_wait_s=PATIENT_S)
        self.mover.join("mover")
        self.arena.join("engine")

    @property
    def shard(self) -> str:
        return f"kvray-shard-{self.name}"

    def close(self) -> None:
        self.mover.close()
        self.arena.close()


class Nodes:
    """Some nodes, whose calls to each other can be slowed down, refused and counted."""

    def __init__(self, arenas: Mapping[str, Arena]) -> None:
        self.by_name = {name: Node(name, arena) for name, arena in arenas.items()}
        self.calls: list[tuple[str, str]] = []
        self.orders: list[FetchOrder] = []
        self.was_ordered = asyncio.Event()
        self.frozen: set[str] = set()  # actors that never answer
        self.gone: set[str] = set()  # actors that are not there
        self.replicas: dict[str, Replicas] = {}  # by their shards, as the next ones
        self.rank_stagers: dict[str, ReplicaStager] = {}
        self.others: dict[str, Answer] = {}  # those of other actors, by `actor.method`
        self.may_move = asyncio.Event()
        self.may_move.set()
        self.blocks_per_step = 10**6  # after which a mover asks again whether it may go on

    @classmethod
    def make(cls, parent: Path, names: str = "ab", *, num_slabs: int = 8) -> "Nodes":
        """Return nodes with new arenas, each in a directory of its own."""
        for name in names:
            (parent / name).mkdir(parents=True)
        asked = spec(num_slabs=num_slabs, holders_max=16)
        return cls({name: make_arena(parent / name, asked=asked) for name in names})

    def __getitem__(self, name: str) -> Node:
        return self.by_name[name]

    def close(self) -> None:
        for node in self.by_name.values():
            node.close()

    def _peers(self, name: str, settings: StagingConfig) -> Peers:
        return Peers(self[name].shard, self.ask, call_timeout_s=settings.call_timeout_s)

    def stager(
        self,
        name: str = "a",
        *,
        settings: StagingConfig = SETTINGS,
        num_shards: int = 2,
        **more: int,
    ) -> Stager:
        """Return what stages at a node; `more` may be `num_partitions`."""
        peers = self._peers(name, settings)
        return Stager(self[name].arena, peers, settings, num_shards=lambda: num_shards, **more)

    def replica_stager(self, name: str, ranks: Mapping[int, Reader]) -> ReplicaStager:
        """Return what stages at a node, where those ranks of the replica `r` are registered."""
        node, replicas, peers = self[name], Replicas(), self._peers(name, SETTINGS)
        for rank, reader in ranks.items():
            replicas.register(rank, "r", rank, reader)
        stager = Stager(node.arena, peers, SETTINGS, num_shards=lambda: 2)
        made = ReplicaStager(node.arena, stager, replicas, peers, SETTINGS)
        self.rank_stagers[node.shard], self.replicas[node.shard] = made, replicas
        return made

    def replica(self, replica: str) -> dict[int, str]:
        return {
            rank: shard
            for shard, replicas in self.replicas.items()
            for name, rank in replicas.connected()
            if name == replica
        }

    async def ask(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((actor, method))
        if actor in self.gone:
            raise ShardUnavailable(f"There is no {actor}.")
        try:
            return await asyncio.wait_for(self._answer(actor, method, *args), timeout_s)
        except asyncio.TimeoutError:
            raise ShardUnavailable(f"{actor} did not answer in time.") from None

    async def _answer(self, actor: str, method: str, *args: Any) -> Any:
        await asyncio.sleep(0)
        if actor in self.frozen:
            await asyncio.Event().wait()
        if (other := self.others.get(f"{actor}.{method}")) is not None:
            answer = other(*args)
            return await answer if asyncio.iscoroutine(answer) else answer
        if method in ("ping", "connect", "promote"):
            return 0 if method == "promote" else None
        if method == "shards":
            return [node.shard for node in self.by_name.values()]
        if method in ("locate", "replica"):
            return getattr(self, method)(*args)
        if (there := self.rank_stagers.get(actor)) is not None:
            if method == "stage_ranks":
                return await there.stage_here(*args[1:])
            leases = there.leases
            return leases.lease(*args) if method == "lease_ranks" else leases.release(*args)
        assert method == "fetch", (actor, method)
        return await self.fetch(self[actor.rpartition("-")[2]], unpacked(*args))

    def locate(self, *pieces: bytes) -> list[Run]:
        keys, index = b"".join(pieces), Index()
        blocks = split_keys(keys)
        for node in self.by_name.values():
            for part, mask in enumerate(node.mover.present(blocks, range(8))):
                held = [blocks[at] for at in np.flatnonzero(mask)]
                index.add(node.shard, b"".join(held), [part] * len(held))
        return index.locate(keys)

    async def fetch(self, target: Node, order: FetchOrder) -> FetchReport:
        if not order.spans:
            return FetchReport(here=())
        self.orders.append(order)
        self.was_ordered.set()
        here, sources = [], {}
        for span in order.spans:
            source = self[span.source.rpartition("-")[2]]
            is_gone = span.source in self.gone | self.frozen
            here.append(0 if is_gone else await self._move(source, target, span, order.purpose))
            moved = {"num_blocks": here[-1], "num_bytes": here[-1] * SLOT, "transport": "copy"}
            error, seconds = (ShardUnavailable("It is gone."), 0.0) if is_gone else (None, 0.001)
            sources[span.source] = SourceReport.of(error, seconds=seconds, **moved)
        if order.purpose == "use":
            for span in reversed(order.spans):
                target.mover.note_use(split_keys(span.keys), span.part)
        return FetchReport(here=tuple(here), sources=sources)

    async def _move(self, source: Node, target: Node, span: Span, purpose: str) -> int:
        keys, parts, is_use = split_keys(span.keys), [PartRequest(span.part)], purpose == "prompt"
        moved = num_here(target.mover, keys) if purpose == "use" else 0
        while moved < len(keys):
            await self.may_move.wait()
            step = keys[moved : moved + self.blocks_per_step]
            held = source.mover.lease_for(step, [parts], is_use=is_use)
            if not held.num_blocks:
                break
            pool = np.zeros((held.num_blocks, SLOT), dtype=np.uint8)
            source.mover.read(held.leases[0], pool, np.arange(held.num_blocks), verify=True)
            source.mover.release(*held.leases)
            made = target.mover.reserve(
                step[: held.num_blocks],
                parent=keys[moved - 1] if moved else BlockKey(span.parent) or None,
                depth=span.depth + moved,
                part=span.part,
                block_bytes=SLOT,
                head=span.head,
                needs_parent=span.needs_parent,
            )
            assert not made.existing, "a block was brought twice"
            target.mover.commit(made, target.mover.write(made, pool, made.rows))
            brought = held.num_blocks - made.dropped
            moved += brought
            if brought < len(step):
                break
            await asyncio.sleep(0)
        return moved


def prefix_of(
    keys: Sequence[BlockKey], *requests: PartRequest, seconds_per_block: float = 0.0
) -> Prefix:
    parts = requests or (PartRequest(0),)
    sizes = {one.part: SLOT for one in parts}
    asked = {"keys": tuple(keys), "readers": (parts,), "block_bytes": sizes}
    return Prefix(**asked, seconds_per_block=seconds_per_block)


async def until(condition: Callable[[], bool]) -> None:
    """Return once `condition` holds, of which nobody is told."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


# -- two shards, and an engine: what it asks of one comes from the other ---------------------------

MINE = replace(NAMESPACE, part_bytes=4096)
HURRIED = SETTINGS.model_copy(update={"handover_s": 0.5})  # for tests where something is frozen
PATIENT = HURRIED.model_copy(update={"deadline_s": 60.0, "call_timeout_s": 60.0})
"""For all others: what a starved machine does late has come all the same."""


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

    def stage(self, keys: list[BlockKey]) -> dict[str, Any]:
        return self.ask("stage", keys=b"".join(keys), wait_s=30.0, tokens_per_s=0)

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
    line, ready = Line(), list[Nodes]()

    async def ask(actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Wait for the nodes: a call that failed would keep a shard from the lookup for a while."""
        while not ready:  # noqa: ASYNC110 - another thread puts them there
            await asyncio.sleep(0.01)
        return await ready[0].ask(actor, method, *args, timeout_s=timeout_s)

    with contextlib.ExitStack() as stack:
        parent, disk = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where, prefix="kvray-test-")))
            for where in ("/dev/shm", None)
        )
        shards = {}
        for name in "ab":
            nvme = nvme_for(disk) if name == "b" else None
            own = {"staging": staging, "nvme": nvme, "admission": "all", **changes}
            settings = settings_for(parent / name, **own)
            shards[name] = line.follow(Shard(f"kvray-shard-{name}", settings, ask=ask))
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
        ready.append(nodes)
        engine = stack.enter_context(contextlib.closing(ShardSocket(parent / "a")))
        made = Tier(**shards, line=line, nodes=nodes, engine=engine)
        made.ask("register", namespace=MINE.to_wire(), wanted=[[0, None]])
        wait_for(lambda: made.ask("report", counters={})["peers"], "hearing of the other")
        yield made
