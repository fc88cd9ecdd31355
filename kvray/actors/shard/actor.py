"""The Ray actor around a shard."""

import contextlib
import os
import signal
import threading
import time
from typing import Any

import ray

from kvray.actors.build_info import BuildInfo, build_info_of, settings_of
from kvray.actors.mover.fetch_socket import MoverCalls
from kvray.actors.names import SUPERVISOR_NAME, lookup_names, shard_name
from kvray.actors.owner.admin import check_proof, proof_of
from kvray.actors.ray_glue.calls import (
    ActorCalls,
    PeriodicPing,
    create_actor,
    kill_actor,
    node_labels,
    set_up_process,
)
from kvray.actors.ray_glue.private import available_resources
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.actors.staging.peers import mover_of
from kvray.actors.telemetry.figures import Figures, ShardFigures
from kvray.actors.telemetry.metrics_export import MetricsThread
from kvray.config import KVRayConfig, config_on_node, ray_memory_threshold
from kvray.errors import ConfigError, KVRayError
from kvray.store.arena.file import ARENA_FILE
from kvray.store.machine.capacity import MemoryClaims
from kvray.store.machine.pages import ArenaPages
from kvray.trace.spans import start_sdk

_STOP_TIMEOUT_S = 20.0
_PING_S = 5.0  # how often the supervisor is called, which nobody else calls for long

_GROUPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "health": (1, ()),
    "leave": (1, ()),
    "people": (
        2,
        (
            "asked",
            "contents",
            "sizing_plan",
            "whereabouts",
            "drain",
            "call_off_drain",
            "set_weights_version",
        ),
    ),
    "prefetch": (8, ("prefetch",)),
    "routers": (4, ("prompt", "profile", "on_disk")),
    "leases": (4, ("room", "lease_ranks", "release_ranks")),  # of other shards, as the next two
    "ranks": (8, ("stage_ranks",)),
    "disk": (8, ("promote",)),
    "lookup": (1, ("delta",)),  # and one more for each partition
}
"""Group -> its number of threads, and the methods of `ActorRequests` that it runs.

Calls that may take long are apart: what another shard waits for must not queue behind what waits
for other shards, or two could wait for each other."""


class ShardActor:
    """A node's shard as a named actor; the methods in `_GROUPS` are those of `ActorRequests`."""

    def __init__(self, name: str, config: KVRayConfig) -> None:
        """Start the shard; `status` tells when it serves. Runs again when Ray restarts it."""
        set_up_process()
        self._build_info = build_info_of(
            settings_of(config), ray.get_runtime_context().get_node_id()
        )
        problem = None
        is_restart = ray.get_runtime_context().was_current_actor_reconstructed
        try:
            config = config_on_node(config, labels=node_labels())
            if not is_restart:
                proof_of(config)
        except ConfigError as error:
            problem = error  # told by `status`: an actor that cannot be made tells nobody
        start_sdk(config.tracing.startup_hook)
        self._name = name
        self._config = config
        self._ping = PeriodicPing(SUPERVISOR_NAME, every_s=_PING_S)
        # A lookup that restarts while the supervisor is away knows no shard by itself.
        self._names = [
            PeriodicPing(lookup, "name_shard", name, every_s=_PING_S)
            for lookup in lookup_names(config.lookup.partitions)
        ]
        self._pages = ArenaPages(config.node_dir / ARENA_FILE)
        # Ray starts a shard again that ends by a defect; it then adopts its arena.
        self._shard = Shard(
            name,
            ShardSettings.of(config, memory_claims()),
            crashed=lambda: os._exit(1),
            ask=MoverCalls(mover_of(name), config.node_dir, ActorCalls()),
            is_restart=is_restart,
        )
        signal.signal(signal.SIGTERM, self._terminate)
        if problem is None:
            self._shard.start()
        else:
            self._shard.refuse(problem)
        self._figures = ShardFigures(name, time.monotonic())
        self._metrics = MetricsThread(self._look, config.cluster_name)

    def status(self) -> dict[str, Any]:
        """See `Shard.status` and, for "memory", `ArenaPages.figures`."""
        return {
            **self._shard.status(),
            "memory": self._pages.figures(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
        }

    @ray.method(concurrency_group="health")
    def ping(self) -> bool:
        """Return whether it is starting, even while it is busy; a frozen actor does not answer."""
        return self._shard.is_starting

    def build_info(self) -> BuildInfo:
        """Return the code and settings that it runs with, and its state."""
        return {**self._build_info, "state": self._shard.status()["state"]}

    def admit(self, proof: str) -> None:
        """See `admin.check_proof`."""
        check_proof(self._config, proof)

    def clear(self, proof: str = "") -> int:
        """See `Shard.clear`; `proof` as for `admit`."""
        check_proof(self._config, proof)
        return self._shard.clear(_STOP_TIMEOUT_S)

    def stop(self, retire: bool, flush: bool = False, only_new: bool = False) -> None:
        """See `Shard.stop`."""
        self._shard.stop(retire=retire, timeout_s=_STOP_TIMEOUT_S, flush=flush, only_new=only_new)
        self._metrics.stop()

    @ray.method(concurrency_group="leave")
    def leave(self, seconds: float) -> bool:
        """End for good, with the arena left as it is, unless an engine uses it: then False.

        Before that other nodes get what only this one has, as far as it can go in so many seconds.
        """
        if not self._shard.requests.give_away(seconds):
            return False
        self.stop(retire=False, flush=True)
        kill_actor(self._name)
        return True

    def _terminate(self, number: int, frame: Any) -> None:
        """Handle SIGTERM: write blocks that are only in memory to disk, then end this process."""

        def end() -> None:
            with contextlib.suppress(KVRayError):
                self._shard.stop(retire=False, timeout_s=_STOP_TIMEOUT_S, flush=True)
            os._exit(1)  # to Ray this was no orderly end: it starts the shard again if it goes on

        # Ray's own thread, in which signals are handled, must not be kept.
        threading.Thread(target=end, name="kvray-end", daemon=True).start()

    def _look(self, now: float) -> Figures:
        # In this thread: while Ray's head is gone, a call may take a minute.
        self._ping.send(now)
        for partition in self._shard.announcer.unheard():
            self._names[partition].send(now)
        return self._figures.of(self._shard.status(), now)


def _method(group: str, name: str) -> Any:
    @ray.method(concurrency_group=group)
    def call(self: ShardActor, *args: Any) -> Any:
        return getattr(self._shard.requests, name)(*args)

    return call


for _group, (_, _names) in _GROUPS.items():
    for _name in _names:
        setattr(ShardActor, _name, _method(_group, _name))


def memory_claims() -> MemoryClaims:
    """Return the memory that Ray may still take on this actor's node."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes()}  # type: ignore[no-untyped-call]
    store = nodes[node_id]["Resources"].get("object_store_memory", 0)
    left = available_resources(node_id)
    if left is None:  # the node has just joined
        left = {"object_store_memory": store}
    return MemoryClaims(
        object_store_bytes=int(left.get("object_store_memory", 0)),  # 0 is left out
        threshold=ray_memory_threshold(),
    )


def create_shard(node_id: str, config: KVRayConfig) -> Any:
    """Return the shard's actor on a node, started if it is not there."""
    name = shard_name(node_id)
    # Each partition keeps a poll waiting, and one that it gave up may end after the next has come.
    groups = {group: num_threads for group, (num_threads, _) in _GROUPS.items()}
    groups["lookup"] += config.lookup.partitions
    return create_actor(
        ShardActor, name, name, config, node_id=node_id, groups=groups, max_concurrency=4
    )
