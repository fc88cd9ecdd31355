"""Two shards without Ray: what an engine asks of one comes from the other, by its socket."""

import asyncio
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.actors.owner.ownership import sweep
from kvray.actors.shard.shard import Shard
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.identity.keys import chain_keys, request_seed
from kvray.node.stage_calls import ShardSocket
from kvray.store import ArenaOwner
from tests.unit.actors.nodes import SETTINGS, Nodes
from tests.unit.actors.small_shard import (
    NAMESPACE,
    Line,
    nvme_for,
    open_arena,
    settings_for,
    wait_until_serving,
)
from tests.unit.store.small_arena import chain, fetch, store
from tests.waiting import wait_for

KEYS = chain(12)
MINE = replace(NAMESPACE, part_bytes=4096)


class Calls:
    """The `Ask` of both shards; the nodes are there once the shards serve."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.nodes: Nodes | None = None

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        if self.nodes is None:
            raise ShardUnavailable("The nodes are not there yet.")
        return await self.nodes.ask(actor, method, *args, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Shards `a` and `b`, which has a disk, perhaps more, and an engine at `a`."""

    shards: dict[str, Shard]
    nodes: Nodes
    engine: ShardSocket

    @property
    def a(self) -> Shard:
        return self.shards["a"]

    @property
    def b(self) -> Shard:
        return self.shards["b"]

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self.engine.call(op, timeout_s=5, replica="r", rank=0, **fields)

    def register(self) -> None:
        self.ask("register", namespace=MINE.to_wire(), wanted=[[0, None]])

    def stage(self, keys: list[BlockKey], wait_s: float = 2.0) -> dict[str, Any]:
        return self.ask("stage", keys=b"".join(keys), wait_s=wait_s, tokens_per_s=0)


@pytest.fixture
def tier() -> Iterator[Tier]:
    with make_tier() as made:
        yield made


@contextlib.contextmanager
def make_tier(**changes: Any) -> Iterator[Tier]:
    """Have the shards `a` and `b` with these settings."""
    parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    disk = Path(tempfile.mkdtemp(prefix="kvray-test-"))
    line = Line()
    calls = Calls(line)
    shards = {}
    for name in "ab":
        settings = settings_for(
            parent / name,
            staging=SETTINGS.model_copy(update={"handover_s": 0.5}),
            nvme=nvme_for(disk) if name == "b" else None,
            admission="all",
            **changes,
        )
        shards[name] = Shard(f"kvray-shard-{name}", settings, [line.announce], ask=calls)
        shards[name].start()
    answers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, parent)
        stack.callback(shutil.rmtree, disk)
        for name, shard in shards.items():
            stack.callback(sweep, parent / name)
            stack.callback(shard.stop, retire=False, timeout_s=10)
            wait_until_serving(shard)
            answers[f"{shard.name}.room"] = shard.requests.room
        nodes = Nodes({name: open_arena(parent / name) for name in shards})
        stack.callback(nodes.close)
        calls.nodes = nodes
        nodes.others |= answers
        nodes.others["kvray-lookup.locate"] = line.locate
        nodes.others["kvray-lookup.targets"] = line.targets
        engine = stack.enter_context(contextlib.closing(ShardSocket(parent / "a")))
        nodes.others["kvray-shard-b.promote"] = shards["b"].requests.promote
        made = Tier(shards=shards, nodes=nodes, engine=engine)
        made.register()
        wait_for(lambda: made.ask("report", counters={})["peers"], "hearing of the other")
        yield made


def known(tier: Tier, keys: list[BlockKey]) -> bool:
    locate = tier.nodes.others["kvray-lookup.locate"]
    runs = locate(b"".join(keys))
    return bool(runs) and runs[-1].stop == len(keys)


def test_an_engine_gets_by_its_socket_what_the_other_node_has(tier):
    store(tier.nodes["b"].arena, KEYS)
    wait_for(lambda: known(tier, KEYS))
    answer = tier.stage(KEYS)
    assert answer["arrivals"] == [[12, "copy", "kvray-shard-b"]]
    assert answer | {"arrivals": ()} == {
        "ok": True,
        "num_blocks": 12,
        "reason": "none",
        "leases": {},
        "arrivals": (),
    }
    leases = tier.nodes["a"].arena.lease(KEYS)
    assert leases
    assert fetch(tier.nodes["a"].arena, KEYS, leases[0])
    staging = tier.a.status()["staging"]
    assert (staging["stages"], staging["staged_blocks"]) == (1, 12)


def test_what_the_other_node_has_on_disk_only_is_known_and_comes_too(tier):
    keys = chain(40)
    store(tier.nodes["b"].arena, keys)
    wait_for(lambda: tier.b.status()["nvme"]["demoted_blocks"] == 40)
    assert ArenaOwner(tier.nodes["b"].arena).clear() == 40
    time.sleep(0.1)  # so that what has gone would be announced
    assert known(tier, keys)
    # Its memory has another prompt's blocks, and the beginning is here already.
    store(tier.nodes["a"].arena, keys[:7])
    answer = tier.stage(keys)
    assert (answer["num_blocks"], answer["reason"]) == (40, "none")
    assert answer["arrivals"] == [[7, "host", ""], [40, "copy", "kvray-shard-b"]]
    leases = tier.nodes["a"].arena.lease(keys)
    assert leases
    assert fetch(tier.nodes["a"].arena, keys, leases[0])
    assert tier.a.status()["staging"]["promoted_blocks"] == 33
    assert tier.b.status()["nvme"]["promoted_blocks"] == 33


def test_what_is_neither_in_memory_nor_on_disk_any_more_is_announced_as_gone(tier):
    keys = chain(40)
    store(tier.nodes["b"].arena, keys)
    wait_for(lambda: tier.b.status()["nvme"]["demoted_blocks"] == 40)
    wait_for(lambda: known(tier, keys))
    tier.b.clear(5.0)
    wait_for(lambda: not known(tier, keys[:1]))


def test_a_staged_copy_is_announced_as_a_further_holder(tier):
    store(tier.nodes["b"].arena, KEYS)
    wait_for(lambda: known(tier, KEYS))
    wait_for(lambda: tier.stage(KEYS)["num_blocks"] == len(KEYS))  # a call may be late
    locate = tier.nodes.others["kvray-lookup.locate"]
    both = {"kvray-shard-a": 1, "kvray-shard-b": 1}
    wait_for(lambda: [run.holders for run in locate(b"".join(KEYS))] == [both])


def test_a_stage_that_waits_holds_up_nobody_else(tier):
    store(tier.nodes["b"].arena, KEYS)
    wait_for(lambda: known(tier, KEYS))
    tier.nodes.frozen.add("kvray-lookup")
    began = time.monotonic()
    # The question to the lookup ends before the wait, or with it.
    assert tier.stage(KEYS, wait_s=0.05)["reason"] in ("too_slow", "store_down")
    assert time.monotonic() - began < 1.0
    assert tier.a.status()["state"] == "serving"


def test_an_engine_that_has_not_said_what_it_reads_is_told_so(tier):
    tier.ask("register", namespace=MINE.to_wire())
    with pytest.raises(ConfigError, match="update its kvray"):
        tier.stage(KEYS)


def test_handovers_end_by_themselves(tier):
    store(tier.nodes["a"].arena, KEYS)
    assert tier.stage(KEYS)["num_blocks"] == 12
    assert tier.a.status()["staging"]["handovers"] == 1
    wait_for(lambda: tier.a.status()["staging"]["handovers"] == 0, "the end of the handover")


def test_a_profile_says_how_a_replica_reads_and_how_fast_its_node_gets_blocks(tier):
    assert tier.a.requests.profile("r") == {
        "tokens_per_block": 32,
        "block_bytes": 4096,
        "parts": 1,
        "namespace": MINE.digest(),
        "num_partitions": 1,
        "disk": None,
        "links": {},
    }
    store(tier.nodes["b"].arena, KEYS)
    wait_for(lambda: known(tier, KEYS))
    assert tier.stage(KEYS, wait_s=5.0)["num_blocks"] == len(KEYS)
    ((shard, (latency_s, _)),) = tier.a.requests.profile("r")["links"].items()
    assert shard == "kvray-shard-b"
    assert latency_s > 0
    with pytest.raises(ConfigError, match="No rank of 'unknown'"):
        tier.a.requests.profile("unknown")


def test_a_shard_says_what_it_has_on_its_disk_only(tier):
    tokens = np.arange(32 * 40, dtype="<i4")
    keys = chain_keys(tokens, tokens_per_block=32, seed=request_seed(MINE.digest()))
    store(tier.nodes["b"].arena, keys)
    wait_for(lambda: tier.b.status()["nvme"]["demoted_blocks"] == 40)
    packed = b"".join(keys)
    assert tier.b.requests.on_disk(1, packed) == bytes(40), "it is in memory, too"
    assert ArenaOwner(tier.nodes["b"].arena).clear() == 40
    store(tier.nodes["b"].arena, keys[:3])
    assert tier.b.requests.on_disk(1, packed) == bytes(3) + b"\1" * 37
    assert tier.b.requests.on_disk(2, packed) == bytes(40), "another part"
    assert tier.a.requests.on_disk(1, packed) == bytes(40)
    with pytest.raises(ConfigError, match="no mask of parts"):
        tier.b.requests.on_disk(0, packed)


def test_a_prefetch_brings_a_prompt_before_its_engine_sees_it(tier):
    tokens = np.arange(32 * 5 + 1, dtype="<i4")
    seed = request_seed(MINE.digest(), salt="tenant")
    keys = chain_keys(tokens, tokens_per_block=32, seed=seed)
    store(tier.nodes["b"].arena, keys)
    wait_for(lambda: known(tier, keys))
    found = tier.a.requests.prefetch("r", tokens.tobytes(), salt="tenant")
    assert found == {
        "num_tokens": 160,
        "staged_tokens": 160,
        "num_blocks": 5,
        "sources": [[160, "remote"]],
        "reason": "none",
    }
    again = tier.a.requests.prefetch("r", tokens.tobytes(), salt="tenant")
    assert (again["num_tokens"], again["staged_tokens"]) == (160, 0)
    assert again["sources"] == [[160, "host"]]
    assert tier.a.requests.prefetch("r", tokens[:1].tobytes())["num_blocks"] == 0
    with pytest.raises(ConfigError, match="No rank of 'unknown'"):
        tier.a.requests.prefetch("unknown", tokens.tobytes())


def test_a_shard_stages_and_leases_for_a_leader_elsewhere(tier):
    arena = tier.nodes["a"].arena
    tier.ask(
        "register",
        namespace=MINE.to_wire(),
        wanted=[[0, None]],
        num_ranks=2,
        holder=[arena.arena_id, *arena.membership],
    )
    store(tier.nodes["b"].arena, KEYS)
    wait_for(lambda: known(tier, KEYS))
    packed = b"".join(KEYS)
    assert tier.a.requests.stage_ranks("", "r", [0], 2.0, 0.0, None, packed) == {
        "num_blocks": 12,
        "reason": "none",
    }
    leases = tier.a.requests.lease_ranks("r", [0], "token", packed)
    assert leases[0][0] == arena.arena_id
    tier.a.requests.release_ranks("token")
    assert tier.a.requests.lease_ranks("r", [0], "token", packed) == {}


def test_a_shard_that_ends_meanwhile_answers_nobody_for_ever(tier):
    store(tier.nodes["b"].arena, KEYS)
    wait_for(lambda: known(tier, KEYS))
    tier.nodes.may_move = asyncio.Event()

    def stop_soon() -> None:
        wait_for(lambda: tier.nodes.orders)
        tier.a.stop(retire=False, timeout_s=10)

    stopper = threading.Thread(target=stop_soon, name="stopper")
    stopper.start()
    with pytest.raises(ShardUnavailable):
        tier.a.requests.stage_ranks("", "r", [0], 60.0, 0.0, None, b"".join(KEYS))
    stopper.join()
