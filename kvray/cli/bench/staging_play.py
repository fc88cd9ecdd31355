"""The part of `kvray bench staging` that talks to Ray: two nodes, movers, and the bare work.

Runs in a process of its own, as the driver of the bench's own cluster, and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray

from kvray.actors.connection import connect_configured
from kvray.actors.mover_actor import create_mover
from kvray.actors.orders import FetchOrder, FetchReport, Span
from kvray.block import split_keys
from kvray.cli.bench.bare_nixl import BareAddress, BareNixl
from kvray.cli.bench.pairs import Pair, Timing, measure
from kvray.cli.chaos.nodes import RESOURCE
from kvray.config import KVRayConfig, config_on_node, load_config
from kvray.errors import KVRayError
from kvray.store import Arena, ArenaOwner, ArenaSpec
from kvray.transport.nixl import NixlTransport
from kvray.transport.object_ref import ObjectRefTransport

BLOCK_BYTES = 4 * 2**20
SLAB_BYTES = 64 * 2**20

_TIMEOUT_S = 120.0
_LOCK_WAIT_S = 1.0
_SOURCE, _TARGET = 0, 1
_REFS_AHEAD = 2
"""Objects that are asked for before the one that is waited for."""


class BenchNode:
    """One node's arena, and what is done there without a mover."""

    def __init__(self, config: KVRayConfig, num_blocks: int) -> None:
        """Make an arena with room for so many blocks."""
        config = config_on_node(config)
        config.node_dir.mkdir()
        spec = ArenaSpec(
            cluster_name=config.cluster_name,
            capacity=num_blocks * BLOCK_BYTES + SLAB_BYTES,
            slab=SLAB_BYTES,
            slot_min=config.arena.slot_min,
            holders_max=config.arena.holders_max,
        )
        self._arena = Arena.create(config.node_dir, spec, lock_wait_s=_LOCK_WAIT_S)
        self._arena.join("bench")
        self._num_bytes = num_blocks * BLOCK_BYTES
        self._memory = self._arena.tables.data[: self._num_bytes]
        self._nixl: NixlTransport | None = None
        self._bare: BareNixl | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))

    def store(self, keys: bytes) -> None:
        """Fill the arena with blocks."""
        chain = split_keys(keys)
        made = self._arena.reserve(
            chain, parent=None, depth=0, part=0, block_bytes=BLOCK_BYTES, wait_s=_LOCK_WAIT_S
        )
        assert made is not None
        pool = np.random.default_rng(0).integers(0, 256, (8, BLOCK_BYTES), dtype=np.uint8)
        self._arena.commit(made, self._arena.write(made, pool, np.arange(len(made.slots)) % 8))

    def clear(self) -> None:
        """Evict every block."""
        ArenaOwner(self._arena).clear()

    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    def open_bare(self) -> BareAddress:
        """Have an end of NIXL's own, and return where others push to."""
        self._bare = BareNixl(self._memory)
        return self._bare.address

    def close_bare(self) -> None:
        """Have none any more: its thread would disturb everything else."""
        self._bare = None

    def connect_bare(self, address: BareAddress) -> None:
        """Make another node's end known."""
        assert self._bare is not None
        self._bare.connect(address)

    def push_bare(self, address: BareAddress) -> None:
        """Push everything by one transfer of NIXL's own API."""
        assert self._bare is not None
        self._bare.push(address, self._num_bytes)

    def address(self) -> bytes:
        """Return where pushes of the transport go to."""
        return self._transport().address

    def push(self, address: bytes) -> None:
        """Push everything by the transport, at once."""
        start = np.zeros(1, dtype=np.int64)
        size = np.full(1, self._num_bytes)
        self._transport().send(address, start, start, size, timeout_s=_TIMEOUT_S)

    def port(self) -> int:
        """Return where a bare socket listens."""
        return int(self._listener.getsockname()[1])

    def receive(self) -> None:
        """Read everything from a bare socket into the arena."""
        connection, _ = self._listener.accept()
        with connection:
            at, view = 0, self._memory.data
            while at < self._num_bytes:
                count = connection.recv_into(view[at:])
                if not count:
                    raise KVRayError("The bare socket was closed early; run the bench again.")
                at += count
            connection.sendall(b".")

    def stream(self, port: int) -> None:
        """Write everything into a bare socket, and wait until it has been read."""
        with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S) as connection:
            connection.sendall(self._memory.data)
            connection.recv(1)

    def piece(self, start: int, stop: int) -> Any:
        """Return bytes of the arena as an object of Ray."""
        return self._memory[start:stop]

    def pull(self, source: Any) -> None:
        """Bring everything here as objects of Ray, and copy it into the arena."""
        step = ObjectRefTransport.piece_bytes
        starts = list(range(0, self._num_bytes, step))
        ends = [min(start + step, self._num_bytes) for start in starts]
        refs: list[Any] = []
        for index, start in enumerate(starts):
            for ahead in range(len(refs), min(index + _REFS_AHEAD, len(starts))):
                refs.append(source.piece.remote(starts[ahead], ends[ahead]))
            self._memory[start : ends[index]] = ray.get(refs[index], timeout=_TIMEOUT_S)
            refs[index] = None

    def _transport(self) -> NixlTransport:
        if self._nixl is None:
            self._nixl = NixlTransport(self._memory)
        return self._nixl


class Play:
    """Two nodes with an arena and two movers each: one brings blocks by nixl, one by object_ref."""

    def __init__(self, config: KVRayConfig, num_blocks: int) -> None:
        """Start everything on the nodes of the cluster that this process is connected to."""
        self._num_blocks = num_blocks
        self._keys = np.random.default_rng(1).bytes(32 * num_blocks)
        nodes = [
            node["NodeID"]
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"] and RESOURCE in node["Resources"]
        ]
        self._nodes = [_start_node(node_id, config, num_blocks) for node_id in nodes]
        self._get(self._nodes[_SOURCE].store.remote(self._keys))
        self._get(self._nodes[_TARGET].clear.remote())
        self._movers: dict[str, list[Any]] = {}
        for transport in ("nixl", "object_ref"):
            staging = config.staging.model_copy(update={"transports": (transport,)})
            only = config.model_copy(update={"staging": staging})
            self._movers[transport] = [
                create_mover(node_id, only, name=_mover(transport, place))
                for place, node_id in enumerate(nodes)
            ]
        self._pids = {
            name: [self._wait_serving(mover) for mover in movers]
            for name, movers in self._movers.items()
        }
        self._bare_pids = [self._get(node.pid.remote()) for node in self._nodes]

    def take(self, repeat: int) -> dict[str, list[Pair]]:
        """Return pairs of each measurement; the sockets have no side of ours."""
        for name in self._movers:  # connections, pages, and code that is loaded only then
            self._stage(name)
        self._push_bare()
        self._push()
        self._stream()
        self._pull()
        nixl: list[Pair] = []
        transports: list[Pair] = []
        sockets: list[Pair] = []
        refs: list[Pair] = []
        for index in range(repeat):
            nixl += self._pairs(index, lambda: self._stage("nixl"), self._push_bare)
            transports.append(Pair(ours=nixl[-1].ours, floor=self._push()))
            sockets.append(Pair(ours=nixl[-1].ours, floor=self._stream()))
            refs += self._pairs(index, lambda: self._stage("object_ref"), self._pull)
        return {"nixl": nixl, "transport": transports, "socket": sockets, "object_ref": refs}

    def _pairs(
        self, index: int, ours: Callable[[], Timing], floor: Callable[[], Timing]
    ) -> list[Pair]:
        """Return one pair; who goes first takes turns."""
        if index % 2:
            first = ours()
            return [Pair(ours=first, floor=floor())]
        return measure(1, ours=lambda _: ours(), floor=lambda _: floor())

    def _stage(self, transport: str) -> Timing:
        """Have the target's mover bring everything."""
        span = Span(source=_mover(transport, _SOURCE), part=0, keys=self._keys, parent=b"", depth=0)
        order = FetchOrder(spans=(span,), deadline_s=_TIMEOUT_S)
        before = _cpu_s(self._pids[transport])
        began = time.perf_counter()
        report: FetchReport = self._get(self._movers[transport][_TARGET].fetch.remote(order))
        seconds = time.perf_counter() - began
        cpu_s = _cpu_s(self._pids[transport]) - before
        if report.here != (self._num_blocks,):
            raise KVRayError(
                f"Only {report.here[0]} of {self._num_blocks} blocks came:"
                f" {[one.message for one in report.sources.values()]}"
            )
        self._get(self._nodes[_TARGET].clear.remote())
        return Timing(seconds=seconds, cpu_s=cpu_s)

    def _push_bare(self) -> Timing:
        source, target = self._nodes
        address = self._get(target.open_bare.remote())
        self._get(source.open_bare.remote())
        self._get(source.connect_bare.remote(address))
        timing = self._timed(lambda: [source.push_bare.remote(address)])
        self._get([node.close_bare.remote() for node in self._nodes])
        return timing

    def _push(self) -> Timing:
        source, target = self._nodes
        address = self._get(target.address.remote())
        return self._timed(lambda: [source.push.remote(address)])

    def _stream(self) -> Timing:
        source, target = self._nodes
        port = self._get(target.port.remote())
        return self._timed(lambda: [target.receive.remote(), source.stream.remote(port)])

    def _pull(self) -> Timing:
        source, target = self._nodes
        return self._timed(lambda: [target.pull.remote(source)])

    def _timed(self, begin: Callable[[], list[Any]]) -> Timing:
        before = _cpu_s(self._bare_pids)
        began = time.perf_counter()
        self._get(begin())
        seconds = time.perf_counter() - began
        return Timing(seconds=seconds, cpu_s=_cpu_s(self._bare_pids) - before)

    def _wait_serving(self, mover: Any) -> int:
        """Return a mover's pid once it has its arena and its transport."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            status = self._get(mover.status.remote())
            if status["state"] == "serving":
                break
            if time.monotonic() > deadline:
                raise KVRayError(f"{status['mover']} is not ready: {status['message']}")
            time.sleep(0.05)
        for transport in status["transports"].values():
            if not transport["available"]:
                raise KVRayError(transport["reason"])
        return int(status["pid"])

    def _get(self, refs: Any) -> Any:
        return ray.get(refs, timeout=_TIMEOUT_S)


def _start_node(node_id: str, config: KVRayConfig, num_blocks: int) -> Any:
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    node = ray.remote(BenchNode).options(num_cpus=0, scheduling_strategy=affinity)
    return node.remote(config, num_blocks)


def _cpu_s(pids: list[int]) -> float:
    """Return the CPU seconds that processes have used."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(one.user + one.system for one in times))


def _mover(transport: str, place: int) -> str:
    return f"kvray-bench-{transport}-{place}"


def main() -> None:
    """Measure, and print the pairs: configuration, blocks and pairs are the arguments."""
    config = load_config(sys.argv[1])
    try:
        connect_configured(config)
        pairs = Play(config, int(sys.argv[2])).take(int(sys.argv[3]))
        found: dict[str, Any] = {
            name: [
                [one.ours.seconds, one.ours.cpu_s, one.floor.seconds, one.floor.cpu_s]
                for one in pairs_of_one
            ]
            for name, pairs_of_one in pairs.items()
        }
    except KVRayError as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)
    os._exit(0)  # the cluster ends with the bench; Ray's own leaving takes seconds


if __name__ == "__main__":
    main()
