"""How much one piece of a fetch is to be: as much as takes a moment; pure."""

FIRST_BYTES = 16 * 2**20
_LEAST_BYTES = 4 * 2**20
_LAST_BYTES = 64 * 2**20
"""To check so much takes no longer than a piece more would."""
_PIECE_S = 0.1
"""What a piece may take, the wait for the one before it included. A source that has stopped is
noticed, and a lease renewed, at every end of one."""


class Pace:
    """The size of the next piece, from what the last one took.

    Pieces are large where the way is fast, because between two of them it is idle for a moment, and
    grow smaller towards the end: the last one is checked while nothing more is under way.
    """

    def __init__(self, *, most_bytes: int) -> None:
        """Start with an amount that any way manages; `most_bytes` is the transport's own bound."""
        self._most_bytes = most_bytes
        self._bytes = min(FIRST_BYTES, most_bytes)

    def step(self, left_bytes: int) -> int:
        """Return the bytes of the next piece, of which there are `left_bytes`."""
        tail = max(left_bytes // 2, min(_LAST_BYTES, self._bytes))
        return min(self._bytes, tail)

    def note(self, num_bytes: int, seconds: float) -> None:
        """Take note of a piece that came."""
        manageable = int(num_bytes * _PIECE_S / max(seconds, 1e-6))
        self._bytes = min(self._most_bytes, max(_LEAST_BYTES, manageable))
