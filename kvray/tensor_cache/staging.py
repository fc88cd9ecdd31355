"""Stages blocks that this node's arena lacks: from the node's disk, or from other nodes."""

import threading
import time
from collections.abc import Sequence

from kvray.identity.block import BlockKey
from kvray.node import NodeLink, Registration, StageCalls, StageReply


class Staging:
    """Has the node's shard bring blocks into the arena; used by any thread.

    One call is under way at a time: the holder of `_turn` has the connection. A call that waits too
    long for it goes on with the blocks that are here.
    """

    def __init__(self, link: NodeLink, registration: Registration) -> None:
        self._link = link
        self._registration = registration
        self._calls = StageCalls(link.directory)
        self._turn = threading.Lock()

    def stage(self, keys: Sequence[BlockKey], *, wait_s: float) -> StageReply:
        """Return how much of `keys` is in the arena after `wait_s` at most.

        Late blocks still arrive, in the background. The shard keeps staged blocks for
        `staging.handover_s`; the caller leases them before that ends.
        """
        if self._link.arena is None:
            return StageReply(num_blocks=0, reason="store_down")
        if wait_s <= 0 or not self._registration.has_peers:
            return StageReply(num_blocks=0, reason="not_stored")
        until = time.monotonic() + wait_s
        if not self._turn.acquire(timeout=wait_s):
            return StageReply(num_blocks=0, reason="too_slow")
        try:
            if not self._calls.can_ask:
                return StageReply(num_blocks=0, reason="store_down")
            return self._calls.stage(
                keys,
                replica=self._registration.replica,
                rank=self._registration.rank,
                wait_s=max(0.0, until - time.monotonic()),
                tokens_per_s=0.0,  # nobody knows how long computing them would take
            )
        finally:
            self._turn.release()

    def close(self) -> None:
        """Hang up; nobody may be inside `stage`."""
        self._calls.close()
