"""A mover that is frozen while it pushes, and wakes when the other side has long gone on."""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from kvray.errors import KVRayError
from kvray.identity.block import BlockKey
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import Network, why_impossible
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena
from kvray.store.arena import payload
from kvray.store.arena.layout import READY
from tests.ray.cluster import SETTINGS, TwoNodes, open_tier
from tests.unit.actors.small_shard import NAMESPACE
from tests.waiting import HANG_S, wait_for

NO_NETWORK = why_impossible()

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.skipif(NO_NETWORK is not None, reason=f"{NO_NETWORK}"),
]

BLOCK_BYTES = 256 * 2**10
NUM_BLOCKS = 48
DEADLINE_S = 2.0
MBIT = 16
"""The blocks would take three times as long as they may."""
BEGUN_BYTES = 2**20
SOURCE, TARGET = 0, 1


class Target:
    """The node that blocks are brought to, as an engine there sees it."""

    def __init__(self, nodes: TwoNodes) -> None:
        self._nodes = nodes
        self._node_dir = nodes.node_dir(nodes.nodes[TARGET])
        self._socket = ShardSocket(self._node_dir)
        self.arena = Arena(self._node_dir, lock_wait_s=5)
        self.arena.join("engine")
        self._register()

    def _register(self) -> None:
        namespace = replace(NAMESPACE, part_bytes=BLOCK_BYTES)
        self._ask("register", namespace=namespace.to_wire(), wanted=[[0, None]])

    def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self._socket.call(op, timeout_s=10, replica="r", rank=0, **fields)

    def has_peers(self) -> bool:
        """Whether the shard here knows the other node."""
        return bool(self._ask("report", counters={})["peers"])

    def stage(self, keys: list[BlockKey], wait_s: float) -> int:
        """Return how many blocks are here then."""
        answer = self._ask("stage", keys=b"".join(keys), wait_s=wait_s, tokens_per_s=0)
        return int(answer["num_blocks"])

    def has_shard(self) -> bool:
        """Whether a shard answers, to which the engine is known again."""
        with contextlib.suppress(KVRayError):
            self._register()
            return True
        return False

    def fill(self) -> None:
        """Have blocks of this node's own wherever there is room for one."""
        for _ in range(8):
            store(self.arena, NUM_BLOCKS // 2)

    def changed(self) -> list[int]:
        """Return the READY slots whose bytes are not those that they were committed with."""
        tables = self.arena.tables
        slots = np.flatnonzero(tables.slot_state == READY)
        assert len(slots) > NUM_BLOCKS
        bad = payload.sum_slots(tables, slots) != tables.slot_checksum[slots]
        return [int(slot) for slot in slots[bad]]

    def close(self) -> None:
        self._socket.close()
        self.arena.close()


def store(arena: Arena, count: int) -> list[BlockKey]:
    """Return the keys of a new prompt, of which there is as much as has room."""
    keys = [BlockKey(secrets.token_bytes(32)) for _ in range(count)]
    made = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=BLOCK_BYTES, wait_s=5)
    if made is not None and len(made.slots):
        pool = np.frombuffer(secrets.token_bytes(BLOCK_BYTES), dtype=np.uint8)[None]
        arena.commit(made, arena.write(made, pool, np.zeros(len(made.slots), dtype=int)))
    return keys


@pytest.fixture
def nodes(wired_machine: Machine) -> Iterator[TwoNodes]:
    settings = {**SETTINGS, "staging": {"deadline_s": DEADLINE_S}}
    with open_tier(wired_machine, "pusher", settings) as made:
        wait_for(lambda: serving(made) == 2, "the movers")
        yield made


def movers(nodes: TwoNodes) -> list[dict[str, Any]]:
    done = nodes.machine.run("status", "--json", "-c", str(nodes.config_path))
    return list(json.loads(done.stdout)["movers"])


def serving(nodes: TwoNodes) -> int:
    return sum(mover["state"] == "serving" for mover in movers(nodes))


@contextlib.contextmanager
def frozen(processes: list[psutil.Process]) -> Iterator[None]:
    assert processes
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def settle(network: Network, number: int) -> None:
    """Return when next to nothing comes in any more."""
    before = network.bytes_in(number)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = network.bytes_in(number)
        if now - before < BLOCK_BYTES:
            return
        before = now
    raise AssertionError("bytes came in for too long")


@pytest.fixture
def source(nodes: TwoNodes) -> Iterator[Arena]:
    arena = Arena(nodes.node_dir(nodes.nodes[SOURCE]), lock_wait_s=5)
    arena.join("engine")
    yield arena
    arena.close()


@pytest.fixture
def target(nodes: TwoNodes) -> Iterator[Target]:
    made = Target(nodes)
    yield made
    made.close()


def test_no_ready_slot_changes_when_a_pusher_wakes_whose_targets_shard_died_meanwhile(
    nodes: TwoNodes, source: Arena, target: Target
) -> None:
    machine = nodes.machine
    network, wire = machine.network, TARGET + 1
    assert network is not None
    wait_for(target.has_peers, "peers")
    keys = store(source, NUM_BLOCKS)
    time.sleep(0.5)  # until they are announced
    network.slow(SOURCE + 1, mbit=MBIT, latency_ms=400)
    before = network.bytes_in(wire)
    staging = threading.Thread(target=target.stage, args=(keys, DEADLINE_S))
    staging.start()
    wait_for(lambda: network.bytes_in(wire) - before > BEGUN_BYTES, "a push")
    with frozen(machine.head.actors("Supervisor")):  # it would end the mover after some seconds
        with frozen(machine.nodes[SOURCE].actors("Mover")):
            staging.join(HANG_S)
            assert not staging.is_alive()
            time.sleep(DEADLINE_S)
            machine.nodes[TARGET].actors("Shard")[0].kill()
            wait_for(target.has_shard, "the next shard")
            target.fill()
            assert not target.changed()
            network.speed_up(SOURCE + 1)
        settle(network, wire)
        assert not target.changed()
    wait_for(lambda: serving(nodes) == 2, "the movers")
    assert any(mover["fenced_slots_total"] for mover in movers(nodes))
