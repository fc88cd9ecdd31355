"""The batches that a publisher has sent, numbered, the latest kept for replay; pure."""

from collections import deque


class EventLog:
    """Of one publisher; batches are packed."""

    def __init__(self, first: int, *, batches_max: int, bytes_max: int) -> None:
        """Number batches from `first` on.

        A publisher that starts again begins above its last number: what is below the number that a
        subscriber has seen is nothing new to it.
        """
        self._batches: deque[bytes] = deque()
        self._bytes = 0
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self.oldest = first
        """The first number that is kept, or the next one."""

    @property
    def last(self) -> int:
        """The number of the latest batch; before the first one, the number below it."""
        return self.oldest + len(self._batches) - 1

    def add(self, payload: bytes) -> int:
        """Keep a batch and return its number; the oldest go beyond the bounds."""
        self._batches.append(payload)
        self._bytes += len(payload)
        while len(self._batches) > self._batches_max or self._bytes > self._bytes_max:
            self._bytes -= len(self._batches.popleft())
            self.oldest += 1
        return self.last

    def __getitem__(self, number: int) -> bytes:
        """Return the batch of a number from `oldest` to `last`."""
        return self._batches[number - self.oldest]
