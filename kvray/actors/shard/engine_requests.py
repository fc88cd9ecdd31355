"""The requests of engines to their node's shard."""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from kvray import __version__
from kvray.actors.shard.engine_server import Handler
from kvray.actors.shard.serving import ShardParts
from kvray.actors.staging.replicas import read_reader
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.block import Namespace, namespace_id

_log = logging.getLogger("kvray.shard")


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
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        }

    def _register(
        self,
        connection: int,
        replica: str,
        rank: int,
        namespace: dict[str, Any],
        instance: str = "",
        **reads: Any,
    ) -> dict[str, Any]:
        reader = read_reader(Namespace.from_wire(namespace), **reads)
        replica = self._parts.replicas.register(
            connection, replica, rank, reader, instance=instance
        )
        return {"replica": replica, **self._told_always(replica, rank)}

    def _report(
        self,
        connection: int,
        replica: str,
        rank: int,
        counters: dict[str, int],
        requests: Sequence[Any] = (),
        prompts: bytes = b"",
        leaving: bool = False,
        weights_order: str = "",
    ) -> dict[str, Any]:
        replicas = self._parts.replicas
        origin = replicas.report(connection, replica, rank, counters, leaving=leaving)
        if origin is None:
            return {"known": False}
        order = replicas.weights_order(replica, rank, weights_order)
        num_bad = self._parts.request_log.note(origin, requests)
        traffic = self._parts.traffic
        block_bytes = replicas.block_bytes(replica, traffic.slot_bytes)
        try:
            sample = traffic.note(origin, block_bytes, prompts)
        except ConfigError:
            num_bad, sample = num_bad + 1, traffic.note(origin, block_bytes, b"")
        if num_bad:
            _log.warning(
                "%d notes of replica %r on its requests are not valid and were dropped; engine and"
                " shard differ",
                *(num_bad, replica),
            )
        events = self._parts.serving().events
        return {
            "known": True,
            "weights": order,
            "sample": sample,
            **self._told_always(replica, rank),
            "describe": None if events is None else events.generation or None,
        }

    def _describe(
        self, connection: int, replica: str, rank: int, chains: Sequence[Any]
    ) -> dict[str, Any]:
        events = self._parts.serving().events
        reader = self._parts.replicas.reader(replica, rank, connection)
        if events is None or reader is None:
            return {"describe": None}
        number, size = namespace_id(reader.namespace.digest()), reader.namespace.tokens_per_block
        return {"describe": events.describe(connection, number, size, chains)}

    def _told_always(self, replica: str, rank: int) -> dict[str, Any]:
        """Return whether it is worth a rank's while to ask for more than the arena has.

        None: other nodes may have more, and nobody knows of it. And the numbers of namespaces that
        engines have blocks of, on whichever node.
        """
        can_stage: bool | None = False  # while it writes its last blocks to disk, and still counts
        with contextlib.suppress(ShardUnavailable):
            serving = self._parts.serving()
            can_stage = serving.has_more() or serving.stager.has_ranks_elsewhere(replica, rank)
        if not can_stage and self._parts.announcer.is_cut_off:
            can_stage = None
        stored = self._parts.announcer.namespaces | self._parts.replicas.numbers()
        return {"peers": can_stage, "stored": sorted(stored)}

    async def _stage(
        self, connection: int, replica: str, keys: bytes, **request: Any
    ) -> dict[str, Any]:
        return await self._parts.serving().stager.stage(replica, keys=keys, **request)
