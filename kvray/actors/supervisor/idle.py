"""Which nodes kvray leaves, because nobody uses them and they are to go; pure."""

from collections.abc import Set


class IdleNodes:
    """Nodes that nothing but kvray uses, and those that kvray leaves or has left for that."""

    def __init__(self, after_s: float | None) -> None:
        """Have kvray leave a node that is unused for so long; None: only those that are to go."""
        self._after_s = float("inf") if after_s is None else after_s
        self._since: dict[str, float] = {}
        self._left: set[str] = set()

    @property
    def left(self) -> Set[str]:
        """Those that kvray leaves or has left: none gets a shard until somebody uses it."""
        return self._left

    def note(self, unused: Set[str], going: Set[str], now: float) -> None:
        """Take note of the nodes that are unused `now`, and of those that are `going` anyway.

        The latter are left at once.
        """
        self._since = {node: self._since.get(node, now) for node in unused}
        due = {node for node, since in self._since.items() if now - since >= self._after_s}
        self._left = self._left & unused | due | going

    def stay(self, node: str) -> None:
        """Note that a node could not be left: it counts as unused from the next look on."""
        self._left.discard(node)
        self._since.pop(node, None)
