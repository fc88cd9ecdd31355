"""Ranks of a replica that are registered with other shards: those stage and lease for them."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from kvray.actors.arguments import in_pieces
from kvray.actors.peers import Peers
from kvray.actors.stager import Staged
from kvray.actors.staging import Reason
from kvray.errors import KVRayError, ShardUnavailable

_log = logging.getLogger("kvray.shard")

_WAY_SHARE = 0.2
"""Of a wait, what is for the way to another shard and back."""
_RELEASING_S = 60.0
"""How long leases are tried to be released: a shard that died has to come back for it."""
_CANCEL_S = 1.0
"""How long a call may take to end that was cancelled; what is left ends with the loop."""


class RanksAway:
    """Asks other shards; state of the event loop. A call that is late goes on by itself."""

    def __init__(self, peers: Peers, *, call_timeout_s: float) -> None:
        """Ask by `peers`, which leave alone who does not answer within `call_timeout_s`."""
        self._peers = peers
        self._call_timeout_s = call_timeout_s
        self._calls: set[asyncio.Task[Any]] = set()

    async def find(
        self, replica: str, ranks: Sequence[int], until: float
    ) -> dict[str, list[int]] | Reason:
        """Return shard -> its ones of `ranks`, none of which is registered here.

        If not all can be found in time, the reason.
        """
        elsewhere: dict[str, list[int]] = {}
        if not ranks:
            return elsewhere
        try:
            homes = await self._within(self._peers.homes(replica), until)
        except KVRayError:
            return "store_down"
        if homes is None:
            return "too_slow"
        for rank in ranks:
            elsewhere.setdefault(homes.get(rank, ""), []).append(rank)
        if "" in elsewhere or self._peers.shard in elsewhere:
            self._peers.forget_homes(replica)
            return "store_down"
        return elsewhere

    async def stage(
        self,
        shard: str,
        replica: str,
        ranks: Sequence[int],
        wait_s: float,
        *request: Any,
    ) -> Staged:
        """Have another shard stage for its ranks; what it does not answer in time is nothing."""
        work_s = wait_s * (1 - _WAY_SHARE)
        try:
            staged = await self._within(
                self._peers.call(
                    shard, "stage_ranks", replica, ranks, work_s, *request, work_s=work_s
                ),
                time.monotonic() + wait_s,
            )
        except KVRayError:
            self._peers.forget_homes(replica)
            return Staged(num_blocks=0, reason="store_down")
        return Staged(num_blocks=0, reason="too_slow") if staged is None else Staged(**staged)

    async def lease(
        self,
        replica: str,
        elsewhere: Mapping[str, list[int]],
        keys: bytes,
        until: float,
        token: str,
    ) -> dict[int, list[Any]] | None:
        """Have other shards lease exactly `keys` for their ranks; None unless all did in time.

        What was leased, or may have been, by a call whose answer is lost is released by its token.
        """
        request = token, *in_pieces(keys)
        answers = await asyncio.gather(
            *(
                self._within(
                    self._peers.call(shard, "lease_ranks", replica, theirs, *request), until
                )
                for shard, theirs in elsewhere.items()
            ),
            return_exceptions=True,
        )
        leases: dict[int, list[Any]] = {}
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, KVRayError):
                raise answer
            if isinstance(answer, dict):
                leases.update(answer)
        wanted = {rank for theirs in elsewhere.values() for rank in theirs}
        if leases.keys() == wanted and time.monotonic() <= until:
            return leases
        for shard in elsewhere:
            self._in_background(self._release_at(shard, token))
        return None

    def release_unread(self, replica: str, tokens: Sequence[str]) -> None:
        """Have what a replica's leader was never told of released; nobody waits for that."""
        self._in_background(self._release_unread(replica, tokens))

    async def close(self) -> None:
        """End what is under way. Twice is fine."""
        if self._calls:
            for task in self._calls:
                task.cancel()
            await asyncio.wait(self._calls, timeout=_CANCEL_S)

    async def _release_unread(self, replica: str, tokens: Sequence[str]) -> None:
        try:
            homes = await self._peers.homes(replica)
        except KVRayError as error:
            _log.warning("%s: leases could not be released: %s", self._peers.shard, error)
            return
        for shard in set(homes.values()) - {self._peers.shard}:
            for token in tokens:
                await self._release_at(shard, token)

    async def _release_at(self, shard: str, token: str) -> None:
        """Have a shard release what it leased under `token`, or will."""
        until = time.monotonic() + _RELEASING_S
        while time.monotonic() < until:
            try:
                await self._peers.call(shard, "release_ranks", token)
            except KVRayError:
                await asyncio.sleep(self._call_timeout_s)
            else:
                return
        _log.warning("%s: leases at %s could not be released", self._peers.shard, shard)

    async def _within(self, call: Coroutine[Any, Any, Any], until: float) -> Any:
        """Return the answer of `call`, which goes on if it is late; None then.

        Raises:
            KVRayError: what it raised in time.
        """
        task = self._in_background(call)
        await asyncio.wait({task}, timeout=max(0.0, until - time.monotonic()))
        if not task.done():
            return None
        if task.cancelled():
            raise ShardUnavailable(f"{self._peers.shard} ends.")
        return task.result()

    def _in_background(self, call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._end_call)
        return task

    def _end_call(self, task: "asyncio.Task[Any]") -> None:
        self._calls.discard(task)
        if not task.cancelled():
            error = task.exception()  # one that comes late is nobody's
            if error is not None and not isinstance(error, KVRayError):
                _log.error("a call to another shard ended by a defect", exc_info=error)
