"""The Ray actor around the lookup; synchronous, since its calls carry whole batches.

Queries have a thread of their own: they wait for the announcement that is worked on, and not for
all that came before them. The `Lookup` is not thread-safe, so calls of it hold a lock.
"""

import gc
import os
import threading
import time
from dataclasses import replace
from typing import Any

import ray

from kvray.actors.build_info import BuildInfo, build_info_of
from kvray.actors.lookup.lookup import SILENT_S, Answer, Lookup
from kvray.actors.names import lookup_name
from kvray.actors.ray_glue.arguments import unpacked
from kvray.actors.ray_glue.calls import create_actor, log_to_stderr
from kvray.actors.telemetry.figures import Figures, lookup_figures
from kvray.actors.telemetry.metrics_export import MetricsExport
from kvray.index import Match, Run


class LookupActor:
    """A partition of the tier's lookup as a named actor; a method is one call of the `Lookup`."""

    def __init__(self, cluster_name: str, silent_s: float = SILENT_S, partition: int = 0) -> None:
        log_to_stderr()
        self._cluster_name = cluster_name
        self._partition = partition
        self._build_info = build_info_of(
            {"shard.silent_s": silent_s}, ray.get_runtime_context().get_node_id()
        )
        self._lookup = Lookup(silent_s)
        self._lock = threading.Lock()
        self._metrics = MetricsExport(cluster_name)
        # The index is arrays, which the collector does not walk. Ray and its imports stay for good:
        # no query should wait for a walk of them.
        gc.freeze()

    @ray.method(concurrency_group="health")
    def ping(self) -> None:
        """Answer, however busy the lookup is; a frozen actor does not."""

    def build_info(self) -> BuildInfo:
        """Return the code and settings that it runs with."""
        return self._build_info

    def announce(self, *announcement: Any) -> Answer:
        """Take an announcement, `packed` or itself, which is a heartbeat too."""
        taken = unpacked(*announcement)
        with self._lock:
            now = time.monotonic()
            answer = self._lookup.announce(taken, now)
            took_s = time.monotonic() - now
        self._export(now)
        return replace(answer, took_s=took_s)

    @ray.method(concurrency_group="queries")
    def match(self, num_parts: int, *keys: bytes) -> Match:
        """Return the longest run of `keys` (end to end, `in_pieces`) with holders."""
        with self._lock:
            return self._lookup.match(b"".join(keys), num_parts, time.monotonic())

    @ray.method(concurrency_group="queries")
    def locate(self, *keys: bytes) -> list[Run]:
        """Return the holders of `keys` (end to end, `in_pieces`)."""
        with self._lock:
            return self._lookup.locate(b"".join(keys), time.monotonic())

    @ray.method(concurrency_group="queries")
    def replica(self, replica: str) -> dict[int, str]:
        """Return rank -> shard for a replica."""
        with self._lock:
            return self._lookup.replica(replica, time.monotonic())

    def shards(self) -> list[str]:
        """Return the shards that it knows."""
        with self._lock:
            return self._lookup.shards()

    @ray.method(concurrency_group="queries")
    def targets(self) -> list[str]:
        """Return the shards that blocks may be brought to for later."""
        with self._lock:
            return self._lookup.targets(time.monotonic())

    def drop(self, shard: str) -> None:
        """Forget a shard whose node is gone."""
        with self._lock:
            self._lookup.drop(shard)

    @ray.method(concurrency_group="queries")
    def status(self) -> dict[str, Any]:
        """Return figures for people, and the shards that are heard and silent."""
        self._export(time.monotonic())  # the supervisor asks, also when no shard announces
        with self._lock:
            return {**self._lookup.status(time.monotonic()), "pid": os.getpid()}

    def _export(self, now: float) -> None:
        """Export figures if it is time."""
        with self._lock:
            self._metrics.attempt(self._figures, now)

    def _figures(self, now: float) -> Figures:
        return lookup_figures(self._lookup.status(now), self._partition)

    def __repr__(self) -> str:
        partition = f", partition {self._partition}" if self._partition else ""
        return f"Lookup({self._cluster_name}{partition})"


def create_lookup(cluster_name: str, silent_s: float = SILENT_S, partition: int = 0) -> Any:
    """Return a partition of the tier's lookup; start it if it is not there."""
    # One thread takes announcements, in their order.
    groups = {"health": 1, "queries": 1}
    return create_actor(
        LookupActor,
        lookup_name(partition),
        cluster_name,
        silent_s,
        partition,
        groups=groups,
        max_concurrency=1,
    )
