"""Turns to announce everything: a few shards at a time; the others hear when to ask."""

TURNS = 32
"""Shards at once: while some make their next pieces, the lookup works on those of others. The turn
of a shard with few blocks takes some 0.15 s, most of it pauses."""
TURN_S = 5.0
"""A turn ends after so long a silence of its shard, which may have died."""
_ASKS_PER_S = 200
"""Requests for a turn by all shards together, however many wait: a small load for the lookup."""
_WAIT_MIN_S = 0.5


class Turns:
    """The turns that the lookup gives; pure. Without turns all shards would announce at once."""

    def __init__(self) -> None:
        # Shard -> when its turn runs out.
        self._taken: dict[str, float] = {}
        # When the last of those that wait is to ask.
        self._last_ask = float("-inf")

    def take(self, shard: str, now: float) -> float:
        """Give `shard` a turn if one is free; return 0, or the seconds until it is to ask again."""
        wait_s = self.wait_s(shard, now)
        if not wait_s:
            self._taken[shard] = now + TURN_S
        return wait_s

    def wait_s(self, shard: str, now: float) -> float:
        """Return the seconds until `shard` is to ask, one shard after the other; 0: at once."""
        self._taken = {one: until for one, until in self._taken.items() if until > now}
        if shard in self._taken or len(self._taken) < TURNS:
            return 0.0
        self._last_ask = max(self._last_ask + 1 / _ASKS_PER_S, now + _WAIT_MIN_S)
        return self._last_ask - now

    def go_on(self, shard: str, now: float, *, more: bool) -> None:
        """Note an announcement of `shard`, and whether `more` of it follows."""
        if not more:
            self._taken.pop(shard, None)
        elif shard in self._taken:
            self._taken[shard] = now + TURN_S
