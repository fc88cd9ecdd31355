"""Watches, over their sockets as an engine would, which shards of some nodes are away, and when."""

import threading
from pathlib import Path

from kvray.errors import ShardUnavailable
from kvray.node.stage_calls import ShardSocket

_POLL_S = 0.01
_ANSWER_S = 5.0
"""A shard that is slow on a busy machine is not away: then its socket refuses at once."""


class Outages:
    """Asks the shards of some nodes, over their sockets and all the time, whether they serve."""

    def __init__(self, directories: list[Path]) -> None:
        """Begin to ask those of `directories`."""
        self.seen: list[tuple[bool, ...]] = []
        """Which of them were away, each time that it was others than before."""
        self._sockets = [ShardSocket(directory) for directory in directories]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._stopping.set()
        self._thread.join()
        for one in self._sockets:
            one.close()

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_S):
            now = tuple(_is_away(one) for one in self._sockets)
            if not self.seen or now != self.seen[-1]:
                self.seen.append(now)


def _is_away(socket: ShardSocket) -> bool:
    try:
        socket.call("hello", timeout_s=_ANSWER_S)
    except ShardUnavailable:
        return True
    return False
