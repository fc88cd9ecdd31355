"""Partial blocks: queued for the shards that hold the remaining parts, until they announce."""

from collections import deque

from kvray.identity.block import KEY_BYTES
from kvray.index import Index, Loss

QUEUED_MAX = 65_536  # keys queued for one shard; the oldest of more are dropped

HANDED_MAX = 4096  # keys in one answer


class PartialBlocks:
    """The queue of each shard; it is advice, so a lost answer does no harm."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    def note(self, losses: list[Loss]) -> None:
        """Queue losses for the shards that hold the remaining parts."""
        for loss in losses:
            for shard in loss.shards:
                self._queues.setdefault(shard, _Queue()).append(loss.keys, loss.parts)

    def take(self, shard: str, index: Index) -> bytes:
        """Take the keys of blocks that `shard` should evict first.

        Blocks whose parts were stored again are left out.
        """
        queue = self._queues.get(shard)
        if queue is None:
            return b""
        taken = queue.pop(HANDED_MAX * KEY_BYTES)
        if not queue.num_bytes:
            del self._queues[shard]
        return b"".join(index.still_lost(keys, parts) for keys, parts in taken)

    def drop(self, shard: str) -> None:
        """Drop the queue of `shard`."""
        self._queues.pop(shard, None)


class _Queue:
    """Keys, oldest first, each with its lost parts."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._keys: deque[tuple[bytes, int]] = deque()

    def append(self, keys: bytes, parts: int) -> None:
        self._keys.append((keys, parts))
        self.num_bytes += len(keys)
        self.pop(self.num_bytes - QUEUED_MAX * KEY_BYTES)

    def pop(self, num_bytes: int) -> list[tuple[bytes, int]]:
        """Return the oldest keys, up to `num_bytes`."""
        taken = []
        while self._keys and num_bytes > 0:
            keys, parts = self._keys.popleft()
            if len(keys) > num_bytes:
                self._keys.appendleft((keys[num_bytes:], parts))
                keys = keys[:num_bytes]
            num_bytes -= len(keys)
            self.num_bytes -= len(keys)
            taken.append((keys, parts))
        return taken
