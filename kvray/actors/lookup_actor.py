"""The Ray actor around the lookup; synchronous, calls carry whole batches."""

import gc
import time
from typing import Any

from kvray.actors.lookup import SILENT_S, Announcement, Answer, Lookup
from kvray.actors.metric_figures import lookup_figures
from kvray.actors.metrics_export import MetricsExport
from kvray.actors.ray_calls import LOOKUP_NAME, create_actor, log_to_stderr
from kvray.actors.vintage import vintage
from kvray.block import Namespace
from kvray.index import Match, Run


class LookupActor:
    """The tier's lookup as a named actor; every method hands over to the `Lookup`."""

    def __init__(self, cluster_name: str, silent_s: float = SILENT_S) -> None:
        """Serve the tier `cluster_name`; shards silent for `silent_s` are left out of answers."""
        log_to_stderr()
        self._cluster_name = cluster_name
        self._vintage = vintage({"shard.silent_s": silent_s})
        self._lookup = Lookup(silent_s)
        self._metrics = MetricsExport()
        # The index is arrays, which the collector does not walk, however many blocks there are.
        # What is left is Ray and all that it imports: it stays, and no query need wait for a walk.
        gc.freeze()

    def ping(self) -> None:
        """Answer, which a frozen actor does not."""

    def vintage(self) -> dict[str, Any]:
        """Return what it was made with, see `vintage`."""
        return self._vintage

    def cluster_name(self) -> str:
        """Return the name of the tier."""
        return self._cluster_name

    def announce(self, announcement: Announcement) -> Answer:
        """See `Lookup.announce`."""
        now = time.monotonic()
        answer = self._lookup.announce(announcement, now)
        self._export(now)
        return answer

    def match(self, num_parts: int, *keys: bytes) -> Match:
        """Return the longest run of `keys` (end to end, `in_pieces`) that shards hold."""
        return self._lookup.match(b"".join(keys), num_parts, time.monotonic())

    def locate(self, *keys: bytes) -> list[Run]:
        """Return which shards hold which parts of `keys` (end to end, `in_pieces`)."""
        return self._lookup.locate(b"".join(keys), time.monotonic())

    def replica(self, replica: str) -> dict[int, str]:
        """See `Lookup.replica`."""
        return self._lookup.replica(replica, time.monotonic())

    def elsewhere(self, namespace: Namespace, opening: bytes) -> tuple[Namespace, str] | None:
        """See `StoredOpenings.elsewhere`."""
        return self._lookup.elsewhere(namespace, opening)

    def shards(self) -> list[str]:
        """See `Lookup.shards`."""
        self._export(time.monotonic())  # the supervisor asks, also when no shard announces
        return self._lookup.shards()

    def drop(self, shard: str) -> None:
        """See `Lookup.drop`."""
        self._lookup.drop(shard)

    def status(self) -> dict[str, Any]:
        """See `Lookup.status`."""
        return self._lookup.status(time.monotonic())

    def _export(self, now: float) -> None:
        """Export figures if it is time: in a call, for a thread of its own must not look."""
        self._metrics.attempt(lambda at: lookup_figures(self._lookup.status(at)), now)

    def __repr__(self) -> str:
        return f"Lookup({self._cluster_name})"


def create_lookup(cluster_name: str, silent_s: float = SILENT_S) -> Any:
    """Return the tier's lookup, started if it is not there.

    Args:
        cluster_name: the tier's.
        silent_s: for how long a shard may be silent before it is left out of answers.
    """
    return create_actor(LookupActor, LOOKUP_NAME, cluster_name, silent_s)
