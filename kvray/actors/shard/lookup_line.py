"""A shard's way to one partition of the lookup: one announcement at a time, an answer whenever."""

from concurrent.futures import Future
from typing import Any

from kvray.actors.lookup.lookup import Announcement, Answer
from kvray.actors.names import lookup_name
from kvray.actors.ray_glue.arguments import packed
from kvray.actors.ray_glue.calls import get_actor, mapped_errors
from kvray.errors import KVRayError


class LookupLine:
    """Brings announcements to a partition; for one thread at a time."""

    def __init__(self, partition: int = 0) -> None:
        self._name = lookup_name(partition)
        self._lookup: Any = None
        self._under_way: tuple[Announcement, Future[Answer]] | None = None

    def announce(self, announcement: Announcement) -> Answer | None:
        """See `Announce`; raises KVRayError if the announcement is lost, or was refused."""
        try:
            if self._lookup is None:
                self._lookup = get_actor(self._name)
            with mapped_errors():
                if self._under_way is None or self._under_way[0] is not announcement:
                    # In pieces: as one argument it would go through Ray's object store.
                    answer = self._lookup.announce.remote(*packed(announcement)).future()
                    self._under_way = announcement, answer
                if not self._under_way[1].done():
                    return None
                answer = self._under_way[1].result()
        except KVRayError:
            # It may have been recreated, under the same name.
            self._lookup = self._under_way = None
            raise
        self._under_way = None
        return answer
