"""Partial blocks: queued for the shards that hold the remaining parts, until they announce."""

from collections import deque
from itertools import groupby
from operator import itemgetter

from kvray.identity.block import KEY_BYTES
from kvray.index import Index, Loss

QUEUED_MAX = 65_536  # keys queued for one shard; the oldest of more are dropped

HANDED_MAX = 4096  # keys in one answer


class PartialBlocks:
    """The queue of each shard; it is advice, so a lost answer does no harm."""

    def __init__(self) -> None:
        # Shard -> keys with their lost parts, the oldest first.
        self._queues: dict[str, deque[tuple[bytes, int]]] = {}

    def note(self, losses: list[Loss]) -> None:
        """Queue losses for the shards that hold the remaining parts."""
        for loss in losses:
            starts = range(0, len(loss.keys) if loss.shards else 0, KEY_BYTES)
            lost = [(loss.keys[at : at + KEY_BYTES], loss.parts) for at in starts]
            for shard in loss.shards:
                self._queues.setdefault(shard, deque(maxlen=QUEUED_MAX)).extend(lost)

    def take(self, shard: str, index: Index) -> bytes:
        """Take the keys of blocks that `shard` should evict first.

        Blocks whose parts were stored again are left out.
        """
        queue = self._queues.pop(shard, deque())
        taken = [queue.popleft() for _ in range(min(len(queue), HANDED_MAX))]
        if queue:
            self._queues[shard] = queue
        return b"".join(
            index.still_lost(b"".join(key for key, _ in same), parts)
            for parts, same in groupby(taken, itemgetter(1))
        )

    def drop(self, shard: str) -> None:
        """Drop the queue of `shard`."""
        self._queues.pop(shard, None)
