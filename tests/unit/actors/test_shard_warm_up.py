"""Warm-ups without Ray: shard `c` joins a tier of two, and gets what they use most."""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.config import WarmUpConfig
from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.identity.block import BlockKey, namespace_id
from kvray.node.shard_socket import ShardSocket
from kvray.store import Arena, ArenaOwner
from tests.unit.actors.nodes import SETTINGS, Node, Nodes
from tests.unit.actors.small_shard import (
    NAMESPACE,
    Line,
    nvme_for,
    open_arena,
    settings_for,
    wait_until_serving,
)
from tests.unit.actors.test_shard_staging import Calls
from tests.unit.store.small_arena import SLOT, chain, fetch, spec, store
from tests.waiting import wait_for

MINE = replace(NAMESPACE, part_bytes=SLOT)
NUMBER = namespace_id(MINE.digest())
CAPACITY, RESERVE = 64, 4  # blocks of a node, and those that eviction may keep free


@dataclass(slots=True)
class Joining:
    """Nodes that join one after the other, each with an empty arena."""

    parent: Path
    stack: contextlib.ExitStack
    line: Line = field(default_factory=Line)
    shards: dict[str, Shard] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=lambda: Nodes({}))
    calls: Calls = field(init=False)
    answering: list[str] = field(default_factory=list)
    """The shards that the lookup names."""

    def __post_init__(self) -> None:
        self.calls = Calls(self.line)
        self.calls.nodes = self.nodes
        self.stack.callback(self.nodes.close)
        self.nodes.others["kvray-lookup.locate"] = self.line.locate
        self.nodes.others["kvray-lookup.targets"] = lambda: list(self.answering)

    def join(
        self, name: str, *, share: float = 0.5, deadline_s: float = 20.0, has_disk: bool = False
    ) -> Arena:
        """Start a node, and return its arena as its engines have it."""
        settings = settings_for(
            self.parent / name,
            staging=SETTINGS,
            warm_up=WarmUpConfig(share=share, deadline_s=deadline_s),
            spec=spec(holders_max=16),
            nvme=nvme_for(self.parent / f"{name}-disk") if has_disk else None,
            admission="all",
        )
        shard = self.shards[name] = Shard(
            f"kvray-shard-{name}", settings, [self.line.announce], ask=self.calls
        )
        (self.parent / f"{name}-disk").mkdir()
        requests, others = shard.requests, self.nodes.others
        others[f"kvray-shard-{name}.offer"] = requests.offer
        others[f"kvray-shard-{name}.promote"] = requests.promote
        others[f"kvray-mover-{name}.status"] = lambda: {
            "state": "serving" if name in self.nodes.by_name else "waiting"
        }
        shard.start()
        self.stack.callback(shard.stop, retire=True, timeout_s=10)
        wait_until_serving(shard)
        self.nodes.by_name[name] = Node(name, open_arena(self.parent / name))
        self.answering.append(shard.name)
        return self.nodes[name].arena

    def warm_up(self, name: str) -> dict[str, Any]:
        return self.shards[name].status().get("warm_up") or {}

    def has(self, name: str, keys: list[BlockKey]) -> bool:
        return bool(self.nodes[name].arena.match(keys) == len(keys))

    def register(self, name: str, rank: int = 0) -> None:
        """Have a rank, which reads the part of its number, registered for as long as the test."""
        engine = self.stack.enter_context(contextlib.closing(ShardSocket(self.parent / name)))
        fields = {"namespace": MINE.to_wire(), "wanted": [[rank, None]], "num_ranks": 2}
        engine.call("register", timeout_s=5, replica="r", rank=rank, **fields)


@pytest.fixture
def joining() -> Iterator[Joining]:
    with contextlib.ExitStack() as stack:
        parent = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
        stack.callback(shutil.rmtree, parent)
        yield Joining(parent=parent, stack=stack)


def is_done(joining: Joining, name: str) -> Callable[[], bool]:
    return lambda: joining.warm_up(name).get("state") == "done"


def test_a_node_that_joins_is_given_what_others_have(joining: Joining) -> None:
    keys, more = chain(12), chain(9, seed="more")
    store(joining.join("a"), keys)
    store(joining.join("b", share=0), more)

    arena = joining.join("c")

    wait_for(is_done(joining, "c"))
    assert joining.has("c", keys)
    assert joining.has("c", more)
    leases = arena.lease(keys)
    assert leases
    assert fetch(arena, keys, leases[0])
    found = joining.warm_up("c")
    assert found.pop("seconds") < 20
    assert found == {
        "state": "done",
        "by": "new here",
        "blocks": 21,
        "bytes": 21 * SLOT,
        "left_bytes": 0,
        "sources": ["kvray-shard-a", "kvray-shard-b"],
        "message": "",
        "total_bytes": 21 * SLOT,
    }


def test_a_block_that_several_have_comes_once(joining: Joining) -> None:
    chains = [chain(5, seed=str(at)) for at in range(6)]
    for name in "ab":
        arena = joining.join(name, share=0)
        for keys in chains:
            store(arena, keys)  # the mover's stand-in refuses a block that is there
    joining.join("c")
    wait_for(is_done(joining, "c"))
    assert all(joining.has("c", keys) for keys in chains)
    assert joining.warm_up("c")["blocks"] == 30


def test_only_the_share_is_filled_and_the_hottest_come_first(joining: Joining) -> None:
    arena = joining.join("a", share=0)
    chains = [chain(8, seed=str(at)) for at in range(7)]
    for keys in chains:
        store(arena, keys)
    wait_for(lambda: joining.shards["a"].status()["arena"]["blocks"] == 56)
    joining.join("c", share=0.25)
    wait_for(is_done(joining, "c"))
    assert joining.warm_up("c")["blocks"] == CAPACITY // 4
    assert joining.has("c", chains[-1])
    assert not joining.nodes["c"].arena.match(chains[0])


def test_nothing_goes_for_what_comes(joining: Joining) -> None:
    first = chain(30)
    store(joining.join("a", share=0), first)
    arena = joining.join("c", share=1.0)
    wait_for(is_done(joining, "c"))
    mine = chain(20, seed="mine")
    store(arena, mine)
    store(joining.nodes["a"].arena, chain(30, seed="more"))

    joining.shards["c"].requests.warm_up("somebody", None, None)

    wait_for(is_done(joining, "c"))
    assert joining.warm_up("c")["blocks"] == CAPACITY - 50 - RESERVE
    time.sleep(0.3)  # it would evict meanwhile
    joining.shards["c"].requests.warm_up("somebody", None, None)
    wait_for(is_done(joining, "c"))
    assert joining.warm_up("c")["message"] == "It has no room."
    assert joining.has("c", mine)
    assert joining.has("c", first)


def test_a_share_of_zero_means_no_warm_up(joining: Joining) -> None:
    store(joining.join("a", share=0), chain(12))
    joining.join("c", share=0)
    joining.register("c")
    time.sleep(0.3)
    assert joining.warm_up("c") == {}
    with pytest.raises(ShardUnavailable, match="share is 0"):
        joining.shards["c"].requests.warm_up("somebody", None, None)


def test_a_replica_gets_what_its_namespace_uses(joining: Joining) -> None:
    keys, other, away = chain(12), chain(9, seed="other"), chain(4, seed="away")
    arena = joining.join("a", share=0)
    arena_c = joining.join("c")
    wait_for(is_done(joining, "c"))
    store(arena_c, chain(1, seed="not empty"))
    store(arena, keys, namespace=NUMBER)
    store(arena, other, namespace=NUMBER + 1)
    store(arena, away, namespace=NUMBER, part=1)

    joining.register("c")

    wait_for(lambda: joining.has("c", keys))
    wait_for(is_done(joining, "c"))
    assert not arena_c.match(other)
    assert not arena_c.present(away, [1])[0].any(), "no rank here reads that part yet"
    joining.register("c", rank=1)
    wait_for(lambda: [*arena_c.present(away, [1])[0]] == [True] * 4)
    wait_for(is_done(joining, "c"))
    later = chain(3, seed="later")
    store(arena, later, namespace=NUMBER)
    joining.shards["c"].requests.warm_up("somebody", "r", 10.0)
    wait_for(lambda: joining.has("c", later))
    wait_for(is_done(joining, "c"))
    assert joining.warm_up("c")["by"] == "somebody"
    with pytest.raises(ConfigError, match="No rank of 'unknown'"):
        joining.shards["c"].requests.warm_up("somebody", "unknown", None)


def test_what_others_have_on_disk_comes_too(joining: Joining) -> None:
    keys = chain(40)
    arena = joining.join("a", share=0, has_disk=True)
    store(arena, keys)
    wait_for(lambda: joining.shards["a"].status()["nvme"]["demoted_blocks"] == 40)
    assert ArenaOwner(arena).clear() == 40
    joining.join("c", share=1.0)
    wait_for(is_done(joining, "c"))
    assert joining.has("c", keys)


def test_an_order_ends_what_the_node_does_by_itself(joining: Joining) -> None:
    store(joining.join("a", share=0), chain(20))
    joining.nodes.may_move = held_up = asyncio.Event()
    joining.join("c", share=1.0)
    wait_for(lambda: joining.nodes.orders)
    joining.shards["c"].requests.warm_up("somebody", None, None)
    assert joining.warm_up("c")["by"] == "new here"
    held_up.set()
    wait_for(is_done(joining, "c"))
    assert joining.warm_up("c")["by"] == "somebody"


def test_a_node_that_does_not_answer_costs_its_own_blocks_only(joining: Joining) -> None:
    keys, lost = chain(12), chain(9, seed="lost")
    store(joining.join("a", share=0), keys)
    store(joining.join("b", share=0), lost)
    joining.nodes.gone.add("kvray-shard-b")
    joining.join("c")
    wait_for(is_done(joining, "c"))
    assert joining.has("c", keys)
    assert "kvray-shard-b" in joining.warm_up("c")["message"]


def test_a_mover_that_is_gone_costs_its_own_blocks_only(joining: Joining) -> None:
    keys, lost = chain(12), chain(9, seed="lost")
    store(joining.join("a", share=0), keys)
    store(joining.join("b", share=0), lost)
    joining.nodes.gone.add("kvray-mover-b")
    joining.join("c")
    wait_for(is_done(joining, "c"))
    assert joining.has("c", keys)
    assert "It is gone" in joining.warm_up("c")["message"]
    orders = len(joining.nodes.orders)
    joining.shards["c"].requests.warm_up("somebody", None, None)
    wait_for(is_done(joining, "c"))
    assert len(joining.nodes.orders) == orders, "it is left alone for a while"


def test_its_time_ends_it(joining: Joining) -> None:
    store(joining.join("a", share=0), chain(12))
    joining.join("c", deadline_s=1e-9)
    wait_for(is_done(joining, "c"))
    assert joining.warm_up("c")["blocks"] == 0


def test_a_first_node_waits_for_nobody(joining: Joining) -> None:
    joining.join("a")
    wait_for(is_done(joining, "a"))
    assert joining.warm_up("a")["message"] == "No other node is there."


def test_a_node_that_is_to_go_gets_nothing(joining: Joining) -> None:
    joining.join("c")
    joining.shards["c"].requests.drain("somebody", None)
    with pytest.raises(ShardUnavailable, match="is to go"):
        joining.shards["c"].requests.warm_up("somebody", None, None)


def test_it_takes_so_many_orders_and_no_more(joining: Joining) -> None:
    store(joining.join("a", share=0), chain(12))
    joining.nodes.may_move = asyncio.Event()
    joining.join("c")
    wait_for(lambda: joining.nodes.orders)
    for at in range(7):
        for _ in range(2):  # who asks twice waits once
            joining.shards["c"].requests.warm_up(f"somebody {at}", None, None)
    with pytest.raises(CapacityError, match="warm-ups to do"):
        joining.shards["c"].requests.warm_up("one too many", None, None)
