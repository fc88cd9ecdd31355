"""`kvray bench staging`: fetches between two nodes of its own, driven by a `Worker` of this."""

import importlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
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
from kvray.lab.bench.worker import call_all, start
from kvray.lab.chaos.machine import RESOURCE, Machine
from kvray.lab.report import Report
from kvray.lab.runner import (
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
from kvray.reference.child_process import serve
from kvray.store import Arena, ArenaOwner, ArenaSpec
from kvray.transport.nixl import bindings
from kvray.transport.object_ref import ObjectRefTransport
from kvray.transport.transport import Array

_TIMEOUT_S = 120.0
_REFS_AHEAD = 2
"""Objects that are asked for before the one that is waited for."""
_POLL_S = 0.0002
_FIRST_BYTES = 4096
_DRAM = "DRAM"

BareAddress = tuple[bytes, int]
"""Target of a bare push: NIXL's metadata of the other end, and its memory's address."""

_COPIES = {
    "nixl": (
        "staging over nixl, bare NIXL push",
        ("staging_nixl_ratio", "staging_nixl_gb_per_s", "raw_nixl_gb_per_s"),
        ("staging_cpu_s_per_gb", "raw_nixl_cpu_s_per_gb"),
    ),
    "object_ref": (
        "staging over object_ref, bare Ray objects",
        ("staging_object_ref_ratio", "staging_object_ref_gb_per_s", "raw_ray_gb_per_s"),
        ("staging_object_ref_cpu_s_per_gb", "raw_ray_cpu_s_per_gb"),
    ),
}
"""The title of each pair's row, the names of its ratio, speed and bare speed, and of CPU times."""


def run(runner: Runner, *, repeat: int | None, quick: bool) -> Report:
    """Fetch blocks between two nodes; KVRayError: Ray or a transport is missing, or blocks are."""
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
    driver = start(runner, __name__, machine.environ())
    asked = {"config_path": str(path), "num_blocks": num_blocks, "repeat": num_pairs}
    (measured,) = call_all([driver], "take", **asked)
    pairs = {
        name: [Pair(Duration(*ours), Duration(*floor)) for ours, floor in found]
        for name, found in measured.items()
    }
    num_bytes = num_blocks * LARGE_BYTES
    rows = []
    for name, (title, names, cpu_names) in _COPIES.items():
        rows.append(copy_row(title, names, pairs[name], num_bytes=num_bytes))
        cpu_title = "    CPU time, both sides"
        rows.append(cpu_row(cpu_title, cpu_names, pairs[name], num_bytes=num_bytes))
    return bench_report(
        rows,
        note=f"{num_blocks} blocks of 4 MiB between two nodes of this machine, over its loopback"
        f" device, {num_pairs} pairs on {cores()}.",
        facts={"blocks": num_blocks, "block_bytes": LARGE_BYTES, "pairs": num_pairs},
    )


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
        self._bare: Any = None
        self._bare_peer = ""

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

    # -- Ray's objects -------------------------------------------------------------------------

    def piece(self, start: int) -> Array:
        return self._memory[start : start + ObjectRefTransport.piece_bytes]

    def pull(self, source: Any) -> None:
        """Bring everything here as objects of Ray, and copy it into the arena."""
        starts = range(0, self._num_bytes, ObjectRefTransport.piece_bytes)
        refs: deque[Any] = deque()
        for index, first in enumerate(starts):
            for ahead in starts[index + len(refs) : index + _REFS_AHEAD]:
                refs.append(source.piece.remote(ahead))
            piece = ray.get(refs.popleft(), timeout=_TIMEOUT_S)
            self._memory[first : first + len(piece)] = piece


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
        made: Any = ray.remote(num_cpus=0)(_BenchNode)
        on = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        places = [made.options(scheduling_strategy=on(one, soft=False)) for one in nodes]
        self._nodes = [place.remote(config, num_blocks) for place in places]
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
        found = {}
        for name, bare in {"nixl": self._push_bare, "object_ref": self._pull}.items():
            stage = partial(self._stage, name)
            measure(1, ours=stage, floor=bare)  # connects, and loads what is loaded only then
            found[name] = measure(repeat, ours=stage, floor=bare)
        return found

    def _stage(self, transport: str, _: int) -> Duration:
        span = Span(
            source=_mover(transport, 0),
            part=0,
            keys=self._keys,
            parent=b"",
            depth=0,
            block_bytes=LARGE_BYTES,
        )
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

    def _push_bare(self, _: int) -> Duration:
        address = _get(self._target.open_bare.remote())
        _get(self._source.open_bare.remote())
        _get(self._source.connect_bare.remote(address))
        push = partial(self._source.push_bare.remote, address)
        duration, _ = _timed(self._bare_pids, push)
        _get([node.close_bare.remote() for node in self._nodes])
        return duration

    def _pull(self, _: int) -> Duration:
        return _timed(self._bare_pids, partial(self._target.pull.remote, self._source))[0]


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


def _take(*, config_path: str, num_blocks: int, repeat: int) -> dict[str, list[Pair]]:
    # The variables of the bench's own process are no settings of its nodes.
    config = load_config(config_path, environ={})
    connect_configured(config)
    return _StagingBench(config, num_blocks).take(repeat)


if __name__ == "__main__":
    serve(SimpleNamespace(take=_take))
    os._exit(0)  # the cluster ends with the bench; Ray's own leaving takes seconds
