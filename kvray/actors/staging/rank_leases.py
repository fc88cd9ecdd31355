"""Leases in the names of this node's ranks, taken for a replica's leader on another node."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from kvray.actors.staging.replicas import Replicas
from kvray.actors.staging.wire_values import keys_of
from kvray.identity.block import BlockKey
from kvray.store import Arena, Held, Lease
from kvray.store.arena.lease import id_of

_REMEMBERED_MAX = 4096
_REMEMBERED_S = 60.0


class RankLeases:
    """Takes and releases leases under tokens; state of the shard's event loop.

    The arena itself knows a lease by its token. A shard that dies between the lease and its answer
    can therefore release it after its restart.

    A leader that did not hear the answer to its `lease` releases by the token. If the release comes
    first, nothing is leased under that token afterwards.
    """

    def __init__(
        self, arena: Arena, replicas: Replicas, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._arena = arena
        self._replicas = replicas
        self._now = now
        self._used: OrderedDict[str, float] = OrderedDict()
        """Token -> when it last came; no token is leased under twice."""
        self._to_release: set[int] = set()

    def lease(
        self, replica: str, ranks: Sequence[int], token: str, *keys: bytes
    ) -> dict[int, list[Any]]:
        """Lease exactly `keys` for each of `ranks`, in the name of its process.

        Returns rank -> [arena_id, lease_id, page, num_slots, check]; {} if a block is missing for a
        rank, the arena is busy, or the token came before.
        """
        blocks = keys_of(b"".join(keys))
        if not self._use(token):
            return {}
        lease_id = id_of(token)
        taken: dict[int, Lease] = {}
        for rank in ranks:
            held = self._lease_one(replica, rank, blocks, lease_id)
            if held is not None and held.leases:
                taken[rank] = held.leases[0]
            if held is None or held.num_blocks < len(blocks):
                self._release(lease_id)
                return {}
        return {
            rank: [self._arena.arena_id, one.lease_id, one.page, one.num_slots, one.check]
            for rank, one in taken.items()
        }

    def release(self, token: str) -> None:
        """Release the leases under `token`, now and in future. Twice is fine."""
        self._use(token)
        self._release(id_of(token))

    def retry(self) -> None:
        """Release the leases that the arena was too busy for."""
        if self._to_release and self._arena.release_ids(self._to_release):
            self._to_release = set()

    def _release(self, lease_id: int) -> None:
        self._to_release.add(lease_id)
        self.retry()

    def _lease_one(
        self, replica: str, rank: int, keys: Sequence[BlockKey], lease_id: int
    ) -> Held | None:
        reader = self._replicas.reader(replica, rank)
        if reader is None or reader.member is None or not reader.part_requests:
            return None
        if reader.arena_id != self._arena.arena_id:
            return None
        return self._arena.lease_for(
            keys, [reader.part_requests], member=reader.member, lease_id=lease_id
        )

    def _use(self, token: str) -> bool:
        """Remember a token for a while; return whether it is new."""
        now = self._now()
        while self._used and (
            next(iter(self._used.values())) <= now - _REMEMBERED_S
            or len(self._used) >= _REMEMBERED_MAX
        ):
            self._used.popitem(last=False)
        is_new = token not in self._used
        self._used[token] = now
        self._used.move_to_end(token)
        return is_new
