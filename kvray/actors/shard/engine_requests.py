"""The requests of engines to their node's shard."""

import time
from collections.abc import Sequence
from typing import Any

from kvray import __version__
from kvray.actors.shard.engine_server import Handler
from kvray.actors.shard.serving import ShardParts
from kvray.actors.shard.traces import outcome_of
from kvray.actors.staging.replicas import read_reader
from kvray.errors import ShardUnavailable
from kvray.identity.block import KEY_BYTES, Namespace, namespace_id
from kvray.trace.span_note import read_notes
from kvray.trace.spans import is_on, span, under


class EngineRequests:
    """Answers the requests of engines; fields come as the wire has them, with the connection."""

    def __init__(self, parts: ShardParts) -> None:
        self._parts = parts

    def handlers(self) -> dict[str, Handler]:
        """Return the function for each request."""
        return {
            "hello": self._hello,
            "register": self._register,
            "report": self._report,
            "describe": self._describe,
            "stage": self._stage,
        }

    def _hello(self, connection: int) -> dict[str, Any]:
        serving = self._parts.serving()
        return {
            "shard": self._parts.name,
            "arena_id": serving.owner.arena.arena_id,
            "shard_epoch": serving.epoch,
            "version": __version__,
            "monotonic_s": time.monotonic(),
        }

    def _register(
        self,
        connection: int,
        replica: str,
        rank: int,
        namespace: dict[str, Any],
        **reads: Any,
    ) -> dict[str, Any]:
        reader = read_reader(Namespace.from_wire(namespace), **reads)
        self._parts.replicas.register(connection, replica, rank, reader)
        return {
            "peers": self._can_stage(replica, rank),
            "stored": self._stored(),
            "traces": is_on(),
        }

    def _report(
        self,
        connection: int,
        replica: str,
        rank: int,
        counters: dict[str, int],
        openings: Sequence[Any] = (),
        requests: Sequence[Any] = (),
        spans: Sequence[Any] = (),
        prompts: bytes = b"",
        leaving: bool = False,
    ) -> dict[str, Any]:
        origin = self._parts.replicas.report(connection, replica, rank, counters, leaving=leaving)
        if origin is None:
            return {"known": False}
        self._parts.announcer.desk.note(origin, openings)
        self._parts.request_log.note(origin, requests)
        self._parts.traces.note(origin, read_notes(spans))
        block_bytes = self._parts.replicas.block_bytes(replica)
        return {
            "known": True,
            "sample": self._parts.traffic.note(origin, block_bytes, prompts),
            "incompatible": self._parts.announcer.desk.answers(replica, rank),
            "peers": self._can_stage(replica, rank),
            "stored": self._stored(),
            "describe": self._generation(),
            "traces": is_on(),
        }

    def _describe(
        self, connection: int, replica: str, rank: int, chains: Sequence[Any]
    ) -> dict[str, Any]:
        events = self._parts.serving().events
        reader = self._parts.replicas.reader(replica, rank, connection)
        if events is None or reader is None:
            return {"describe": None}
        number = namespace_id(reader.namespace.digest())
        return {"describe": events.describe(connection, number, reader.tokens_per_block, chains)}

    def _stored(self) -> list[int]:
        """Return the numbers of namespaces that engines have blocks of, on whichever node."""
        return sorted(self._parts.announcer.desk.stored | self._parts.replicas.numbers())

    def _generation(self) -> int | None:
        """Return the number of what engines were asked to tell; None: they need not."""
        events = self._parts.serving().events
        return None if events is None else events.generation or None

    def _can_stage(self, replica: str, rank: int) -> bool:
        """Return whether it is worth a rank's while to ask for more than the arena has."""
        try:
            serving = self._parts.serving()
        except ShardUnavailable:
            return False  # it writes its last blocks to disk, and still counts
        return serving.has_more() or serving.stager.has_ranks_elsewhere(replica, rank)

    async def _stage(
        self, connection: int, replica: str, keys: bytes, **request: Any
    ) -> dict[str, Any]:
        stager = self._parts.serving().stager
        about = {"kvray.shard": self._parts.name, "kvray.replica": replica}
        trace = self._parts.traces.of_prompt(replica, keys[-KEY_BYTES:])
        with under(trace), span("stage", about) as made:
            staged = await stager.stage(replica, keys=keys, **request)
            made.set_attributes(outcome_of(staged))
        return staged
