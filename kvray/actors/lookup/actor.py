"""The Ray actor around a partition of the lookup.

A thread of its own follows the shards, and queries have another: they wait for one step of the
index, and not for all that the shards have said.
"""

import asyncio
import gc
import logging
import os
import threading
from typing import Any

import ray

from kvray.actors.build_info import BuildInfo, build_info_of
from kvray.actors.lookup.followers import Followers
from kvray.actors.lookup.lookup import Lookup
from kvray.actors.names import lookup_name
from kvray.actors.ray_glue.calls import ActorCalls, create_actor, set_up_process
from kvray.actors.telemetry.figures import lookup_figures
from kvray.actors.telemetry.metrics_export import MetricsExport

_log = logging.getLogger("kvray.lookup")


class LookupActor:
    """A partition of the tier's lookup as a named actor; a query is a method of the `Lookup`."""

    def __init__(self, cluster_name: str, silent_s: float, partition: int = 0) -> None:
        set_up_process()
        self._partition = partition
        self._build_info = build_info_of(
            {"shard.silent_s": silent_s}, ray.get_runtime_context().get_node_id()
        )
        self._metrics = MetricsExport(cluster_name)
        self._lookup = Lookup(silent_s)
        # The index is arrays, which the collector does not walk. Ray and its imports stay for good:
        # no query should wait for a walk of them.
        gc.freeze()
        self._followers = Followers(
            self._lookup, ActorCalls(), partition=partition, looked=self._export
        )
        threading.Thread(target=self._run, name="kvray-lookup", daemon=True).start()

    def _run(self) -> None:
        try:
            asyncio.run(self._followers.run())
        except Exception:  # noqa: BLE001 - the end of the thread, and of the process
            _log.exception("the lookup ended by a defect")
        os._exit(1)  # Ray starts it again

    @ray.method(concurrency_group="health")
    def ping(self) -> None:
        """Answer, however busy the lookup is; a frozen actor does not."""

    def build_info(self) -> BuildInfo:
        """Return the code and settings that it runs with."""
        return self._build_info

    @ray.method(concurrency_group="health")
    def name_shard(self, shard: str) -> None:
        """See `Followers.name`."""
        self._followers.name(shard)

    @ray.method(concurrency_group="queries")
    def status(self) -> dict[str, Any]:
        """See `Lookup.status`."""
        with self._followers.query() as lookup:
            return {**lookup.status(), "pid": os.getpid()}

    def _export(self) -> None:
        """Export figures if it is time; with the lookup's lock."""
        self._metrics.attempt(
            lambda _: lookup_figures(self._lookup.status(), self._partition), self._lookup.clock()
        )


def _query(name: str) -> Any:
    @ray.method(concurrency_group="queries")
    def query(self: LookupActor, *args: Any) -> Any:
        with self._followers.query() as lookup:
            return getattr(lookup, name)(*args)

    return query


for _name in ("match", "locate", "replica", "shards", "targets"):
    setattr(LookupActor, _name, _query(_name))


def create_lookup(cluster_name: str, silent_s: float, partition: int = 0) -> Any:
    """Return a partition of the tier's lookup; start it if it is not there."""
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
