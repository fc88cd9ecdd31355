"""Replicas with ranks on several nodes: each shard stages, leases and checks for its own.

The leader's shard stages for the ranks on its own node. At the same time it has the shards of the
other ranks stage for theirs. A prefix is useful only as far as all of them have it. The other
shards then lease exactly that in the names of their ranks: each lease ends by its rank's release or
with its rank. A shard that is asked so asks no other shard: no two can wait for each other.

`Spread` asks the other shards, `RankLeases` are leases taken for a leader on another node, and
`Verifier` checks their blocks before that leader promises them. A leader can check its own node's
arena only. A rank elsewhere would find a wrong block too late to say so. Threads of the loop
compute the sums: the arena and a lease cross to them, a number comes back. Blocks that are not
checked in time do not count.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.staging.peers import Peers
from kvray.actors.staging.plan import Prefix
from kvray.actors.staging.replicas import Reader, Replicas, keys_of, prefix_for
from kvray.actors.staging.stager import Handovers, Staged, Stager
from kvray.errors import KVRayError
from kvray.identity.block import BlockKey
from kvray.store import Arena, Held, Lease
from kvray.store.arena import lease
from kvray.store.arena.lease import id_of
from kvray.trace.reasons import STAGE_REASONS
from kvray.trace.spans import traceparent

_log = logging.getLogger("kvray.shard")

_LEASING_SHARE = 0.3  # share of the wait for the second round of calls to other shards
_ROUND_TRIP_SHARE = 0.2  # share of the first round for the way to another shard and back
_RELEASING_S = 60.0
"""How long a release is retried: a shard that died has to come back for it."""
_CANCEL_S = 1.0  # how long a cancelled release may take to end; the rest end with the loop


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What a leader wants for the ranks of its engine."""

    replica: str
    ranks: Sequence[int]
    readers: Mapping[int, Reader]
    """How those of `ranks` read that are on this node."""
    keys: Sequence[BlockKey]
    tokens_per_s: float = 0.0
    verify_from: int | None = None
    """The first block that ranks on other nodes verify; None: none."""
    token: str | None = None
    """Names the leases of ranks on other nodes; None: they need none."""

    @property
    def is_here(self) -> bool:
        """Whether all of its ranks are on this node."""
        return len(self.readers) == len(self.ranks)

    @property
    def prefix(self) -> Prefix:
        """What this node is to have."""
        return prefix_for(self.keys, self.readers.values(), self.tokens_per_s)


class Spread:
    """The nodes of a replica that has ranks elsewhere; state of the event loop."""

    def __init__(self, stager: Stager, peers: Peers, *, call_timeout_s: float) -> None:
        self._stager = stager
        self._peers = peers
        self._call_timeout_s = call_timeout_s
        self._releases: set[asyncio.Task[None]] = set()

    async def lease(self, request: StageRequest, until: float) -> Staged:
        """Stage and lease for all ranks; a shard that is late counts as one without blocks."""
        try:
            return await asyncio.wait_for(self._lease_all(request, until), until - time.monotonic())
        except asyncio.TimeoutError:
            return Staged(num_blocks=0, reason="too_slow")

    async def _lease_all(self, request: StageRequest, until: float) -> Staged:
        leasing_s = (until - time.monotonic()) * _LEASING_SHARE if request.token else 0.0
        elsewhere = await self._find(request)
        if elsewhere is None:
            return Staged(num_blocks=0, reason="store_down")
        staged = await self._stage(request, elsewhere, until - leasing_s)
        if request.token and staged.num_blocks:
            keys = request.keys[: staged.num_blocks]
            leases = await self._lease(request.replica, elsewhere, keys, request.token)
            if not leases:
                return Staged(num_blocks=0, reason="too_slow")
            staged = replace(staged, leases=leases)
        return staged

    def release_unread(self, replica: str, tokens: Sequence[str]) -> None:
        """Have leases released in the background whose answers the leader never got."""
        self._in_background(self._release_unread(replica, tokens))

    async def close(self) -> None:
        """End all releases. Twice is fine."""
        if self._releases:
            for task in self._releases:
                task.cancel()
            await asyncio.wait(self._releases, timeout=_CANCEL_S)

    async def _find(self, request: StageRequest) -> dict[str, list[int]] | None:
        """Return shard -> its ranks that are not here; None if not all can be found."""
        try:
            homes = await self._peers.homes(request.replica)
        except KVRayError:
            return None
        elsewhere: dict[str, list[int]] = {}
        for rank in request.ranks:
            if rank not in request.readers:
                elsewhere.setdefault(homes.get(rank, ""), []).append(rank)
        if "" in elsewhere or self._peers.shard in elsewhere:
            self._peers.forget_homes(request.replica)
            return None
        return elsewhere

    async def _stage(
        self, request: StageRequest, elsewhere: Mapping[str, list[int]], until: float
    ) -> Staged:
        """Stage here and there at once; return what every rank has."""
        work_s = max(0.0, until - time.monotonic()) * (1 - _ROUND_TRIP_SHARE)
        answers = await asyncio.gather(
            self._stager.stage(request.prefix, until=time.monotonic() + work_s),
            *(self._stage_at(one, ranks, request, work_s) for one, ranks in elsewhere.items()),
        )
        num_blocks = min(one.num_blocks for one in answers)
        reasons = [one.reason for one in answers if one.num_blocks == num_blocks]
        shortest = replace(
            answers[0], num_blocks=num_blocks, reason=min(reasons, key=STAGE_REASONS.index)
        )
        is_longer = any(one.num_blocks > num_blocks for one in answers[1:])
        is_checked = is_longer and request.verify_from is not None
        if not (num_blocks and is_checked and request.prefix.windowed):
            return shortest
        # The windows at the end of the shorter prefix are other blocks than the checked ones.
        shorter = replace(request, keys=request.keys[:num_blocks])
        again = await self._stage(shorter, elsewhere, until)
        return shortest if again.num_blocks == num_blocks else again

    async def _stage_at(
        self, shard: str, ranks: Sequence[int], request: StageRequest, work_s: float
    ) -> Staged:
        asks = request.replica, ranks, work_s, request.tokens_per_s, request.verify_from
        keys = in_pieces(b"".join(request.keys))
        try:
            staged = await self._peers.call(
                shard, "stage_ranks", traceparent(), *asks, *keys, work_s=work_s
            )
        except KVRayError:
            self._peers.forget_homes(request.replica)
            return Staged(num_blocks=0, reason="store_down")
        return Staged(**staged)

    async def _lease(
        self,
        replica: str,
        elsewhere: Mapping[str, list[int]],
        keys: Sequence[BlockKey],
        token: str,
    ) -> dict[int, list[Any]]:
        """Have other shards lease exactly `keys` for their ranks; {} unless all did.

        Whatever ends this before, the deadline or the engine's end, the token releases every lease,
        those of lost answers included.
        """
        asked = {rank for theirs in elsewhere.values() for rank in theirs}
        leases: dict[int, list[Any]] = {}
        pieces = in_pieces(b"".join(keys))
        try:
            answers = await asyncio.gather(
                *(
                    self._peers.call(shard, "lease_ranks", replica, theirs, token, *pieces)
                    for shard, theirs in elsewhere.items()
                ),
                return_exceptions=True,
            )
            for answer in answers:
                if isinstance(answer, BaseException) and not isinstance(answer, KVRayError):
                    raise answer
                leases.update(answer if isinstance(answer, dict) else {})
        finally:
            if is_partial := leases.keys() != asked:
                for shard in elsewhere:
                    self._in_background(self._release_at(shard, token))
        return {} if is_partial else leases

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

    def _in_background(self, release: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(release)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


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
        if reader is None or reader.member is None or reader.arena_id != self._arena.arena_id:
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


_CHECKS_MAX = 16  # checks at once, with those that nobody waits for now
_PIECE_BYTES = 4 * 2**20  # how much to sum before the time is checked again
_SUMMING_SHARE = 0.8  # share of the time for sums; the rest is for their answers
_CLOSE_S = 1.0


class Verifier:
    """Checks staged blocks; used by the shard's event loop alone."""

    def __init__(self, arena: Arena, handovers: Handovers) -> None:
        self._arena = arena
        self._handovers = handovers
        self._checks: set[asyncio.Future[int]] = set()
        self._is_closed = False

    async def valid(self, prefix: Prefix, staged: Staged, first: int, *, until: float) -> Staged:
        """Return the part of `staged` that proves to be valid in time; a bad block is quarantined.

        No rank will load the `first` blocks.
        """
        if staged.num_blocks <= first:
            return staged
        if self._is_closed or len(self._checks) >= _CHECKS_MAX:
            return Staged(num_blocks=0, reason="too_slow")
        # A lease of its own: blocks must stay while they are summed, however long that takes.
        held = self._arena.lease_for(prefix.keys[: staged.num_blocks], prefix.readers)
        if held is None or held.num_blocks <= first:
            if held is not None:
                self._handovers.keep(held)
            return Staged(num_blocks=0, reason="too_slow")
        now = time.monotonic()
        summed_until = now + (until - now) * _SUMMING_SHARE
        check = asyncio.get_running_loop().run_in_executor(
            None, self._count_valid, prefix, held, first, summed_until
        )
        self._checks.add(check)
        check.add_done_callback(lambda _: self._end(check, held))
        await asyncio.wait({check}, timeout=max(0.0, until - now))
        num_valid = check.result() if check.done() and check.exception() is None else first
        if num_valid == staged.num_blocks:
            return staged
        is_late = not check.done() or time.monotonic() >= summed_until
        return Staged(num_blocks=num_valid, reason="too_slow" if is_late else "corrupt")

    async def close(self) -> None:
        """End the checks. Twice is fine."""
        self._is_closed = True
        if self._checks:
            await asyncio.wait(self._checks, timeout=_CLOSE_S)

    def _count_valid(self, prefix: Prefix, held: Held, first: int, until: float) -> int:
        """Return the end of the blocks that are valid for every reader and were summed in time.

        A shorter prefix lacks its window, so with windows it is all or nothing.
        """
        step = max(1, _PIECE_BYTES // sum(prefix.block_bytes.values()))
        num_valid = held.num_blocks
        for start in range(first, held.num_blocks, step):
            if self._is_closed or time.monotonic() >= until:
                num_valid = start
                break
            stop = min(start + step, held.num_blocks)
            for one, reader in zip(held.leases, prefix.readers, strict=True):
                for block, places in lease.places(reader, held.num_blocks, first=start, stop=stop):
                    valid = self._arena.valid(one, places)
                    if not valid.all():
                        num_valid = min(num_valid, block + int(valid.argmin()))
            if num_valid < held.num_blocks:
                break
        return 0 if prefix.windowed and num_valid < held.num_blocks else num_valid

    def _end(self, check: "asyncio.Future[int]", held: Held) -> None:
        self._checks.discard(check)
        self._handovers.keep(held)
        if not check.cancelled():
            error = check.exception()  # a late one has no caller
            if error is not None and not isinstance(error, KVRayError):
                _log.error("a check ended by a defect", exc_info=error)
