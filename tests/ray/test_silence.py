"""A part that is frozen or cut off: soon nobody waits for it, and it harms nothing as it wakes."""

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.errors import KVRayError
from kvray.identity.block import BlockKey
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import Network, why_impossible
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena
from kvray.store.arena import payload
from kvray.store.arena.layout import READY
from tests.kit.ray.cluster import SETTINGS, TwoNodes, open_tier, open_two_nodes
from tests.ray.conftest import frozen
from tests.unit.actors.small_shard import NAMESPACE
from tests.waiting import HANG_S, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

NO_NETWORK = why_impossible()
needs_network = pytest.mark.skipif(NO_NETWORK is not None, reason=f"{NO_NETWORK}")
NUM_BLOCKS = 8
BLOCK_BYTES = 16 * 2**10
WAIT_S = 0.1
NOTICED_S = 2.0
SLACK_S = 2.0
"""What a busy machine may take longer, besides what processes wait for a core."""
WATCHED_S = 8.0
SOURCE, TARGET = 0, 1
"""The node that has the blocks, and the one whose engine asks."""


class Tier:
    """Two nodes, of which one stores prompts and the other is asked to stage them."""

    def __init__(self, nodes: TwoNodes, block_bytes: int) -> None:
        self.nodes = nodes
        self.machine = nodes.machine
        self.arenas = [Arena(nodes.node_dir(node), lock_wait_s=5) for node in nodes.nodes]
        for arena in self.arenas:
            arena.join("engine")
        self._block_bytes = block_bytes
        self._socket = ShardSocket(nodes.node_dir(nodes.nodes[TARGET]))
        self._register()
        wait_for(lambda: self._ask("report", counters={})["peers"], "peers")

    def _register(self) -> None:
        namespace = replace(NAMESPACE, part_bytes=self._block_bytes)
        self._ask("register", namespace=namespace.to_wire(), wanted=[[0, None]])

    def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self._socket.call(op, timeout_s=10, replica="r", rank=0, **fields)

    def has_shard(self) -> bool:
        """Whether a shard answers at the target, to which the engine is known again."""
        with contextlib.suppress(KVRayError):
            self._register()
            return True
        return False

    def store(self, keys: list[BlockKey], at: int = SOURCE) -> bool:
        """Store as much of a prompt as has room; return whether that is all."""
        arena = self.arenas[at]
        size = self._block_bytes
        made = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=size, wait_s=5)
        if made is None:
            return False
        pool = np.frombuffer(secrets.token_bytes(size), dtype=np.uint8)[None]
        arena.commit(made, arena.write(made, pool, np.zeros(len(made.slots), dtype=int)))
        return made.dropped == 0

    def new_prompt(self) -> list[BlockKey]:
        """Return the keys of a new prompt at the source.

        What a frozen part has leased there may leave room for it only when the leases end.
        """
        keys = new_keys(NUM_BLOCKS)
        wait_for(lambda: self.store(keys), "room for a prompt")
        return keys

    def stage(self, keys: list[BlockKey], wait_s: float = WAIT_S) -> int:
        """Return how many blocks are at the target then."""
        answer = self._ask("stage", keys=b"".join(keys), wait_s=wait_s, tokens_per_s=0)
        return int(answer["num_blocks"])

    def is_whole(self) -> bool:
        """Whether a new prompt is brought."""
        keys = self.new_prompt()
        time.sleep(0.3)  # until it is announced
        return self.stage(keys, 2.0) == NUM_BLOCKS

    def changed(self) -> list[int]:
        """Return the target's READY slots whose bytes are not those they were committed with."""
        tables = self.arenas[TARGET].tables
        slots = np.flatnonzero(tables.slot_state == READY)
        assert len(slots) > PUSHED_BLOCKS
        bad = payload.sum_slots(tables, slots) != tables.slot_checksum[slots]
        return [int(slot) for slot in slots[bad]]

    def core_wait_s(self) -> float:
        """Return how long this thread and the target's shard were ready to run and had no core.

        Its threads add up, and so do the cores that the host of a virtual machine kept from it.
        """
        (shard,) = self.nodes.nodes[TARGET].actors("Shard")
        waited_ns = _run_delay_ns(Path("/proc/thread-self"))
        for thread in Path(f"/proc/{shard.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                waited_ns += _run_delay_ns(thread)
        stolen = int(Path("/proc/stat").read_text().split()[8])
        return waited_ns / 1e9 + stolen / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._socket.close()
        for arena in self.arenas:
            arena.close()


def new_keys(count: int) -> list[BlockKey]:
    return [BlockKey(secrets.token_bytes(32)) for _ in range(count)]


def _run_delay_ns(thread: Path) -> int:
    return int((thread / "schedstat").read_text().split()[1])


@contextlib.contextmanager
def attached(nodes: TwoNodes, block_bytes: int = BLOCK_BYTES) -> Iterator[Tier]:
    wait_for(nodes.has_movers, "the movers")
    with contextlib.closing(Tier(nodes, block_bytes)) as made:
        yield made


@pytest.fixture(scope="module")
def silent(machine: Machine) -> Iterator[Tier]:
    with open_tier(machine, "silence") as nodes, attached(nodes) as made:
        yield made


@pytest.fixture(scope="module")
def silent_wired(wired_machine: Machine) -> Iterator[Tier]:
    with open_tier(wired_machine, "silence") as nodes, attached(nodes) as made:
        yield made


@contextlib.contextmanager
def unplugged(tier: Tier, place: int) -> Iterator[None]:
    network = tier.machine.network
    assert network is not None
    network.cut(place + 1)
    try:
        yield
    finally:
        network.heal(place + 1)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("Shard", SOURCE), ("Mover", SOURCE), ("Mover", TARGET), ("Lookup", None)],
    ids=["the source's shard", "the source's mover", "the own mover", "the lookup"],
)
def test_requests_wait_for_what_is_frozen_no_longer_than_it_takes_to_notice(silent, kind, place):
    machine = silent.machine
    node = machine.head if place is None else machine.nodes[place]
    check_waits(silent, lambda: frozen(*node.actors(kind)))


@pytest.mark.root
@needs_network
@pytest.mark.parametrize("place", [SOURCE, TARGET])
def test_requests_wait_for_what_is_cut_off_no_longer_than_it_takes_to_notice(silent_wired, place):
    check_waits(silent_wired, lambda: unplugged(silent_wired, place))


def check_waits(tier: Tier, fault: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Check how long requests take from when the fault begins."""
    wait_for(tier.is_whole, "a tier that works")
    prompts = [tier.new_prompt() for _ in range(100)]
    time.sleep(1.0)  # until they are announced
    late: list[float] = []
    with fault():
        began = time.monotonic()
        for keys in prompts:
            core_wait_s, asked = -tier.core_wait_s(), time.monotonic()
            tier.stage(keys)
            took_s = time.monotonic() - asked
            core_wait_s += tier.core_wait_s()
            # Nothing that is silent is to blame for a wait for a core.
            waited_s = took_s - max(0.0, core_wait_s)
            assert waited_s < WAIT_S + SLACK_S
            if waited_s >= WAIT_S:
                late.append(asked - began)
            if asked - began > WATCHED_S:
                break
            time.sleep(0.05)
    assert len([at for at in late if at > NOTICED_S + SLACK_S]) <= 1
    wait_for(tier.is_whole, "a tier that works again")


@pytest.mark.root
@needs_network
def test_where_nixl_gets_through_nowhere_blocks_come_by_the_next_transport() -> None:
    # Each node tells the others to push to its own loopback device.
    with open_two_nodes(has_network=True, environ={"UCX_NET_DEVICES": "lo"}) as nodes:

        def ways() -> list[dict[str, Any]]:
            return list(json.loads(nodes.say("doctor", "--json"))["transports"])

        with attached(nodes) as tier:
            wait_for(tier.is_whole, "a prompt that comes")
        wait_for(lambda: [way["transport"] for way in ways()] == ["object_ref"] * 2, "the other")
        assert all("nixl keeps failing from" in way["why"] for way in ways())


# -- a mover that wakes when the other side has long gone on --------------------------------------

PUSHED_BYTES = 256 * 2**10
PUSHED_BLOCKS = 48
DEADLINE_S = 2.0
MBIT = 16
"""The blocks would take three times as long as they may."""
BEGUN_BYTES = 2**20


def settle(network: Network, number: int) -> None:
    """Return when next to nothing comes in any more."""
    before = network.bytes_in(number)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = network.bytes_in(number)
        if now - before < PUSHED_BYTES:
            return
        before = now
    raise AssertionError("bytes came in for too long")


@pytest.fixture
def pushing(wired_machine: Machine) -> Iterator[Tier]:
    settings = {**SETTINGS, "staging": {"deadline_s": DEADLINE_S}}
    with (
        open_tier(wired_machine, "pusher", settings) as nodes,
        attached(nodes, PUSHED_BYTES) as made,
    ):
        yield made


@pytest.mark.root
@needs_network
def test_no_ready_slot_changes_when_a_pusher_wakes_whose_targets_shard_died_meanwhile(pushing):
    machine, wire = pushing.machine, TARGET + 1
    network = machine.network
    assert network is not None
    keys = new_keys(PUSHED_BLOCKS)
    pushing.store(keys)
    time.sleep(0.5)  # until they are announced
    network.slow(SOURCE + 1, mbit=MBIT, latency_ms=400)
    before = network.bytes_in(wire)
    staging = threading.Thread(target=pushing.stage, args=(keys, DEADLINE_S))
    staging.start()
    wait_for(lambda: network.bytes_in(wire) - before > BEGUN_BYTES, "a push")
    with frozen(*machine.head.actors("Supervisor")):  # it would end the mover after some seconds
        with frozen(*machine.nodes[SOURCE].actors("Mover")):
            staging.join(HANG_S)
            assert not staging.is_alive()
            time.sleep(DEADLINE_S)
            machine.nodes[TARGET].actors("Shard")[0].kill()
            wait_for(pushing.has_shard, "the next shard")
            for _ in range(8):  # blocks of the target's own wherever there is room for one
                pushing.store(new_keys(PUSHED_BLOCKS // 2), TARGET)
            assert not pushing.changed()
            network.speed_up(SOURCE + 1)
        settle(network, wire)
        assert not pushing.changed()
    wait_for(pushing.nodes.has_movers, "the movers")
    assert any(mover["fenced_slots_total"] for mover in pushing.nodes.status()["movers"])
