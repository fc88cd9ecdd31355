"""The Ray actor around the lookup; synchronous, calls carry whole batches."""

import time
from typing import Any

import ray

from kvray.actors.lookup import Announcement, Answer, Lookup
from kvray.actors.ray_calls import LOOKUP_NAME, NAMESPACE, log_to_stderr
from kvray.index import Match, split_keys


class LookupActor:
    """The tier's lookup as a named actor; every method hands over to the `Lookup`."""

    def __init__(self, cluster_name: str) -> None:
        """Serve the tier `cluster_name`."""
        log_to_stderr()
        self._cluster_name = cluster_name
        self._lookup = Lookup()

    def ping(self) -> None:
        """Answer, which a frozen actor does not."""

    def cluster_name(self) -> str:
        """Return the name of the tier."""
        return self._cluster_name

    def announce(self, announcement: Announcement) -> Answer:
        """See `Lookup.announce`."""
        return self._lookup.announce(announcement, time.monotonic())

    def match(self, keys: bytes, num_parts: int) -> Match:
        """Return the longest run of `keys` (end to end, 32 bytes each) that shards hold."""
        return self._lookup.index.match(split_keys(keys), num_parts)

    def shards(self) -> list[str]:
        """See `Lookup.shards`."""
        return self._lookup.shards()

    def drop(self, shard: str) -> None:
        """See `Lookup.drop`."""
        self._lookup.drop(shard)

    def status(self) -> dict[str, Any]:
        """See `Lookup.status`."""
        return self._lookup.status(time.monotonic())

    def __repr__(self) -> str:
        return f"Lookup({self._cluster_name})"


def create_lookup(cluster_name: str) -> Any:
    """Return the tier's lookup, started if it is not there."""
    return (
        ray.remote(LookupActor)
        .options(
            name=LOOKUP_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
        )
        .remote(cluster_name)
    )
