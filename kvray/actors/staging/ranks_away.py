"""Ranks of a replica that are registered with other shards: those stage and lease for them."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.staging.peers import Peers
from kvray.actors.staging.stager import Staged
from kvray.errors import KVRayError, ShardUnavailable
from kvray.trace.reasons import StageReason
from kvray.trace.spans import traceparent

_log = logging.getLogger("kvray.shard")

_ROUND_TRIP_SHARE = 0.2  # share of a wait for the round trip to another shard
_RELEASING_S = 60.0
"""How long a release is retried: a shard that died has to come back for it."""
_CANCEL_S = 1.0  # how long a cancelled call may take to end; the rest end with the loop


class RanksAway:
    """Calls other shards for those ranks; state of the event loop. Late calls go on."""

    def __init__(self, peers: Peers, *, call_timeout_s: float) -> None:
        self._peers = peers
        self._call_timeout_s = call_timeout_s
        self._calls: set[asyncio.Task[Any]] = set()

    async def find(
        self, replica: str, ranks: Sequence[int], until: float
    ) -> dict[str, list[int]] | StageReason:
        """Return shard -> its share of `ranks`, none of which is registered here.

        If not all can be found in time, return the reason.
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
        """Have another shard stage for its ranks; no answer in time counts as no blocks."""
        work_s = wait_s * (1 - _ROUND_TRIP_SHARE)
        try:
            staged = await self._within(
                self._peers.call(
                    shard,
                    "stage_ranks",
                    traceparent(),
                    replica,
                    ranks,
                    work_s,
                    *request,
                    work_s=work_s,
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

        On failure the token releases every lease, those of lost answers included.
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
        asked = {rank for theirs in elsewhere.values() for rank in theirs}
        if leases.keys() == asked and time.monotonic() <= until:
            return leases
        for shard in elsewhere:
            self._in_background(self._release_at(shard, token))
        return None

    def release_unread(self, replica: str, tokens: Sequence[str]) -> None:
        """Have leases released in the background whose answers the leader never got."""
        self._in_background(self._release_unread(replica, tokens))

    async def close(self) -> None:
        """End all calls. Twice is fine."""
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
        """Have a shard release its leases under `token`, now and in future."""
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
        """Return the answer of `call`, or raise its error; None if it is late, but goes on."""
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
            error = task.exception()  # a late one has no caller
            if error is not None and not isinstance(error, KVRayError):
                _log.error("a call to another shard ended by a defect", exc_info=error)
