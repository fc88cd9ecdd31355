"""Blocks that lost a part: queued for the shards that have the others, until they ask."""

from collections import deque

from kvray.block import KEY_BYTES
from kvray.index import Index, Loss

QUEUED_MAX = 65_536
"""Keys that wait for one shard; the oldest are dropped."""

HANDED_MAX = 4096
"""Keys in one answer."""


class Orphans:
    """What each shard is to be told; advice only, so what is lost on the way is lost."""

    def __init__(self) -> None:
        """Start with nothing to tell."""
        self._queues: dict[str, _Queue] = {}

    def note(self, losses: list[Loss]) -> None:
        """Queue losses for the shards that have what is left."""
        for loss in losses:
            for shard in loss.shards:
                self._queues.setdefault(shard, _Queue()).append(loss.keys, loss.parts)

    def take(self, shard: str, index: Index) -> bytes:
        """Return keys of blocks that `shard` should evict first, and forget them.

        What was stored again since is not among them.
        """
        queue = self._queues.get(shard)
        if queue is None:
            return b""
        taken = queue.pop(HANDED_MAX * KEY_BYTES)
        if not queue.num_bytes:
            del self._queues[shard]
        return b"".join(index.still_lost(keys, parts) for keys, parts in taken)

    def drop(self, shard: str) -> None:
        """Forget what `shard` was to be told."""
        self._queues.pop(shard, None)


class _Queue:
    """Keys, oldest first, each with the parts that went."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._keys: deque[tuple[bytes, int]] = deque()

    def append(self, keys: bytes, parts: int) -> None:
        self._keys.append((keys, parts))
        self.num_bytes += len(keys)
        self.pop(self.num_bytes - QUEUED_MAX * KEY_BYTES)

    def pop(self, num_bytes: int) -> list[tuple[bytes, int]]:
        """Return the oldest keys, of up to so many bytes."""
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
