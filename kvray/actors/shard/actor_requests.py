"""The requests of other actors to a serving shard: blocks for a prompt, for ranks, from disk."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvray.actors.mover.orders import FetchOrder
from kvray.actors.shard.loop_thread import ANSWER_S
from kvray.actors.shard.prompt_keys import check_named, prompt_keys
from kvray.actors.shard.serving import ShardParts
from kvray.actors.shard.traces import outcome_of
from kvray.errors import ShardUnavailable
from kvray.store.arena import slabs
from kvray.trace.arrival import runs_between, source_of
from kvray.trace.spans import span

_UNUSED = "kvray's supervisor"
_LOOK_S = 0.2
_POLL_S = 0.02


class ActorRequests:
    """Hands each request to the shard's event loop and waits for the answer. Thread-safe."""

    def __init__(self, parts: ShardParts) -> None:
        self._parts = parts

    def prefetch(
        self, replica: str, tokens: bytes, *, trace: str = "", **marks: Any
    ) -> dict[str, Any]:
        """Bring a prompt's blocks here for a replica before its engine sees the request.

        `marks` are salt, lora and media, as for `prompt_keys`; `trace` names the span that the
        request belongs to. Returns num_tokens and num_blocks
        that lead and are here now for all ranks, staged_tokens that were not here before, sources,
        [stop, source] each, of the tokens up to there, and the reason why it is not more.
        ConfigError: no rank of `replica` has registered here.
        """
        rank, reader = self._parts.first_reader(replica)
        keys = prompt_keys(reader, tokens, tenants=self._parts.tenants, **marks)
        if not keys:
            nothing = {"num_tokens": 0, "staged_tokens": 0, "num_blocks": 0}
            return {**nothing, "sources": [], "reason": "none"}
        size = reader.tokens_per_block
        num_askable = (len(tokens) // 4 - 1) // size  # its engine computes the last token itself
        if trace and num_askable:
            expect = partial(self._parts.traces.expect, replica, keys[num_askable - 1], trace)
            self._parts.loop.post(expect)
        found = self._parts.loop.wait(
            self._parts.serving().stager.prefetch(replica, rank, b"".join(keys)),
            self._parts.settings.staging.deadline_s + ANSWER_S,
        )
        runs = runs_between(found["arrivals"], 0, found["num_blocks"])
        return {
            "num_tokens": found["num_blocks"] * size,
            "staged_tokens": found["num_staged"] * size,
            "num_blocks": found["num_blocks"],
            "sources": [[stop * size, source_of(way, shard)] for _, stop, way, shard in runs],
            "reason": found["reason"],
        }

    def set_weights_version(
        self, replica: str, version: str | None, wait_s: float
    ) -> dict[int, int]:
        """Tell the engine of `replica` the version of its weights.

        Returns its ranks here, which go by it now, each with how many its engine has; there may be
        none. ShardUnavailable: some have not said so within `wait_s`, and are not told any more.
        """
        return self._parts.loop.wait(
            self._name_weights(replica, version, wait_s), wait_s + ANSWER_S
        )

    async def _name_weights(
        self, replica: str, version: str | None, wait_s: float
    ) -> dict[int, int]:
        order = self._parts.replicas.order_weights(replica, version)
        readers = self._parts.replicas.readers(replica, order.waiting)
        until = time.monotonic() + wait_s
        try:
            while order.waiting:
                if time.monotonic() >= until:
                    late = ", ".join(map(str, sorted(order.waiting)))
                    raise ShardUnavailable(
                        f"Ranks {late} of replica {replica} have not said within {wait_s:g} s that"
                        " they go by the version: the engine does not run, was started again, or"
                        " another client has named a version meanwhile. Call again."
                    )
                await asyncio.sleep(_POLL_S)
        finally:
            self._parts.replicas.call_off(order)
        return {rank: reader.engine_ranks for rank, reader in readers.items()}

    def profile(self, replica: str) -> dict[str, Any]:
        """Return what a router has to know of a replica that is registered here; see `Profile`.

        ShardUnavailable: nobody can make the keys of its prompts yet. ConfigError: no rank of
        `replica` has registered here.
        """
        rank, reader = self._parts.first_reader(replica)
        check_named(reader)
        stager = self._parts.serving().stager
        return {
            "tokens_per_block": reader.tokens_per_block,
            "namespace": b"" if reader.tenants is not None else reader.namespace.digest(),
            "num_partitions": self._parts.settings.lookup_partitions,
            **self._parts.loop.call(lambda: stager.profile(replica, rank), ANSWER_S),
        }

    def on_disk(self, parts: int, *keys: bytes) -> bytes:
        """See `ReplicaStager.on_disk`; the keys are end to end, in pieces."""
        stager = self._parts.serving().stager
        return self._parts.loop.call(lambda: stager.on_disk(parts, b"".join(keys)), ANSWER_S)

    def routed(self, notes: Sequence[Any]) -> None:
        """See `RoutingLog.note`."""
        self._parts.loop.call(lambda: self._parts.routing_log.note(notes), ANSWER_S)

    def promote(self, order: FetchOrder) -> int:
        """Bring blocks from disk into its memory for another shard; return how many."""
        nvme = self._parts.serving().nvme
        if nvme is None:
            return 0
        with span("promote", {"kvray.shard": self._parts.name}) as made:
            report = self._parts.loop.wait(nvme.reads.promote(order), order.deadline_s + ANSWER_S)
            num_blocks = sum(source.num_blocks for source in report.sources.values())
            made.set_attribute("kvray.blocks", num_blocks)
        return num_blocks

    def room(self) -> int:
        """Return how many bytes of its arena are free."""
        tables = self._parts.serving().owner.arena.tables
        return slabs.free_bytes(tables)

    def drain(self, by: str, seconds: float | None) -> None:
        """See `Drain.order`."""
        drain = self._parts.serving().drain
        self._parts.loop.call(lambda: drain.order(by, seconds), ANSWER_S)

    def call_off_drain(self, by: str) -> None:
        """See `Drain.call_off`."""
        drain = self._parts.serving().drain
        self._parts.loop.call(lambda: drain.call_off(by), ANSWER_S)

    def give_away(self, seconds: float) -> bool:
        """Drain a node that nobody uses; return whether the shard may end: no engine is here."""
        if self._is_used():
            return False
        with contextlib.suppress(ShardUnavailable):  # it has no blocks, or not any more
            self.drain(_UNUSED, seconds)
            drain, until = self._parts.serving().drain, time.monotonic() + seconds
            while not self._is_used() and self._parts.announcer.num_shards > 1:
                is_moving = (drain.status() or {}).get("state") == "moving"
                if not is_moving or time.monotonic() > until:
                    break
                time.sleep(_LOOK_S)
            if self._is_used():
                self.call_off_drain(_UNUSED)
                return False
        return True

    def _is_used(self) -> bool:
        return any(rank["connected"] for rank in self._parts.replicas.status())

    def stage_ranks(
        self, replica: str, ranks: Sequence[int], wait_s: float, *request: Any
    ) -> dict[str, Any]:
        """See `ReplicaStager.stage_here`."""
        stager = self._parts.serving().stager
        about = {"kvray.shard": self._parts.name, "kvray.replica": replica}
        with span("stage", about) as made:
            work = stager.stage_here(replica, ranks, wait_s, *request)
            staged = self._parts.loop.wait(work, wait_s + ANSWER_S)
            made.set_attributes(outcome_of(staged))
        return staged

    def lease_ranks(
        self, replica: str, ranks: Sequence[int], token: str, *keys: bytes
    ) -> dict[int, list[Any]]:
        """See `RankLeases.lease`."""
        leases = self._parts.serving().stager.leases
        return self._parts.loop.call(lambda: leases.lease(replica, ranks, token, *keys), ANSWER_S)

    def release_ranks(self, token: str) -> None:
        """See `RankLeases.release`."""
        leases = self._parts.serving().stager.leases
        self._parts.loop.call(lambda: leases.release(token), ANSWER_S)
