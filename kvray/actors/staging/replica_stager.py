"""Stages for all ranks of a replica, on whichever nodes; on the shard's event loop."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kvray.actors.staging.peers import Peers
from kvray.actors.staging.plan import Peer
from kvray.actors.staging.replicas import (
    Count,
    Name,
    Positive,
    Reader,
    Replicas,
    Seconds,
    checked,
    keys_of,
    prefix_for,
)
from kvray.actors.staging.spread import RankLeases, Spread, StageRequest, Verifier
from kvray.actors.staging.stager import Staged, Stager
from kvray.config import StagingConfig
from kvray.errors import ConfigError
from kvray.index import PARTS_MAX
from kvray.routing import Link, Profile
from kvray.store import Arena

_UNMEASURED_BYTES_PER_S = 2e9
"""Of a disk or another node that has given nothing yet; a guess of routers, until it has."""
_CHECKING_SHARE = 0.3  # share of the wait for checking the blocks that arrived
_Token = Annotated[Name, Field(max_length=64)]


class _Asked(BaseModel):
    """The fields of a stage request besides its keys, as on the wire."""

    model_config = ConfigDict(extra="forbid")

    wait_s: Seconds
    tokens_per_s: Seconds = 0.0
    verify_from: Count | None = None
    stored_by: Annotated[Positive, Field(lt=PARTS_MAX)] | None = None
    token: Annotated[_Token, Field(min_length=0)] = ""
    """Names the leases of ranks on other nodes; empty: one is made up."""
    unread: Annotated[tuple[_Token, ...], Field(max_length=64)] = ()
    """The tokens of calls whose answers did not arrive; their leases are released."""


_ASKED = TypeAdapter(_Asked)


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
        self._replicas = replicas
        self._settings = settings
        self._spread = Spread(stager, peers, call_timeout_s=settings.call_timeout_s)
        self.leases = RankLeases(arena, replicas)
        """Those of ranks here, for leaders elsewhere."""
        self._verifier = Verifier(arena, stager.handovers)

    async def stage(self, replica: str, rank: int, keys: bytes, **fields: Any) -> dict[str, Any]:
        """Answer an engine's `stage`, whose arguments are those of `node.StageCalls.stage`.

        `keys` lie end to end, from the prompt's root.

        Returns num_blocks and reason; the leases of ranks on other nodes: rank -> [arena_id,
        lease_id, page, num_slots, check]; and, unless all blocks were here, their arrivals: [stop,
        way, source] each, as in `Arrival`. Raises ConfigError for an invalid field, or if no such
        rank is registered.
        """
        asked = checked(_ASKED, fields, "stage")
        until = time.monotonic() + min(asked.wait_s, self._settings.deadline_s)
        ranks, readers = self._ranks_of(replica, rank)
        request = StageRequest(
            replica=replica,
            ranks=ranks,
            readers=readers,
            keys=keys_of(keys),
            tokens_per_s=asked.tokens_per_s,
            verify_from=asked.verify_from,
            token=asked.token or secrets.token_hex(16),
        )
        if not request.is_here and asked.unread:
            self._spread.release_unread(replica, asked.unread)
        if (stored_by := asked.stored_by) is not None:
            if not request.is_here:
                return {"num_blocks": 0, "reason": "store_down", "leases": {}}
            resliced = {one: reader.resliced(stored_by) for one, reader in readers.items()}
            request = replace(request, readers=resliced)
        staged = await self._lease(request, until)
        answer = {**_answer(staged), "leases": staged.leases}
        if staged.num_blocks and staged.arrivals:
            answer["arrivals"] = staged.arrivals
        return answer

    async def prefetch(self, replica: str, rank: int, keys: bytes) -> dict[str, Any]:
        """Stage `keys` for all ranks of a replica, one of which, `rank`, is registered here.

        Returns num_blocks here within `deadline_s`, num_staged that were not here before, the
        arrivals of those of this node, and reason.
        """
        ranks, readers = self._ranks_of(replica, rank)
        request = StageRequest(replica=replica, ranks=ranks, readers=readers, keys=keys_of(keys))
        before = await self._stager.num_here(request.prefix)
        staged = await self._lease(request, time.monotonic() + self._settings.deadline_s)
        num_staged = max(0, staged.num_blocks - before)
        return {**_answer(staged), "num_staged": num_staged, "arrivals": staged.arrivals}

    def profile(self, replica: str, rank: int, num_partitions: int) -> Profile:
        """Return what a router has to know of a replica, one rank of which is registered here."""
        _, readers = self._ranks_of(replica, rank)
        namespace, has_tenants = readers[rank].namespace, readers[rank].tenants is not None
        prefix = prefix_for((), readers.values(), 0.0)
        disk, peers = self._stager.ways()
        return Profile(
            tokens_per_block=namespace.tokens_per_block,
            block_bytes=sum(prefix.block_bytes.values()),
            parts=sum(1 << part for part in prefix.block_bytes),
            namespace=b"" if has_tenants else namespace.digest(),
            num_partitions=num_partitions,
            disk=None if disk is None else _link(disk),
            links={name: _link(one) for name, one in peers.items()},
        )

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
        fields = {"wait_s": wait_s, "tokens_per_s": tokens_per_s, "verify_from": verify_from}
        asked = checked(_ASKED, fields, "stage_ranks")
        wait_s, first = min(asked.wait_s, self._settings.deadline_s), asked.verify_from
        until = time.monotonic() + wait_s
        summing_s = 0.0 if first is None else wait_s * _CHECKING_SHARE
        prefix = prefix_for(keys_of(b"".join(keys)), here.values(), asked.tokens_per_s)
        staged = await self._stager.stage(prefix, until=until - summing_s)
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
        await self._spread.close()
        await self._verifier.close()
        await self._stager.close()

    async def _lease(self, request: StageRequest, until: float) -> Staged:
        """Stage and lease for all ranks; return the blocks that every one has by then.

        This node's are kept for its ranks to lease; those of others have leases, if it has a token.
        """
        if request.is_here:
            return await self._stager.stage(request.prefix, until=until)
        return await self._spread.lease(request, until)

    def _ranks_of(self, replica: str, rank: int) -> tuple[Sequence[int], Mapping[int, Reader]]:
        """Return the ranks that one asks for, and how those of them that are here read."""
        reader = self._replicas.reader(replica, rank)
        if reader is None:
            raise ConfigError(f"Rank {rank} of {replica!r:.80} has not registered here.")
        ranks = reader.ranks(rank)
        return ranks, self._replicas.readers(replica, ranks)


def _link(peer: Peer) -> Link:
    return Link(latency_s=peer.latency_s, bytes_per_s=peer.bytes_per_s or _UNMEASURED_BYTES_PER_S)


def _answer(staged: Staged) -> dict[str, Any]:
    return {"num_blocks": staged.num_blocks, "reason": staged.reason}
