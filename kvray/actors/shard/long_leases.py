"""Names the holders of an arena that lease slots for long; they lose nothing."""

from kvray.store import Arena
from kvray.store.arena import lease


class LongLeases:
    """Tells of each holder once, until it has given its old leases back."""

    def __init__(self, *, after_s: float) -> None:
        self._after_s = after_s
        self._told: set[int] = set()

    def newly(self, arena: Arena, *, now: float) -> list[tuple[str, int]]:
        """Return (label, leased slots) of the holders that were not told of yet."""
        long = dict(lease.long_leases(arena.tables, before=now - self._after_s))
        new, self._told = long.keys() - self._told, set(long)
        labels = arena.tables.holder_label
        return [(bytes(labels[row]).decode(errors="replace"), long[row]) for row in sorted(new)]
