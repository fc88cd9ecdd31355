"""The Ray actor around a mover."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import ray

from kvray.actors.build_info import BuildInfo, build_info_of, settings_of
from kvray.actors.mover.mover import Mover
from kvray.actors.mover.orders import FetchReport, LeaseRequest, ReadLease, SendOrder
from kvray.actors.names import mover_name
from kvray.actors.ray_glue.arguments import packed, unpacked
from kvray.actors.ray_glue.calls import call, create_actor, get_actor, node_labels, set_up_process
from kvray.actors.telemetry.figures import mover_figures
from kvray.actors.telemetry.metrics_export import MetricsThread
from kvray.config import KVRayConfig, config_on_node
from kvray.errors import ShardUnavailable

_SERVED_MAX = 16
"""Calls of other movers that run at once; the others queue, and miss their deadlines."""


class MoverActor:
    """A node's mover as a named actor; each method is one call of the `Mover`."""

    def __init__(self, name: str, config: KVRayConfig) -> None:
        """Start the mover; `status` says when it serves. Runs again when Ray restarts it."""
        set_up_process()
        self._build_info = build_info_of(
            settings_of(config), ray.get_runtime_context().get_node_id()
        )
        self._movers = RayMovers()
        config = config_on_node(config, labels=node_labels())
        self._mover = Mover(
            name,
            config.node_dir,
            config.staging,
            self._movers,
            # Ray restarts it, and it attaches to the arena that is there then.
            ended=lambda: os._exit(1),
            lock_wait_s=config.arena.lock_wait_s,
        )
        self._mover.start()
        self._metrics = MetricsThread(
            lambda now: mover_figures(name, self._mover.status()), config.cluster_name
        )

    def ping(self) -> None:
        """Answer; a frozen actor does not."""

    def build_info(self) -> BuildInfo:
        """Return the code and settings that it runs with."""
        return self._build_info

    def connect(self, names: list[str]) -> None:
        """Keep links to these movers."""
        self._movers.retain(names)
        self._mover.connect(names)

    @ray.method(concurrency_group="fetch")
    def fetch(self, *order: Any) -> FetchReport:
        """Fetch blocks; takes a `FetchOrder`, `packed` or not."""
        return self._mover.fetch(*order)

    @ray.method(concurrency_group="serve")
    def lease(self, *request: Any) -> ReadLease:
        """Lease blocks for another mover, and send the first; takes a `packed` `LeaseRequest`."""
        return self._mover.lease(unpacked(*request))

    @ray.method(concurrency_group="serve")
    def send(self, order: SendOrder) -> Any:
        """Send a piece of a read lease."""
        return self._mover.send(order)

    @ray.method(concurrency_group="serve")
    def release(self, token: int, suspects: Sequence[tuple[int, bytes]]) -> None:
        """End a read lease, and check blocks that arrived wrong."""
        self._mover.release(token, suspects)

    def status(self) -> dict[str, Any]:
        """Return state and figures, for people."""
        return {
            **self._mover.status(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
        }

    def stop(self) -> None:
        """End the mover. Twice is fine."""
        self._mover.stop()
        self._metrics.stop()


class RayMovers:
    """The movers of other nodes, which Ray finds by their names. Thread-safe."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        """Those found so far. One that a thread drops or forgets is looked up again."""
        # Without Ray's head a look-up never returns; the caller must not hang with it.
        self._lookups = ThreadPoolExecutor(2, "kvray-lookup")

    def lease(self, mover: str, request: LeaseRequest, *, timeout_s: float) -> ReadLease:
        """Lease blocks there."""
        lease: ReadLease = self._call(mover, "lease", *packed(request), timeout_s=timeout_s)
        return lease

    def send(self, mover: str, order: SendOrder, *, timeout_s: float) -> Any:
        """Have a piece sent here."""
        return self._call(mover, "send", order, timeout_s=timeout_s)

    def release(
        self, mover: str, token: int, suspects: Sequence[tuple[int, bytes]], *, timeout_s: float
    ) -> None:
        """End a read lease there, and have blocks that arrived wrong checked."""
        self._found(mover, timeout_s).release.remote(token, suspects)

    def retain(self, names: Iterable[str]) -> None:
        """Forget all movers but these."""
        known = self._handles.copy()
        self._handles = {name: known[name] for name in names if name in known}

    def _call(self, mover: str, method: str, *args: Any, timeout_s: float) -> Any:
        handle = self._found(mover, timeout_s)
        try:
            return call(getattr(handle, method), *args, timeout_s=timeout_s)
        except ShardUnavailable:
            self._handles.pop(mover, None)  # it may have been replaced
            raise

    def _found(self, mover: str, timeout_s: float) -> Any:
        """Return the handle; ShardUnavailable if there is none, or Ray does not answer."""
        handle = self._handles.get(mover)
        if handle is None:
            search = self._lookups.submit(get_actor, mover)
            try:
                handle = search.result(timeout_s)
            except FutureTimeoutError:
                search.cancel()  # else all of a time without a head would come before the next
                raise ShardUnavailable(
                    f"Ray does not say where {mover} is; is its head up?"
                ) from None
            self._handles[mover] = handle
        return handle


def create_mover(node_id: str, config: KVRayConfig, *, name: str | None = None) -> Any:
    """Return the mover's actor on a node; start it if there is none.

    Without a `name` it has the one that the node's shard looks for.
    """
    name = name or mover_name(node_id)
    # Two movers that fetch from each other must never wait for each other.
    groups = {"fetch": config.staging.fetches_max, "serve": _SERVED_MAX}
    return create_actor(
        MoverActor, name, name, config, node_id=node_id, groups=groups, max_concurrency=4
    )
