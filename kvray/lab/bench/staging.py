"""`kvray bench staging`: blocks fetched from another node, beside the bare transports.

Two Ray nodes are the bench's own. Their driver is a process of its own, `python -m` this module,
which prints one JSON object.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from kvray.actors.mover.actor import create_mover
from kvray.actors.mover.orders import FetchOrder, FetchReport, Span
from kvray.actors.tier.connection import connect_configured
from kvray.config import KVRayConfig, config_on_node, load_config
from kvray.errors import KVRayError
from kvray.identity.block import split_keys
from kvray.lab.bench.report import bench_report, copy_row, cores, cpu_row
from kvray.lab.bench.runner import (
    LARGE_BYTES,
    LOCK_WAIT_S,
    SLAB_BYTES,
    Duration,
    Pair,
    Runner,
    cpu_seconds,
    measure,
    reserve_all,
)
from kvray.lab.chaos.machine import RESOURCE, Machine
from kvray.lab.report import Report
from kvray.store import Arena, ArenaOwner, ArenaSpec
from kvray.transport.nixl import NixlTransport, bindings
from kvray.transport.object_ref import ObjectRefTransport
from kvray.transport.transport import Array

_BENCH_TIMEOUT_S, _TIMEOUT_S = 900.0, 120.0
_REFS_AHEAD = 2
"""Objects that are asked for before the one that is waited for."""
_POLL_S = 0.0002
_FIRST_BYTES = 4096
_DRAM = "DRAM"

BareAddress = tuple[bytes, int]
"""Target of a bare push: NIXL's metadata of the other end, and its memory's address."""

_SPEED = "staging_nixl_gb_per_s"
_COPIES = {
    "nixl": (
        "staging over nixl, bare NIXL push",
        ("staging_nixl_ratio", _SPEED, "raw_nixl_gb_per_s"),
    ),
    "transport": (
        "    one push of kvray's transport",
        ("staging_nixl_transport_ratio", _SPEED, "transport_gb_per_s"),
    ),
    "socket": ("    bare socket", ("staging_nixl_socket_ratio", _SPEED, "raw_socket_gb_per_s")),
    "object_ref": (
        "staging over object_ref, bare Ray objects",
        ("staging_object_ref_ratio", "staging_object_ref_gb_per_s", "raw_ray_gb_per_s"),
    ),
}
"""For each pair of the driver: the row's title, and the names of ratio, speed and bare speed."""


def run(runner: Runner, *, repeat: int | None, quick: bool) -> Report:
    """Start two nodes, and fetch blocks from one to the other.

    Raises:
        KVRayError: Ray did not start, a transport is missing, or blocks did not come.
    """
    num_blocks, num_pairs = 256, repeat or 9
    if quick:
        num_blocks, num_pairs = 32, min(num_pairs, 3)
    runner.show("Starting two nodes", total=2)
    with runner.interrupts.held():
        machine = Machine(num_nodes=2)
        runner.stack.callback(machine.close)
    runner.advance()
    runner.show("Measuring")
    path = machine.write_config({}, cluster_name="bench")
    arguments = [str(path), str(num_blocks), str(num_pairs)]
    with runner.interrupts.held():
        driver = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            env=machine.environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends it
        )
        runner.stack.enter_context(driver)  # which closes its pipes and waits for it
        runner.stack.callback(driver.kill)
    try:
        output, errors = driver.communicate(timeout=_BENCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise KVRayError("The bench did not end in time; run it on an idle machine.") from None
    pairs, num_bytes = _pairs_of(output, errors), num_blocks * LARGE_BYTES
    nixl, transport, bare, object_ref = (
        copy_row(title, names, pairs[name], num_bytes=num_bytes)
        for name, (title, names) in _COPIES.items()
    )
    nixl_cpu, object_ref_cpu = (
        cpu_row("    CPU time, both sides", names, pairs[name], num_bytes=num_bytes)
        for name, names in (
            ("nixl", ("staging_cpu_s_per_gb", "raw_nixl_cpu_s_per_gb")),
            ("object_ref", ("staging_object_ref_cpu_s_per_gb", "raw_ray_cpu_s_per_gb")),
        )
    )
    return bench_report(
        [nixl, transport, bare, nixl_cpu, object_ref, object_ref_cpu],
        note=f"{num_blocks} blocks of 4 MiB between two nodes of this machine, over its loopback"
        f" device, {num_pairs} pairs on {cores()}.",
        facts={"blocks": num_blocks, "block_bytes": LARGE_BYTES, "pairs": num_pairs},
    )


def _pairs_of(output: str, errors: str) -> dict[str, list[Pair]]:
    """Return the pairs that the driver printed last, by measurement.

    Raises:
        KVRayError: it printed why there are none, or it died.
    """
    lines = output.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise KVRayError(f"The bench's nodes failed: {' '.join(errors.split()[-60:])}")
    found = json.loads(lines[-1])
    if "error" in found:
        raise KVRayError(found["error"])
    return {
        name: [Pair(Duration(*ours), Duration(*floor)) for ours, floor in pairs]
        for name, pairs in found.items()
    }


class _BenchNode:
    """An actor with one node's arena; it does all work there that needs no mover."""

    def __init__(self, config: KVRayConfig, num_blocks: int) -> None:
        config = config_on_node(config)
        config.node_dir.mkdir()
        self._num_bytes = num_blocks * LARGE_BYTES
        spec = ArenaSpec(
            cluster_name=config.cluster_name,
            capacity=self._num_bytes + SLAB_BYTES,
            slab=SLAB_BYTES,
            slot_min=config.arena.slot_min,
            holders_max=config.arena.holders_max,
        )
        self._arena = Arena.create(config.node_dir, spec, lock_wait_s=LOCK_WAIT_S)
        self._arena.join("bench")
        self._memory = self._arena.tables.data[: self._num_bytes]
        self._transport: NixlTransport | None = None
        self._bare: Any = None
        self._bare_peer = ""
        self._listener = socket.create_server(("127.0.0.1", 0))

    def store(self, keys: bytes) -> None:
        made = reserve_all(self._arena, split_keys(keys), block_bytes=LARGE_BYTES)
        pool = np.random.default_rng(0).integers(0, 256, (8, LARGE_BYTES), dtype=np.uint8)
        self._arena.commit(made, self._arena.write(made, pool, np.arange(len(made.slots)) % 8))

    def clear(self) -> None:
        ArenaOwner(self._arena).clear()

    def pid(self) -> int:
        return os.getpid()

    # -- NIXL's own Python API with its own defaults, and nothing of kvray -----------------------

    def open_bare(self) -> BareAddress:
        """Open an end of NIXL's own, and return where others push to."""
        package = bindings().__name__.rpartition(".")[0]
        api = importlib.import_module(f"{package}._api")
        base = self._memory.ctypes.data
        self._bare = api.nixl_agent(f"bare-{secrets.token_hex(4)}")
        self._bare.register_memory([(base, len(self._memory), 0, "")], _DRAM)
        return self._bare.get_agent_metadata(), base

    def close_bare(self) -> None:
        """Close that end: its thread keeps a core busy, which would disturb everything else."""
        self._bare = None

    def connect_bare(self, address: BareAddress) -> None:
        """Connect to another end, and push a little: the first push sets things up."""
        self._bare_peer = self._bare.add_remote_agent(address[0])
        self.push_bare(address, _FIRST_BYTES)

    def push_bare(self, address: BareAddress, num_bytes: int | None = None) -> None:
        """Push the first bytes of the memory, or all, to the same place there, as one transfer."""
        agent, size = self._bare, num_bytes or self._num_bytes
        local = agent.get_xfer_descs([(self._memory.ctypes.data, size, 0)], _DRAM)
        remote = agent.get_xfer_descs([(address[1], size, 0)], _DRAM)
        handle = agent.initialize_xfer("WRITE", local, remote, self._bare_peer)
        deadline = time.monotonic() + _TIMEOUT_S
        state = agent.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise KVRayError(f"A bare push of NIXL did not end ({state}); run the bench again.")

    # -- kvray's transport, a bare socket, and Ray's objects ------------------------------------

    def address(self) -> bytes:
        """Return the address of the transport, which this opens."""
        self._transport = self._transport or NixlTransport(self._memory)
        return self._transport.address

    def push(self, address: bytes) -> None:
        """Push everything by the transport, at once."""
        start, size = np.zeros(1, dtype=np.int64), np.full(1, self._num_bytes)
        self._transport = self._transport or NixlTransport(self._memory)
        self._transport.send(address, start, start, size, timeout_s=_TIMEOUT_S)

    def port(self) -> int:
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

    def piece(self, start: int) -> Array:
        return self._memory[start : start + ObjectRefTransport.piece_bytes]

    def pull(self, source: Any) -> None:
        """Bring everything here as objects of Ray, and copy it into the arena."""
        starts = range(0, self._num_bytes, ObjectRefTransport.piece_bytes)
        refs: deque[Any] = deque()
        for index, start in enumerate(starts):
            for ahead in starts[index + len(refs) : index + _REFS_AHEAD]:
                refs.append(source.piece.remote(ahead))
            piece = ray.get(refs.popleft(), timeout=_TIMEOUT_S)
            self._memory[start : start + len(piece)] = piece


class _StagingBench:
    """Two nodes with an arena and two movers each: one fetches by nixl, one by object_ref."""

    def __init__(self, config: KVRayConfig, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys = np.random.default_rng(1).bytes(32 * num_blocks)
        nodes = [
            node["NodeID"]
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"] and RESOURCE in node["Resources"]
        ]
        made: Any = ray.remote(_BenchNode)
        on = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        self._nodes = [
            made.options(num_cpus=0, scheduling_strategy=on(node_id, soft=False)).remote(
                config, num_blocks
            )
            for node_id in nodes
        ]
        self._source, self._target = self._nodes
        _get(self._source.store.remote(self._keys))
        _get(self._target.clear.remote())
        self._movers: dict[str, list[Any]] = {}
        for transport in ("nixl", "object_ref"):
            staging = config.staging.model_copy(update={"transports": (transport,)})
            only = config.model_copy(update={"staging": staging})
            self._movers[transport] = [
                create_mover(node_id, only, name=_mover(transport, place))
                for place, node_id in enumerate(nodes)
            ]
        self._pids = {
            name: [_wait_serving(mover) for mover in movers]
            for name, movers in self._movers.items()
        }
        self._bare_pids = [_get(node.pid.remote()) for node in self._nodes]

    def take(self, repeat: int) -> dict[str, list[Pair]]:
        """Return pairs of each measurement; the sockets have no side of ours."""
        for name in self._movers:  # connections, pages, and code that is loaded only then
            self._stage(name)
        for bare in (self._push_bare, self._push, self._stream, self._pull):
            bare()
        pairs: dict[str, list[Pair]] = defaultdict(list)
        for index in range(repeat):
            (nixl,) = self._pair(index, "nixl", self._push_bare)
            pairs["nixl"].append(nixl)
            pairs["transport"].append(Pair(nixl.ours, self._push()))
            pairs["socket"].append(Pair(nixl.ours, self._stream()))
            pairs["object_ref"] += self._pair(index, "object_ref", self._pull)
        return pairs

    def _pair(self, index: int, transport: str, bare: Callable[[], Duration]) -> list[Pair]:
        return measure(
            1, ours=lambda _: self._stage(transport), floor=lambda _: bare(), first=index
        )

    def _stage(self, transport: str) -> Duration:
        """Have the target's mover fetch everything."""
        span = Span(source=_mover(transport, 0), part=0, keys=self._keys, parent=b"", depth=0)
        order = FetchOrder(spans=(span,), deadline_s=_TIMEOUT_S)
        mover = self._movers[transport][1]
        report: FetchReport
        duration, report = _timed(self._pids[transport], lambda: mover.fetch.remote(order))
        if report.here != (self._num_blocks,):
            raise KVRayError(
                f"Only {report.here[0]} of {self._num_blocks} blocks came:"
                f" {[one.message for one in report.sources.values()]}"
            )
        _get(self._target.clear.remote())
        return duration

    def _push_bare(self) -> Duration:
        address = _get(self._target.open_bare.remote())
        _get(self._source.open_bare.remote())
        _get(self._source.connect_bare.remote(address))
        duration = self._time_bare(lambda: self._source.push_bare.remote(address))
        _get([node.close_bare.remote() for node in self._nodes])
        return duration

    def _push(self) -> Duration:
        address = _get(self._target.address.remote())
        return self._time_bare(lambda: self._source.push.remote(address))

    def _stream(self) -> Duration:
        port = _get(self._target.port.remote())
        return self._time_bare(
            lambda: [self._target.receive.remote(), self._source.stream.remote(port)]
        )

    def _pull(self) -> Duration:
        return self._time_bare(lambda: self._target.pull.remote(self._source))

    def _time_bare(self, begin: Callable[[], Any]) -> Duration:
        return _timed(self._bare_pids, begin)[0]


def _wait_serving(mover: Any) -> int:
    """Return a mover's pid once it has its arena and its transport."""
    deadline = time.monotonic() + _TIMEOUT_S
    while (status := _get(mover.status.remote()))["state"] != "serving":
        if time.monotonic() > deadline:
            raise KVRayError(f"{status['mover']} is not ready: {status['message']}")
        time.sleep(0.05)
    for transport in status["transports"].values():
        if not transport["available"]:
            raise KVRayError(transport["reason"])
    return int(status["pid"])


def _timed(pids: list[int], begin: Callable[[], Any]) -> tuple[Duration, Any]:
    """Await what `begin` begins; return its time, with the CPU time of `pids`, and its result."""
    before, began = cpu_seconds(*pids), time.perf_counter()
    result = _get(begin())
    seconds = time.perf_counter() - began
    return Duration(seconds, cpu_seconds(*pids) - before), result


def _get(refs: Any) -> Any:
    return ray.get(refs, timeout=_TIMEOUT_S)


def _mover(transport: str, place: int) -> str:
    return f"kvray-bench-{transport}-{place}"


def main() -> None:
    """Measure, and print the pairs: configuration, blocks and pairs are the arguments."""
    config = load_config(sys.argv[1])
    try:
        connect_configured(config)
        found: dict[str, Any]
        found = _StagingBench(config, int(sys.argv[2])).take(int(sys.argv[3]))
    except KVRayError as error:
        found = {"error": str(error)}
    print(json.dumps(found), flush=True)
    os._exit(0)  # the cluster ends with the bench; Ray's own leaving takes seconds


if __name__ == "__main__":
    main()
