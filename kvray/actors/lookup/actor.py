"""The Ray actor around the lookup; synchronous, since its calls carry whole batches.

Queries have a thread of their own: they wait for the announcement that is worked on, and not for
all that came before them. The `Lookup` is not thread-safe, so calls of it hold a lock.
"""

import gc
import threading
import time
from dataclasses import replace
from typing import Any

import ray

from kvray.actors.build_info import BuildInfo, build_info_of
from kvray.actors.lookup.lookup import SILENT_S, Announcement, Answer, Lookup
from kvray.actors.names import LOOKUP_NAME
from kvray.actors.ray_glue.calls import create_actor, log_to_stderr
from kvray.actors.telemetry.metric_figures import lookup_figures
from kvray.actors.telemetry.metrics_export import MetricsExport
from kvray.identity.block import Namespace
from kvray.index import Match, Run


class LookupActor:
    """The tier's lookup as a named actor; each method is one call of the `Lookup`."""

    def __init__(self, cluster_name: str, silent_s: float = SILENT_S) -> None:
        log_to_stderr()
        self._cluster_name = cluster_name
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

    def announce(self, announcement: Announcement) -> Answer:
        """Take an announcement, which is a heartbeat too."""
        with self._lock:
            now = time.monotonic()
            answer = self._lookup.announce(announcement, now)
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

    @ray.method(concurrency_group="queries")
    def elsewhere(self, namespace: Namespace, digest: bytes) -> tuple[Namespace, str] | None:
        """Return the most similar other namespace that stored `digest`, and its replica."""
        with self._lock:
            return self._lookup.elsewhere(namespace, digest)

    def shards(self) -> list[str]:
        """Return the shards that it knows."""
        with self._lock:
            return self._lookup.shards()

    def drop(self, shard: str) -> None:
        """Forget a shard whose node is gone."""
        with self._lock:
            self._lookup.drop(shard)

    @ray.method(concurrency_group="queries")
    def status(self) -> dict[str, Any]:
        """Return figures for people, and the shards that are heard and silent."""
        self._export(time.monotonic())  # the supervisor asks, also when no shard announces
        with self._lock:
            return self._lookup.status(time.monotonic())

    def _export(self, now: float) -> None:
        """Export figures if it is time."""
        with self._lock:
            self._metrics.attempt(lambda at: lookup_figures(self._lookup.status(at)), now)

    def __repr__(self) -> str:
        return f"Lookup({self._cluster_name})"


def create_lookup(cluster_name: str, silent_s: float = SILENT_S) -> Any:
    """Return the tier's lookup; start it if there is none."""
    # One thread takes announcements, in their order.
    groups = {"health": 1, "queries": 1}
    return create_actor(
        LookupActor, LOOKUP_NAME, cluster_name, silent_s, groups=groups, max_concurrency=1
    )
