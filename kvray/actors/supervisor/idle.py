"""Which nodes kvray leaves, because nobody uses them and they are to go; pure."""

from collections.abc import Iterable, Set


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

    def note(self, unused: Set[str], going: Set[str], now: float) -> list[str]:
        """Take note of the nodes that are unused `now`; return those to leave, each once.

        Those that are `going` anyway are left at once.
        """
        self._left &= unused | going
        self._since = {node: self._since.get(node, now) for node in unused}
        due = {node for node, since in self._since.items() if now - since >= self._after_s}
        new = (due | going) - self._left
        self._left |= new
        return sorted(new)

    def stay(self, nodes: Iterable[str]) -> None:
        """Note that nodes could not be left: they count as unused from the next look on."""
        for node in nodes:
            self._left.discard(node)
            self._since.pop(node, None)
