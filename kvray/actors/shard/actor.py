"""The Ray actor around a shard."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from kvray.actors.build_info import BuildInfo, build_info_of, settings_of
from kvray.actors.names import SHARD_PREFIX, SUPERVISOR_NAME, shard_name
from kvray.actors.owner.admin import check_proof, proof_of
from kvray.actors.ray_glue.arguments import unpacked
from kvray.actors.ray_glue.async_calls import ActorCalls
from kvray.actors.ray_glue.calls import (
    Nudge,
    create_actor,
    kill_actor,
    log_to_stderr,
    node_labels,
)
from kvray.actors.ray_glue.private import available_resources
from kvray.actors.shard.lookup_line import LookupLine
from kvray.actors.shard.queries import Asked, Prompt, Whereabouts
from kvray.actors.shard.settings import ShardSettings
from kvray.actors.shard.shard import Shard
from kvray.actors.telemetry.figures import Figures
from kvray.actors.telemetry.metric_figures import ShardFigures
from kvray.actors.telemetry.metrics_export import MetricsThread
from kvray.config import KVRayConfig, config_on_node, ray_memory_threshold
from kvray.errors import ConfigError, KVRayError
from kvray.store.arena.file import ARENA_FILE
from kvray.store.machine.capacity import MemoryClaims
from kvray.store.machine.pages import ArenaPages
from kvray.store.sizing import Plan
from kvray.trace.spans import start_sdk, under

_STOP_TIMEOUT_S = 20.0
_NUDGE_S = 5.0  # how often the supervisor is called, which nobody else calls for long

_GROUPS = {
    "health": 1,
    "people": 2,
    "prefetch": 8,
    "routers": 4,
    "ranks": 8,
    "leases": 4,
    "disk": 8,
    "leave": 1,
}
"""Threads for calls that may take long, apart: what another shard waits for must not queue behind
what waits for other shards, or two could wait for each other."""


class ShardActor:
    """A node's shard as a named actor; every method hands over to the `Shard`."""

    def __init__(self, name: str, config: KVRayConfig) -> None:
        """Start the shard; `status` tells when it serves. Runs again when Ray restarts it."""
        log_to_stderr()
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
        self._nudge = Nudge(SUPERVISOR_NAME, every_s=_NUDGE_S)
        self._pages = ArenaPages(config.node_dir / ARENA_FILE)
        # Ray starts a shard again that ends by a defect; it then adopts its arena.
        self._shard = Shard(
            name,
            ShardSettings.of(config, memory_claims()),
            [LookupLine(at).announce for at in range(config.lookup.partitions)],
            crashed=lambda: os._exit(1),
            ask=ActorCalls(),
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

    @ray.method(concurrency_group="leases")
    def room(self) -> int:
        """See `ActorRequests.room`."""
        return self._shard.requests.room()

    @ray.method(concurrency_group="people")
    def drain(self, by: str, seconds: float | None) -> None:
        """See `Drain.order`."""
        self._shard.requests.drain(by, seconds)

    @ray.method(concurrency_group="people")
    def call_off_drain(self, by: str) -> None:
        """See `Drain.call_off`."""
        self._shard.requests.call_off_drain(by)

    @ray.method(concurrency_group="people")
    def asked(self, replica: str | None, request_id: int | None, last: int) -> list[Asked]:
        """See `Queries.asked`."""
        return self._shard.queries.asked(replica, request_id, last)

    @ray.method(concurrency_group="people")
    def whereabouts(self, before: float | None, *keys: bytes) -> Whereabouts:
        """See `Queries.whereabouts`; the keys are end to end, `in_pieces`."""
        return self._shard.queries.whereabouts(b"".join(keys), before)

    @ray.method(concurrency_group="routers")
    def prompt(
        self, replica: str, tokens: bytes, salt: str | int | None, lora: str | None
    ) -> Prompt:
        """See `Queries.prompt`."""
        return self._shard.queries.prompt(replica, tokens, salt=salt, lora=lora)

    @ray.method(concurrency_group="people")
    def contents(self, namespace: str | None, hottest: int) -> dict[str, Any]:
        """See `Queries.contents`."""
        return self._shard.queries.contents(namespace, hottest)

    @ray.method(concurrency_group="people")
    def sizing_plan(self) -> Plan:
        """See `Queries.sizing_plan`."""
        return self._shard.queries.sizing_plan()

    @ray.method(concurrency_group="people")
    def set_weights_version(
        self, replica: str, version: str | None, wait_s: float
    ) -> dict[int, int]:
        """See `ActorRequests.set_weights_version`."""
        return self._shard.requests.set_weights_version(replica, version, wait_s)

    @ray.method(concurrency_group="prefetch")
    def prefetch(
        self,
        replica: str,
        tokens: bytes,
        salt: str | int | None = None,
        lora: str | None = None,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> dict[str, Any]:
        """See `ActorRequests.prefetch`."""
        return self._shard.requests.prefetch(replica, tokens, salt=salt, lora=lora, media=media)

    @ray.method(concurrency_group="prefetch")
    def traced_prefetch(self, trace: str, request: str, *prompt: Any) -> dict[str, Any]:
        """As `prefetch`, below the span `trace`; what the engine does is below `request`."""
        replica, tokens, salt, lora, media = prompt
        marks = {"salt": salt, "lora": lora, "media": media}
        with under(trace):
            return self._shard.requests.prefetch(replica, tokens, trace=request, **marks)

    @ray.method(concurrency_group="routers")
    def profile(self, replica: str) -> dict[str, Any]:
        """See `ActorRequests.profile`."""
        return self._shard.requests.profile(replica)

    @ray.method(concurrency_group="routers")
    def on_disk(self, parts: int, *keys: bytes) -> bytes:
        """See `ActorRequests.on_disk`."""
        return self._shard.requests.on_disk(parts, *keys)

    @ray.method(concurrency_group="routers")
    def routed(self, notes: Sequence[Any]) -> None:
        """Keep a router's notes on requests that it sent to this node's replicas."""
        self._shard.requests.routed(notes)

    @ray.method(concurrency_group="ranks")
    def stage_ranks(
        self, replica: str, ranks: Sequence[int], wait_s: float, *request: Any
    ) -> dict[str, Any]:
        """See `ReplicaStager.stage_here`; the keys are end to end, `in_pieces`."""
        return self._shard.requests.stage_ranks(replica, ranks, wait_s, *request)

    @ray.method(concurrency_group="disk")
    def promote(self, *order: Any) -> int:
        """See `ActorRequests.promote`; an order that is `packed`, or itself."""
        return self._shard.requests.promote(unpacked(*order))

    @ray.method(concurrency_group="ranks")
    def traced_stage_ranks(self, trace: str, *request: Any) -> dict[str, Any]:
        """As `stage_ranks`, below a span."""
        with under(trace):
            return self._shard.requests.stage_ranks(*request)

    @ray.method(concurrency_group="disk")
    def traced_promote(self, trace: str, *order: Any) -> int:
        """As `promote`, below a span."""
        with under(trace):
            return self._shard.requests.promote(unpacked(*order))

    @ray.method(concurrency_group="leases")
    def lease_ranks(
        self, replica: str, ranks: Sequence[int], token: str, *keys: bytes
    ) -> dict[int, list[Any]]:
        """See `RankLeases.lease`; the keys are end to end, `in_pieces`."""
        return self._shard.requests.lease_ranks(replica, ranks, token, *keys)

    @ray.method(concurrency_group="leases")
    def release_ranks(self, token: str) -> None:
        """See `RankLeases.release`."""
        self._shard.requests.release_ranks(token)

    def stop(self, retire: bool, flush: bool = False) -> None:
        """See `Shard.stop`."""
        self._shard.stop(retire=retire, timeout_s=_STOP_TIMEOUT_S, flush=flush)
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
        self._nudge.give(now)  # in this thread: while Ray's head is gone, it may take a minute
        return self._figures.of(self._shard.status(), now)

    def __repr__(self) -> str:
        return f"Shard({self._name.removeprefix(SHARD_PREFIX)})"


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
    return create_actor(
        ShardActor, name, name, config, node_id=node_id, groups=_GROUPS, max_concurrency=4
    )
