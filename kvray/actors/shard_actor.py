"""The Ray actor around a shard."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from kvray.actors.admin import check_proof
from kvray.actors.arguments import unpacked
from kvray.actors.async_calls import ActorCalls
from kvray.actors.changes import settings_of
from kvray.actors.inquiries import Asked, Prompt, Whereabouts
from kvray.actors.lookup import Announcement, Answer
from kvray.actors.metric_figures import ShardFigures
from kvray.actors.metrics_export import MetricsThread
from kvray.actors.ray_calls import (
    LOOKUP_NAME,
    SHARD_PREFIX,
    SUPERVISOR_NAME,
    call,
    create_actor,
    get_actor,
    log_to_stderr,
    node_labels,
    shard_name,
)
from kvray.actors.shard import Shard
from kvray.actors.shard_settings import ShardSettings
from kvray.actors.vintage import vintage
from kvray.actors.watch import Nudge
from kvray.config import KVRayConfig, config_on_node, ray_memory_threshold
from kvray.errors import ConfigError, KVRayError
from kvray.store.arena_file import ARENA_FILE
from kvray.store.capacity import MemoryClaims
from kvray.store.pages import ArenaPages

_ANNOUNCE_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 20.0
_NUDGE_S = 5.0
"""How often the supervisor is called, which nobody else calls for long."""

_GROUPS = {"health": 1, "people": 2, "prefetch": 8, "ranks": 8, "leases": 4, "disk": 8}
"""Threads for calls that may take long, apart: what another shard waits for must not queue behind
what waits for other shards, or two could wait for each other."""


class ShardActor:
    """A node's shard as a named actor; every method hands over to the `Shard`."""

    def __init__(self, name: str, config: KVRayConfig) -> None:
        """Start the shard; `status` tells when it serves. Runs again when Ray restarts it."""
        log_to_stderr()
        self._vintage = vintage(settings_of(config))
        problem = None
        try:
            config = config_on_node(config, labels=node_labels())
        except ConfigError as error:
            problem = error  # told by `status`: an actor that cannot be made tells nobody
        self._name = name
        self._config = config
        self._lookup: Any = None
        self._nudge = Nudge(SUPERVISOR_NAME, every_s=_NUDGE_S)
        self._pages = ArenaPages(config.node_dir / ARENA_FILE)
        # Ray starts a shard anew that ends by a defect; it then adopts its arena.
        self._shard = Shard(
            name,
            ShardSettings.of(config, memory_claims()),
            self._announce,
            crashed=lambda: os._exit(1),
            ask=ActorCalls(),
        )
        signal.signal(signal.SIGTERM, self._terminate)
        if problem is None:
            self._shard.start()
        else:
            self._shard.refuse(problem)
        figures = ShardFigures(name, time.monotonic())
        self._metrics = MetricsThread(lambda now: figures.of(self._shard.status(), now))

    def status(self) -> dict[str, Any]:
        """See `Shard.status` and, for "memory", `ArenaPages.figures`."""
        return {
            **self._shard.status(),
            "memory": self._pages.figures(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
        }

    @ray.method(concurrency_group="health")
    def ping(self) -> None:
        """Answer, whatever else it is doing; a frozen actor does not."""

    def vintage(self) -> dict[str, Any]:
        """Return what it was made with, see `vintage`, and its state."""
        return {**self._vintage, "state": self._shard.status()["state"]}

    def admit(self, proof: str) -> None:
        """See `admin.check_proof`."""
        check_proof(self._config, proof)

    def clear(self, proof: str = "") -> int:
        """See `Shard.clear`; `proof` as for `admit`."""
        check_proof(self._config, proof)
        return self._shard.clear(_STOP_TIMEOUT_S)

    @ray.method(concurrency_group="people")
    def asked(self, replica: str | None, request_id: int | None, last: int) -> list[Asked]:
        """See `Shard.asked`."""
        return self._shard.asked(replica=replica, request_id=request_id, last=last)

    @ray.method(concurrency_group="people")
    def whereabouts(self, before: float | None, *keys: bytes) -> Whereabouts:
        """See `Inquiries.whereabouts`; the keys are end to end, `in_pieces`."""
        return self._shard.inquiries.whereabouts(b"".join(keys), before)

    @ray.method(concurrency_group="people")
    def prompt(
        self, replica: str, tokens: bytes, salt: str | int | None, lora: str | None
    ) -> Prompt:
        """See `Inquiries.prompt`."""
        return self._shard.inquiries.prompt(replica, tokens, salt=salt, lora=lora)

    @ray.method(concurrency_group="people")
    def contents(self, namespace: str | None, hottest: int) -> dict[str, Any]:
        """See `Inquiries.contents`."""
        return self._shard.inquiries.contents(namespace, hottest)

    @ray.method(concurrency_group="prefetch")
    def prefetch(
        self,
        replica: str,
        tokens: bytes,
        salt: str | int | None = None,
        lora: str | None = None,
        media: Sequence[tuple[int, bytes]] = (),
    ) -> dict[str, Any]:
        """See `Shard.prefetch`."""
        return self._shard.prefetch(replica, tokens, salt=salt, lora=lora, media=media)

    @ray.method(concurrency_group="prefetch")
    def stage(self, replica: str, rank: int, keys: bytes, wait_s: float) -> dict[str, Any]:
        """See `Shard.stage`."""
        return self._shard.stage(replica, rank, keys, wait_s)

    @ray.method(concurrency_group="ranks")
    def stage_ranks(
        self,
        replica: str,
        ranks: Sequence[int],
        wait_s: float,
        tokens_per_s: float,
        verify_from: int | None,
        *keys: bytes,
    ) -> dict[str, Any]:
        """See `Shard.stage_ranks`; the keys are end to end, `in_pieces`."""
        return self._shard.stage_ranks(replica, ranks, wait_s, tokens_per_s, verify_from, *keys)

    @ray.method(concurrency_group="disk")
    def promote(self, *order: Any) -> int:
        """See `Shard.promote`; an order that is `packed`, or itself."""
        return self._shard.promote(unpacked(*order))

    @ray.method(concurrency_group="leases")
    def lease_ranks(
        self, replica: str, ranks: Sequence[int], token: str, *keys: bytes
    ) -> dict[int, list[Any]]:
        """See `Shard.lease_ranks`; the keys are end to end, `in_pieces`."""
        return self._shard.lease_ranks(replica, ranks, token, *keys)

    @ray.method(concurrency_group="leases")
    def release_ranks(self, token: str) -> None:
        """See `Shard.release_ranks`."""
        self._shard.release_ranks(token)

    def stop(self, retire: bool, flush: bool = False) -> None:
        """See `Shard.stop`."""
        self._shard.stop(retire=retire, timeout_s=_STOP_TIMEOUT_S, flush=flush)
        self._metrics.stop()

    def _terminate(self, number: int, frame: Any) -> None:
        """Answer SIGTERM: what is not on disk is written there before this process ends."""

        def end() -> None:
            with contextlib.suppress(KVRayError):
                self._shard.stop(retire=False, timeout_s=_STOP_TIMEOUT_S, flush=True)
            os._exit(1)  # to Ray this was no orderly end: it starts the shard anew if it goes on

        # Ray's own thread, in which signals are handled, must not be kept.
        threading.Thread(target=end, name="kvray-end", daemon=True).start()

    def _announce(self, announcement: Announcement) -> Answer:
        self._nudge.give(time.monotonic())
        try:
            if self._lookup is None:
                self._lookup = get_actor(LOOKUP_NAME)
            answer: Answer = call(
                self._lookup.announce, announcement, timeout_s=_ANNOUNCE_TIMEOUT_S
            )
        except KVRayError:
            self._lookup = None  # it may have been made anew, under the same name
            raise
        return answer

    def __repr__(self) -> str:
        return f"Shard({self._name.removeprefix(SHARD_PREFIX)})"


def memory_claims() -> MemoryClaims:
    """Return what the Ray of this actor's node takes of its memory, beside what is in use now."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes()}  # type: ignore[no-untyped-call]
    store = nodes[node_id]["Resources"].get("object_store_memory", 0)
    # Of a node that joined just now Ray may not know yet what is available.
    available = available_resources_per_node()  # type: ignore[no-untyped-call]
    left = available.get(node_id, {"object_store_memory": store})
    return MemoryClaims(
        object_store_bytes=int(left.get("object_store_memory", 0)),  # 0 is left out
        threshold=ray_memory_threshold(),
    )


def create_shard(node_id: str, config: KVRayConfig) -> Any:
    """Return the shard's actor on a node, started if it is not there."""
    name = shard_name(node_id)
    return create_actor(
        ShardActor, name, name, config, node_id=node_id, groups=_GROUPS, max_concurrency=4
    )
