"""A part of the tier that is frozen or cut off: soon no request waits for it any more."""

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.identity.block import BlockKey
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import why_impossible
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena
from tests.ray.cluster import TwoNodes, open_tier, open_two_nodes
from tests.unit.actors.small_shard import NAMESPACE
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

NO_NETWORK = why_impossible()
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

    def __init__(self, nodes: TwoNodes) -> None:
        self.nodes = nodes
        self.arena = Arena(nodes.node_dir(nodes.nodes[SOURCE]), lock_wait_s=5)
        self.arena.join("engine")
        self.socket = ShardSocket(nodes.node_dir(nodes.nodes[TARGET]))
        namespace = replace(NAMESPACE, part_bytes=BLOCK_BYTES)
        self.ask("register", namespace=namespace.to_wire(), wanted=[[0, None]])
        wait_for(lambda: self.ask("report", counters={})["peers"], "peers")

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return self.socket.call(op, timeout_s=10, replica="r", rank=0, **fields)

    def store(self) -> list[BlockKey]:
        """Return the keys of a new prompt at the source.

        What a frozen part has leased there may leave room for it only when the leases end.
        """
        keys = [BlockKey(secrets.token_bytes(32)) for _ in range(NUM_BLOCKS)]
        wait_for(lambda: self._store(keys), "room for a prompt")
        return keys

    def _store(self, keys: list[BlockKey]) -> bool:
        """Return whether the source has all these blocks now."""
        made = self.arena.reserve(
            keys, parent=None, depth=0, part=0, block_bytes=BLOCK_BYTES, wait_s=5
        )
        assert made is not None
        pool = np.zeros((1, BLOCK_BYTES), dtype=np.uint8)
        pages = np.zeros(len(made.slots), dtype=int)
        self.arena.commit(made, self.arena.write(made, pool, pages))
        return made.dropped == 0

    def stage(self, keys: list[BlockKey], wait_s: float = WAIT_S) -> int:
        """Return how many blocks are at the target then."""
        answer = self.ask("stage", keys=b"".join(keys), wait_s=wait_s, tokens_per_s=0)
        return int(answer["num_blocks"])

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

    def is_whole(self) -> bool:
        """Whether a new prompt is brought."""
        keys = self.store()
        time.sleep(0.3)  # until it is announced
        return self.stage(keys, 2.0) == NUM_BLOCKS

    def close(self) -> None:
        self.socket.close()
        self.arena.close()


def _run_delay_ns(thread: Path) -> int:
    return int((thread / "schedstat").read_text().split()[1])


@pytest.fixture(scope="module")
def tier(machine: Machine) -> Iterator[Tier]:
    with open_silence(machine) as made:
        yield made


@pytest.fixture(scope="module")
def wired_tier(wired_machine: Machine) -> Iterator[Tier]:
    with open_silence(wired_machine) as made:
        yield made


@contextlib.contextmanager
def open_silence(machine: Machine) -> Iterator[Tier]:
    with open_tier(machine, "silence") as nodes:
        wait_for(lambda: _movers(nodes) == ["serving"] * 2, "the movers")
        with contextlib.closing(Tier(nodes)) as made:
            yield made


def _movers(nodes: TwoNodes) -> list[str]:
    done = nodes.machine.run("status", "--json", "-c", str(nodes.config_path))
    return [mover["state"] for mover in json.loads(done.stdout)["movers"]]


@contextlib.contextmanager
def frozen(tier: Tier, kind: str, place: int | None) -> Iterator[None]:
    """Have an actor stand still; `place` None: on the head."""
    machine = tier.nodes.machine
    node = machine.head if place is None else machine.nodes[place]
    processes = node.actors(kind)
    assert processes, f"no {kind} runs there"
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(Exception):  # it may have been replaced meanwhile
                process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def unplugged(tier: Tier, place: int) -> Iterator[None]:
    network = tier.nodes.machine.network
    assert network is not None
    network.cut(place + 1)
    try:
        yield
    finally:
        network.heal(place + 1)


FROZEN: list[Any] = [
    pytest.param("Shard", SOURCE, id="the source's shard"),
    pytest.param("Mover", SOURCE, id="the source's mover", marks=pytest.mark.long),
    pytest.param("Mover", TARGET, id="the own mover", marks=pytest.mark.long),
    pytest.param("Lookup", None, id="the lookup"),
]


@pytest.mark.parametrize(("kind", "place"), FROZEN)
def test_requests_wait_for_what_is_frozen_no_longer_than_it_takes_to_notice(
    tier: Tier, kind: str, place: int | None
) -> None:
    check_waits(tier, lambda: frozen(tier, kind, place))


@pytest.mark.long
@pytest.mark.root
@pytest.mark.skipif(NO_NETWORK is not None, reason=f"{NO_NETWORK}")
@pytest.mark.parametrize("place", [SOURCE, TARGET])
def test_requests_wait_for_what_is_cut_off_no_longer_than_it_takes_to_notice(
    wired_tier: Tier, place: int
) -> None:
    check_waits(wired_tier, lambda: unplugged(wired_tier, place))


def check_waits(tier: Tier, fault: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Check how long requests take from when the fault begins."""
    wait_for(tier.is_whole, "a tier that works")
    prompts = [tier.store() for _ in range(100)]
    time.sleep(1.0)  # until they are announced
    late: list[float] = []
    with fault():
        began = time.monotonic()
        for keys in prompts:
            core_wait_s, asked = -tier.core_wait_s(), time.monotonic()
            tier.stage(keys)
            took_s = time.monotonic() - asked
            core_wait_s += tier.core_wait_s()
            waited_s = took_s - max(
                0.0, core_wait_s
            )  # which nothing that is silent is to blame for
            assert waited_s < WAIT_S + SLACK_S
            if waited_s >= WAIT_S:
                late.append(asked - began)
            if asked - began > WATCHED_S:
                break
            time.sleep(0.05)
    assert len([at for at in late if at > NOTICED_S + SLACK_S]) <= 1
    wait_for(tier.is_whole, "a tier that works again")


@pytest.mark.long
@pytest.mark.root
@pytest.mark.skipif(NO_NETWORK is not None, reason=f"{NO_NETWORK}")
def test_where_nixl_gets_through_nowhere_blocks_come_by_the_next_transport() -> None:
    # Each node tells the others to push to its own loopback device.
    with open_two_nodes(has_network=True, environ={"UCX_NET_DEVICES": "lo"}) as nodes:
        wait_for(lambda: _movers(nodes) == ["serving"] * 2, "the movers")
        with contextlib.closing(Tier(nodes)) as tier:
            wait_for(tier.is_whole, "a prompt that comes")
        wait_for(lambda: _transports(nodes) == ["object_ref"] * 2, "the other way")
        done = nodes.machine.run("doctor", "--json", "-c", str(nodes.config_path))
    ways = json.loads(done.stdout)["transports"]
    assert all("nixl keeps failing from" in way["why"] for way in ways)


def _transports(nodes: TwoNodes) -> list[str]:
    done = nodes.machine.run("doctor", "--json", "-c", str(nodes.config_path))
    return [way["transport"] for way in json.loads(done.stdout)["transports"]]
