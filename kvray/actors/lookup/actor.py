"""The Ray actor around the lookup; synchronous, since its calls carry whole batches."""

import gc
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
        now = time.monotonic()
        answer = self._lookup.announce(announcement, now)
        took_s = time.monotonic() - now
        self._export(now)
        return replace(answer, took_s=took_s)

    def match(self, num_parts: int, *keys: bytes) -> Match:
        """Return the longest run of `keys` (end to end, `in_pieces`) with holders."""
        return self._lookup.match(b"".join(keys), num_parts, time.monotonic())

    def locate(self, *keys: bytes) -> list[Run]:
        """Return the holders of `keys` (end to end, `in_pieces`)."""
        return self._lookup.locate(b"".join(keys), time.monotonic())

    def replica(self, replica: str) -> dict[int, str]:
        """Return rank -> shard for a replica."""
        return self._lookup.replica(replica, time.monotonic())

    def elsewhere(self, namespace: Namespace, digest: bytes) -> tuple[Namespace, str] | None:
        """Return the most similar other namespace that stored `digest`, and its replica."""
        return self._lookup.elsewhere(namespace, digest)

    def shards(self) -> list[str]:
        """Return the shards that it knows."""
        self._export(time.monotonic())  # the supervisor asks, also when no shard announces
        return self._lookup.shards()

    def drop(self, shard: str) -> None:
        """Forget a shard whose node is gone."""
        self._lookup.drop(shard)

    def status(self) -> dict[str, Any]:
        """Return figures for people."""
        return self._lookup.status(time.monotonic())

    def _export(self, now: float) -> None:
        """Export figures if it is time; in a call, as the `Lookup` belongs to one thread."""
        self._metrics.attempt(lambda at: lookup_figures(self._lookup.status(at)), now)

    def __repr__(self) -> str:
        return f"Lookup({self._cluster_name})"


def create_lookup(cluster_name: str, silent_s: float = SILENT_S) -> Any:
    """Return the tier's lookup; start it if there is none."""
    # One thread answers everything but pings: the `Lookup` is not thread-safe.
    return create_actor(
        LookupActor, LOOKUP_NAME, cluster_name, silent_s, groups={"health": 1}, max_concurrency=1
    )
