"""Stages for all ranks of a replica, on whichever nodes; on the shard's event loop.

The leader's shard stages for the ranks on its own node. At the same time it has the shards of the
other ranks stage for theirs. A prefix is useful only as far as all of them have it. The other
shards then lease exactly that in the names of their ranks: each lease ends by its rank's release or
with its rank. A shard that is asked so asks no other shard: no two can wait for each other.
"""

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.staging.peers import Peers
from kvray.actors.staging.plan import Prefix
from kvray.actors.staging.ranks_away import RankLeases, RanksAway, Verifier
from kvray.actors.staging.replicas import (
    Count,
    Name,
    Positive,
    Reader,
    Replicas,
    Seconds,
    checked,
    keys_of,
)
from kvray.actors.staging.stager import Staged, Stager
from kvray.config import StagingConfig
from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.index import PARTS_MAX
from kvray.store import Arena
from kvray.trace.reasons import STAGE_REASONS

_SECONDS = TypeAdapter(Seconds)
_PLACE: TypeAdapter[int | None] = TypeAdapter(Count | None)
_NUMBER: TypeAdapter[int] = TypeAdapter(Annotated[Positive, Field(lt=PARTS_MAX)])
_Token = Annotated[Name, Field(max_length=64)]
_TOKEN = TypeAdapter(_Token)
_TOKENS: TypeAdapter[tuple[str, ...]] = TypeAdapter(
    Annotated[tuple[_Token, ...], Field(max_length=64)]
)
_LEASING_SHARE = 0.3  # share of the wait for the second round of calls to other shards
_SUMMING_SHARE = 0.3  # share of the wait for checking the blocks that arrived


class ReplicaStager:
    """Answers the stage requests of this node's engines and of other shards."""

    def __init__(
        self,
        arena: Arena,
        stager: Stager,
        replicas: Replicas,
        peers: Peers,
        settings: StagingConfig,
    ) -> None:
        self._stager = stager
        self._shard = peers.shard
        self._replicas = replicas
        self._settings = settings
        self._away = RanksAway(peers, call_timeout_s=settings.call_timeout_s)
        self.leases = RankLeases(arena, replicas)
        """Those of ranks here, for leaders elsewhere."""
        self._verifier = Verifier(arena, stager.handovers, handover_s=settings.handover_s)

    async def stage(
        self,
        replica: str,
        rank: int,
        keys: bytes,
        wait_s: float,
        tokens_per_s: float = 0.0,
        *,
        verify_from: int | None = None,
        stored_by: int | None = None,
        token: str = "",
        unread: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Answer an engine's `stage`, whose arguments are those of `node.StageCalls.stage`.

        `keys` lie end to end, from the prompt's root. `token` names the leases of ranks on other
        nodes; empty: one is made up. `unread` has the tokens of calls whose answers did not arrive;
        their leases are released.

        Returns num_blocks and reason; the leases of ranks on other nodes: rank -> [arena_id,
        lease_id, page, num_slots, check]; and, unless all blocks were here, their arrivals: [stop,
        way, source] each, as in `Arrival`. Raises ConfigError for an invalid field, or if no such
        rank is registered.
        """
        began = time.monotonic()
        blocks = keys_of(keys)
        until = began + min(checked(_SECONDS, wait_s, "wait_s"), self._settings.deadline_s)
        tokens_per_s = checked(_SECONDS, tokens_per_s, "tokens_per_s")
        verify_from = checked(_PLACE, verify_from, "verify_from")
        unread_tokens = checked(_TOKENS, unread, "unread")
        ranks = self._ranks_of(replica, rank)
        here = self._replicas.readers(replica, ranks)
        is_alone = len(here) == len(ranks)
        if stored_by is not None:
            return await self._stage_resliced(
                here.values() if is_alone else (), blocks, tokens_per_s, until, stored_by
            )
        if unread_tokens and not is_alone:
            self._away.release_unread(replica, unread_tokens)
        staged_until = until if is_alone else until - (until - began) * _LEASING_SHARE
        staged, elsewhere = await self._stage_all(
            replica, ranks, blocks, tokens_per_s, staged_until, verify_from=verify_from
        )
        answer: dict[str, Any] = {**_answer(staged), "leases": {}}
        if staged.num_blocks and staged.arrivals:
            answer["arrivals"] = staged.arrivals
        if elsewhere and staged.num_blocks:
            keys = keys[: staged.num_blocks * KEY_BYTES]
            token = checked(_TOKEN, token or secrets.token_hex(16), "token")
            leases = await self._away.lease(replica, elsewhere, keys, until, token)
            if leases is None:
                return {"num_blocks": 0, "reason": "too_slow", "leases": {}}
            answer["leases"] = leases
        return answer

    async def _stage_resliced(
        self,
        readers: Iterable[Reader],
        blocks: Sequence[BlockKey],
        tokens_per_s: float,
        until: float,
        stored_by: int,
    ) -> dict[str, Any]:
        """Stage blocks of `stored_by` ranks for all ranks of an engine, which are on this node."""
        dealt_to = checked(_NUMBER, stored_by, "stored_by")
        resliced = [reader.resliced(dealt_to) for reader in readers]
        if not resliced:
            return {"num_blocks": 0, "reason": "store_down", "leases": {}}
        prefix = prefix_for(blocks, resliced, tokens_per_s)
        staged = await self._stager.stage(prefix, wait_s=max(0.0, until - time.monotonic()))
        return {**_answer(staged), "leases": {}, "arrivals": staged.arrivals}

    async def prefetch(self, replica: str, rank: int, keys: bytes) -> dict[str, Any]:
        """Stage `keys` for all ranks of a replica, one of which, `rank`, is registered here.

        Returns num_blocks here within `deadline_s`, num_staged that were not here before, the
        arrivals of those of this node, and reason.
        """
        blocks, ranks = keys_of(keys), self._ranks_of(replica, rank)
        prefix = prefix_for(blocks, self._replicas.readers(replica, ranks).values(), 0.0)
        before = await self._stager.num_here(prefix)
        until = time.monotonic() + self._settings.deadline_s
        staged, _ = await self._stage_all(replica, ranks, blocks, 0.0, until)
        num_staged = max(0, staged.num_blocks - before)
        return {**_answer(staged), "num_staged": num_staged, "arrivals": staged.arrivals}

    def profile(self, replica: str, rank: int) -> dict[str, Any]:
        """Return what a router has to know of a replica, one rank of which is registered here.

        block_bytes of its ranks here, parts as a mask, and what was measured: disk, None if there
        is none, and links, shard -> [latency in s, bytes/s or None] each.
        """
        readers = self._replicas.readers(replica, self._ranks_of(replica, rank)).values()
        prefix = prefix_for((), readers, 0.0)
        disk, peers = self._stager.ways()
        return {
            "block_bytes": sum(prefix.block_bytes.values()),
            "parts": sum(1 << part for part in prefix.block_bytes),
            "disk": None if disk is None else [disk.latency_s, disk.bytes_per_s],
            "links": {name: [one.latency_s, one.bytes_per_s] for name, one in peers.items()},
        }

    def on_disk(self, parts: int, keys: bytes) -> bytes:
        """See `Stager.on_disk`; `parts` is a mask."""
        wanted = [part for part in range(PARTS_MAX) if parts >> part & 1]
        if not wanted or parts >> PARTS_MAX:
            raise ConfigError(f"{parts!r:.40} is no mask of parts.")
        return self._stager.on_disk(keys_of(keys), wanted)

    def has_ranks_elsewhere(self, replica: str, rank: int) -> bool:
        """Return whether a rank speaks for others that are not registered here."""
        leader = self._replicas.reader(replica, rank)
        ranks = [] if leader is None else leader.ranks(rank)
        return len(self._replicas.readers(replica, ranks)) < len(ranks)

    async def stage_here(
        self,
        replica: str,
        ranks: Sequence[int],
        wait_s: float,
        tokens_per_s: float,
        verify_from: int | None,
        *keys: bytes,
    ) -> dict[str, Any]:
        """Stage for `ranks` of a leader elsewhere; all of them are registered here, or ConfigError.

        Arguments as for `stage`, `keys` in pieces. Returns num_blocks and reason, as in `Staged`.
        """
        here = self._replicas.readers(replica, ranks)
        if len(here) < len(set(ranks)):
            missing = sorted(set(ranks) - here.keys())
            raise ConfigError(f"Ranks {missing} of {replica!r:.80} have not registered here.")
        wait_s = min(checked(_SECONDS, wait_s, "wait_s"), self._settings.deadline_s)
        until = time.monotonic() + wait_s
        first = checked(_PLACE, verify_from, "verify_from")
        prefix = prefix_for(keys_of(b"".join(keys)), here.values(), tokens_per_s)
        if first is not None:
            wait_s -= wait_s * _SUMMING_SHARE
        staged = await self._stager.stage(prefix, wait_s=wait_s)
        if first is not None:
            staged = await self._verifier.valid(prefix, staged, first, until=until)
        return _answer(staged)

    def status(self) -> dict[str, Any]:
        """Return the stager's figures; from any thread."""
        return self._stager.status()

    def expire(self) -> None:
        """Do what is due; called often."""
        self._stager.handovers.expire(time.monotonic())
        self.leases.retry()

    async def close(self) -> None:
        """End all stages, checks and calls. Twice is fine."""
        await self._away.close()
        await self._verifier.close()
        await self._stager.close()

    def _ranks_of(self, replica: str, rank: int) -> list[int]:
        reader = self._replicas.reader(replica, rank)
        if reader is None:
            raise ConfigError(f"Rank {rank} of {replica!r:.80} has not registered here.")
        return reader.ranks(rank)

    async def _stage_all(
        self,
        replica: str,
        ranks: Sequence[int],
        blocks: Sequence[BlockKey],
        tokens_per_s: float,
        until: float,
        *,
        verify_from: int | None = None,
    ) -> tuple[Staged, dict[str, list[int]]]:
        """Stage for all of `ranks`, on whichever nodes.

        Returns the blocks staged for every one of them, and shard -> its ranks for other shards.
        """
        here = self._replicas.readers(replica, ranks)
        away = [rank for rank in ranks if rank not in here]
        elsewhere = await self._away.find(replica, away, until)
        if isinstance(elsewhere, str):
            return Staged(num_blocks=0, reason=elsewhere), {}
        wait_s = max(0.0, until - time.monotonic())
        request = tokens_per_s, verify_from, *in_pieces(b"".join(blocks))
        answers = await asyncio.gather(
            self._stager.stage(prefix_for(blocks, here.values(), tokens_per_s), wait_s=wait_s),
            *(
                self._away.stage(shard, replica, theirs, wait_s, *request)
                for shard, theirs in elsewhere.items()
            ),
        )
        num_blocks = min(one.num_blocks for one in answers)
        reasons = [one.reason for one in answers if one.num_blocks == num_blocks]
        shortest = Staged(
            num_blocks=num_blocks,
            reason=min(reasons, key=STAGE_REASONS.index),
            arrivals=answers[0].arrivals,
        )
        is_longer = any(one.num_blocks > num_blocks for one in answers[1:])
        if not (num_blocks and is_longer and verify_from is not None and _has_windows(here)):
            return shortest, elsewhere
        # The windows at the end of the shorter prefix are other blocks than the checked ones.
        again, elsewhere = await self._stage_all(
            replica, ranks, blocks[:num_blocks], tokens_per_s, until, verify_from=verify_from
        )
        return (shortest if again.num_blocks == num_blocks else again), elsewhere


def _answer(staged: Staged) -> dict[str, Any]:
    return {"num_blocks": staged.num_blocks, "reason": staged.reason}


def prefix_for(
    blocks: Sequence[BlockKey], readers: Iterable[Reader], tokens_per_s: float
) -> Prefix:
    """Return the prefix that `readers` need of `blocks`; an engine computes `tokens_per_s`."""
    requests, block_bytes, tokens_per_block = [], {}, 0
    for reader in readers:
        if not reader.part_requests:
            raise ConfigError("An engine has not said which parts it reads; update its kvray.")
        requests.append(reader.part_requests)
        block_bytes.update({part: reader.part_bytes for part, *_ in reader.part_requests})
        tokens_per_block = reader.tokens_per_block
    return Prefix(
        keys=tuple(blocks),
        readers=tuple(requests),
        block_bytes=block_bytes,
        seconds_per_block=tokens_per_block / tokens_per_s if tokens_per_s > 0 else 0.0,
    )


def _has_windows(readers: Mapping[int, Reader]) -> bool:
    return any(
        one.window is not None for reader in readers.values() for one in reader.part_requests
    )
