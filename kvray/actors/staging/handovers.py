"""The shard's own leases on staged blocks, until the asking engine has its own."""

from collections import deque

from kvray.store import Arena, Held, Lease

_HANDOVERS_MAX = 256


class Handovers:
    """The leases, oldest first; state of the shard's event loop.

    Each ends at its time; of too many the oldest ends earlier. Its blocks are then as likely to
    stay as any that were just used.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._held: deque[tuple[float, tuple[Lease, ...]]] = deque()

    def __len__(self) -> int:
        """Return how many prefixes are held."""
        return len(self._held)

    def keep(self, held: Held, *, until: float) -> None:
        """Take over the leases of a prefix and hold them until then."""
        if held.leases:
            self._held.append((until, held.leases))
        while len(self._held) > _HANDOVERS_MAX and self._release_oldest():
            pass

    def expire(self, now: float) -> None:
        """Release the leases whose time is over; if the arena is busy, the next time."""
        while self._held and self._held[0][0] <= now and self._release_oldest():
            pass

    def close(self) -> None:
        """Release all leases; if the arena is too busy, they end with this process."""
        while self._held and self._release_oldest():
            pass

    def _release_oldest(self) -> bool:
        released = self._arena.release(*self._held[0][1])
        if released:
            self._held.popleft()
        return released
