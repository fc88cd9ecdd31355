"""The Ray actor around a mover."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import ray

from kvray.actors.arguments import packed, unpacked
from kvray.actors.changes import settings_of
from kvray.actors.metric_figures import mover_figures
from kvray.actors.metrics_export import MetricsThread
from kvray.actors.mover import Mover, MoverSettings
from kvray.actors.orders import FetchReport, Offer, SendOrder, Want
from kvray.actors.ray_calls import (
    MOVER_PREFIX,
    call,
    create_actor,
    get_actor,
    log_to_stderr,
    mover_name,
    node_labels,
)
from kvray.actors.vintage import vintage
from kvray.config import KVRayConfig, config_on_node
from kvray.errors import ShardUnavailable
from kvray.transport.nixl import choose_wires

_SERVED_MAX = 16
"""Calls of other movers that are served at once; the others queue, and miss their deadlines."""


class MoverActor:
    """A node's mover as a named actor; every method hands over to the `Mover`."""

    def __init__(self, name: str, config: KVRayConfig) -> None:
        """Start the mover; `status` tells when it serves. Runs again when Ray restarts it."""
        log_to_stderr()
        self._vintage = vintage(settings_of(config))
        choose_wires(os.environ)
        self._name = name
        self._peers = RayPeers()
        self._mover = Mover(
            name,
            mover_settings(config_on_node(config, labels=node_labels())),
            self._peers.peer,
            # Ray starts it anew, and it attaches to whatever arena is there then.
            ended=lambda: os._exit(1),
        )
        self._mover.start()
        self._metrics = MetricsThread(lambda now: mover_figures(name, self._mover.status()))

    def ping(self) -> None:
        """Answer, which a frozen actor does not."""

    def vintage(self) -> dict[str, Any]:
        """Return what it was made with, see `vintage`."""
        return self._vintage

    def meet(self, names: list[str]) -> None:
        """See `Mover.meet`."""
        self._peers.retain(names)
        self._mover.meet(names)

    @ray.method(concurrency_group="fetch")
    def fetch(self, *order: Any) -> FetchReport:
        """See `Mover.fetch`; an order that is `packed`, or itself."""
        return self._mover.fetch(unpacked(*order))

    @ray.method(concurrency_group="serve")
    def offer(self, *want: Any) -> Offer:
        """See `Mover.offer`; what is `packed`."""
        return self._mover.offer(unpacked(*want))

    @ray.method(concurrency_group="serve")
    def send(self, order: SendOrder) -> Any:
        """See `Mover.send`."""
        return self._mover.send(order)

    @ray.method(concurrency_group="serve")
    def release(self, token: int, suspects: bytes) -> None:
        """See `Mover.release`."""
        self._mover.release(token, suspects)

    def status(self) -> dict[str, Any]:
        """See `Mover.status`."""
        return {
            **self._mover.status(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
        }

    def stop(self) -> None:
        """See `Mover.stop`."""
        self._mover.stop()
        self._metrics.stop()

    def __repr__(self) -> str:
        return f"Mover({self._name.removeprefix(MOVER_PREFIX)})"


class RayPeers:
    """Movers of other nodes by name, as far as Ray knows them. Thread-safe."""

    def __init__(self) -> None:
        """Know none yet."""
        self._handles: dict[str, Any] = {}
        self._lock = threading.Lock()
        # While Ray's head is away a look-up never returns; it must not take the caller with it.
        self._lookups = ThreadPoolExecutor(2, "kvray-lookup")

    def peer(self, name: str) -> "RayPeer":
        """Return the mover of that name, which is looked up when it is called."""
        return RayPeer(name, self)

    def handle(self, name: str, timeout_s: float) -> Any:
        """Return a mover's handle.

        Raises:
            ShardUnavailable: there is none of that name, or Ray does not answer.
        """
        with self._lock:
            known = self._handles.get(name)
        if known is None:
            try:
                known = self._lookups.submit(get_actor, name).result(timeout_s)
            except FutureTimeoutError:
                raise ShardUnavailable(
                    f"Ray does not tell where {name} is; is its head up?"
                ) from None
            with self._lock:
                self._handles[name] = known
        return known

    def retain(self, names: Iterable[str]) -> None:
        """Know no movers but these any more."""
        with self._lock:
            self._handles = {name: self._handles[name] for name in names if name in self._handles}

    def forget(self, name: str) -> None:
        """Look a mover up again next time: one of that name may have been made anew."""
        with self._lock:
            self._handles.pop(name, None)


class RayPeer:
    """The mover of another node; see `Peer`."""

    def __init__(self, name: str, peers: RayPeers) -> None:
        """Call the actor `name`."""
        self._name = name
        self._peers = peers

    def offer(self, want: Want, *, timeout_s: float) -> Offer:
        """See `Peer`."""
        offer: Offer = self._call("offer", *packed(want), timeout_s=timeout_s)
        return offer

    def send(self, order: SendOrder, *, timeout_s: float) -> Any:
        """See `Peer`."""
        return self._call("send", order, timeout_s=timeout_s)

    def release(self, token: int, suspects: bytes, *, timeout_s: float) -> None:
        """See `Peer`."""
        self._peers.handle(self._name, timeout_s).release.remote(token, suspects)

    def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        handle = self._peers.handle(self._name, timeout_s)
        try:
            return call(getattr(handle, method), *args, timeout_s=timeout_s)
        except ShardUnavailable:
            self._peers.forget(self._name)
            raise


def mover_settings(config: KVRayConfig) -> MoverSettings:
    """Return the plain values that a mover takes from the configuration."""
    staging = config.staging
    return MoverSettings(
        directory=config.node_dir,
        lock_wait_s=config.arena.lock_wait_s,
        transports=staging.transports,
        call_timeout_s=staging.call_timeout_s,
        lease_s=staging.lease_s,
        fetches_max=staging.fetches_max,
        bytes_in_flight=staging.bytes_in_flight,
    )


def create_mover(node_id: str, config: KVRayConfig, *, name: str | None = None) -> Any:
    """Return the mover's actor on a node, started if it is not there.

    Args:
        node_id: Ray's.
        config: of the tier.
        name: of the actor; None: the one that the node's shard looks for.
    """
    name = name or mover_name(node_id)
    # Two movers that fetch from each other must never wait for each other.
    groups = {"fetch": config.staging.fetches_max, "serve": _SERVED_MAX}
    return create_actor(
        MoverActor, name, name, config, node_id=node_id, groups=groups, max_concurrency=4
    )
