"""A shard's way to the lookup: one announcement at a time, whose answer may be late."""

from typing import Any

import ray

from kvray.actors.lookup.lookup import Announcement, Answer
from kvray.actors.names import LOOKUP_NAME
from kvray.actors.ray_glue.calls import get_actor, mapped_errors
from kvray.errors import KVRayError

_WAIT_S = 2.0
_READY_S = 1.0  # how long an answer may take that is known to be there


class LookupLine:
    """Brings announcements to the lookup; for one thread at a time."""

    def __init__(self) -> None:
        self._lookup: Any = None
        self._under_way: tuple[Announcement, Any] | None = None

    def announce(self, announcement: Announcement) -> Answer | None:
        """See `Announce`; raises KVRayError if the announcement is lost, or was refused."""
        try:
            if self._lookup is None:
                self._lookup = get_actor(LOOKUP_NAME)
            with mapped_errors():
                if self._under_way is None or self._under_way[0] is not announcement:
                    self._under_way = announcement, self._lookup.announce.remote(announcement)
                if not ray.wait([self._under_way[1]], timeout=_WAIT_S)[0]:
                    return None
                answer: Answer = ray.get(self._under_way[1], timeout=_READY_S)
        except KVRayError:
            # It may have been recreated, under the same name.
            self._lookup = self._under_way = None
            raise
        self._under_way = None
        return answer
