"""Leases in the names of this node's ranks, taken for a replica's leader on another node."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from kvray.actors.replicas import Replicas
from kvray.block import BlockKey
from kvray.store import Arena, Held, Lease

_REMEMBERED_MAX = 4096
_REMEMBERED_S = 60.0


class RankLeases:
    """What was leased under each token; state of the shard's event loop.

    A leader that did not hear the answer to its `lease` releases by the token. That may come
    first: then nothing is leased under it any more.
    """

    def __init__(
        self, arena: Arena, replicas: Replicas, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Lease in `arena` for ranks in `replicas`."""
        self._arena = arena
        self._replicas = replicas
        self._now = now
        # Token -> when it came, and what was leased under it; None: it was released.
        self._tokens: OrderedDict[str, tuple[float, tuple[Lease, ...] | None]] = OrderedDict()
        self._to_release: list[Lease] = []

    def lease(
        self, replica: str, ranks: Sequence[int], keys: Sequence[BlockKey], token: str
    ) -> dict[int, list[Any]]:
        """Lease exactly `keys` for each of `ranks`, in its process's name.

        Returns:
            rank -> [arena_id, lease_id, page, num_slots]; {} if not all of it is here for all of
            them, or the arena is busy, or the token was released.
        """
        self._forget_old()
        if token in self._tokens:
            return {}
        taken: dict[int, Lease] = {}
        for rank in ranks:
            held = self._lease_one(replica, rank, keys)
            if held is not None and held.leases:
                taken[rank] = held.leases[0]
            if held is None or held.num_blocks < len(keys):
                self._to_release += taken.values()
                self.retry()
                return {}
        self._tokens[token] = self._now(), tuple(taken.values())
        return {
            rank: [self._arena.arena_id, one.lease_id, one.page, one.num_slots]
            for rank, one in taken.items()
        }

    def release(self, token: str) -> None:
        """End what was leased under `token`, or will be. Twice is fine."""
        self._forget_old()
        _, leases = self._tokens.pop(token, (0.0, None))
        self._tokens[token] = self._now(), None
        self._to_release += leases or ()
        self.retry()

    def retry(self) -> None:
        """Release what the arena was too busy for."""
        if self._to_release and self._arena.release(*self._to_release):
            self._to_release = []

    def _lease_one(self, replica: str, rank: int, keys: Sequence[BlockKey]) -> Held | None:
        reader = self._replicas.reader(replica, rank)
        if reader is None or reader.member is None or not reader.wanted:
            return None
        if reader.arena_id != self._arena.arena_id:
            return None
        return self._arena.lease_for(keys, [reader.wanted], member=reader.member)

    def _forget_old(self) -> None:
        """Forget tokens that nobody comes back for; their leases are their ranks' alone."""
        before = self._now() - _REMEMBERED_S
        while self._tokens:
            at, _ = next(iter(self._tokens.values()))
            if at > before and len(self._tokens) < _REMEMBERED_MAX:
                return
            self._tokens.popitem(last=False)
