"""Has a shard know its peers before it needs them, and forget those that have gone."""

import asyncio
import contextlib

from kvray.actors.peers import Peers
from kvray.errors import KVRayError

_AGAIN_S = 5.0


class Introductions:
    """Called by the shard's event loop, which never waits for them."""

    def __init__(self, peers: Peers) -> None:
        """Introduce `peers`."""
        self._peers = peers
        self._task: asyncio.Task[None] | None = None
        self._num_shards = 0
        self._due_at = 0.0

    def tick(self, now: float, *, num_shards: int) -> None:
        """Do what is due; called often.

        Args:
            now: monotonic seconds.
            num_shards: live shards of the tier, this one included; 0 if that is not known.
        """
        self._peers.ping()
        if num_shards != self._num_shards:
            self._num_shards, self._due_at = num_shards, now
        is_busy = self._task is not None and not self._task.done()
        if num_shards > 1 and now >= self._due_at and not is_busy:
            self._due_at = now + _AGAIN_S
            self._task = asyncio.get_running_loop().create_task(self._introduce())

    def close(self) -> None:
        """Begin no more; what is under way ends with the loop. Twice is fine."""
        self._peers.close()
        if self._task is not None:
            self._task.cancel()

    async def _introduce(self) -> None:
        # Who does not answer is found out by those who want something of it.
        with contextlib.suppress(KVRayError):
            await self._peers.introduce()
