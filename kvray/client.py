"""The Python API over Ray, for command lines, ingresses and users; engines never use it."""

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ray

from kvray.actors import explain
from kvray.actors.lookup.delta import partition_of
from kvray.actors.names import LOOKUP_NAME, SUPERVISOR_NAME, lookup_name
from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.ray_glue.calls import all_of, ask_all, call, get_actor, tier_named
from kvray.actors.tier import connection, tier
from kvray.config import KVRayConfig, load_config
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.identity.keys import MediaItem, Tokens, pack_tokens
from kvray.index import Match
from kvray.trace.arrival import Source
from kvray.trace.spans import span, traceparent

_CONNECTING = threading.RLock()
"""A process has one connection to Ray, whichever thread makes it."""


def _renew_lock() -> None:
    """Have a lock of its own after a fork: the thread that may hold the parent's is not here."""
    global _CONNECTING
    _CONNECTING = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """The result of a prefetch for a replica."""

    num_tokens: int
    """Leading tokens whose blocks are on every node of the replica."""
    staged_tokens: int
    """Tokens among them that this prefetch brought."""
    reason: str
    """Why no more tokens are ready; `none` if all are."""
    sources: tuple[tuple[int, Source], ...] = ()
    """(stop, source): where the tokens up to `stop` were before, `host`, `disk` or `remote`; of a
    replica on several nodes as one of them saw it."""


class Client:
    """A connection to the tier of a Ray cluster.

    Uses the Ray connection of this process if there is one, else makes one of its own and ends it
    with `close`.
    """

    def __init__(self, config: KVRayConfig | None = None) -> None:
        """Connect to the cluster of `config` (None: the configuration that `load_config` finds).

        Raises:
            ShardUnavailable: no cluster answers.
        """
        config = config or load_config()
        self._config = config
        self.cluster_name = config.cluster_name
        self._timeout_s = config.ray.timeout_s
        self._pid = os.getpid()
        with _CONNECTING:
            self._owns_connection = not ray.is_initialized()
            if self._owns_connection:
                connection.connect_configured(config)

    def status(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return what shards and lookup say of themselves.

        Args:
            timeout_s: how long each question may take; None: `ray.timeout_s`.

        Raises:
            ShardUnavailable: no tier runs there.
        """
        with self._tier():
            return tier.status(timeout_s=self._timeout_s if timeout_s is None else timeout_s)

    def hosts(self) -> dict[str, dict[str, str]]:
        """Return node -> name and ip of its host, of the nodes with shards, as far as Ray says.

        Raises:
            ShardUnavailable: no tier runs there.
        """
        with self._tier():
            return tier.hosts(timeout_s=self._timeout_s)

    def sizing(self, *, now: bool = False) -> dict[str, Any]:
        """Return what more or less memory would be worth to the prompts that come.

        docs/sizing.md has its keys.

        Args:
            now: draw the curves here from the samples of this moment, for some seconds a node,
                instead of taking the shards' last ones.

        Raises:
            ShardUnavailable: no tier runs there.
        """
        with self._tier():
            return tier.sizing(timeout_s=self._timeout_s, now=now)

    def match(self, keys: Sequence[BlockKey], *, num_parts: int = 1) -> Match:
        """Return the longest run of leading `keys` that shards hold, and which shards.

        Args:
            keys: of a prompt's blocks, from its first one on.
            num_parts: parts of a block.

        Raises:
            ConfigError: `keys` are no keys, or no block has that many parts.
            ShardUnavailable: the lookup did not answer.
        """
        for key in keys:
            if type(key) is not bytes or len(key) != KEY_BYTES:
                raise ConfigError(
                    f"A key is {KEY_BYTES} bytes, as chain_keys makes them, not {key!r:.40}."
                )
        pieces = in_pieces(b"".join(keys))
        with self._tier():
            config = call(get_actor(SUPERVISOR_NAME).config, timeout_s=self._timeout_s)
            partition = partition_of(keys[0], config.lookup.partitions) if keys else 0
            lookup = get_actor(lookup_name(partition))
            match: Match = call(lookup.match, num_parts, *pieces, timeout_s=self._timeout_s)
        return match

    def prefetch(
        self,
        tokens: Tokens,
        *,
        replica: str,
        salt: str | int | None = None,
        lora: str | None = None,
        media: Sequence[MediaItem] = (),
    ) -> Prefetched:
        """Bring a prompt's blocks to the nodes of a replica, before its engine sees the request.

        What is brought is kept for `staging.handover_s`, and after that as any block is. The engine
        waits for nothing: this is the best way to use what other nodes have.

        Args:
            tokens: the prompt's token ids.
            replica: name of the replica, which has registered.
            salt: the request's cache salt.
            lora: path of the request's LoRA adapter, as the engine is given it.
            media: the request's images, videos and sounds.

        Raises:
            ConfigError: `tokens` are none, or no such replica has registered.
            ShardUnavailable: the lookup or a shard did not answer, or the replica still reads its
                checkpoint.
        """
        packed = pack_tokens(tokens).tobytes()
        prompt = replica, packed, salt, lora, [(item.position, item.digest) for item in media]
        with self._tier(), span("prefetch", {"kvray.replica": replica}) as made:
            lookup = get_actor(LOOKUP_NAME)
            shards = set(call(lookup.replica, replica, timeout_s=self._timeout_s).values())
            if not shards:
                raise ConfigError(
                    f"No replica {replica!r:.80} has registered; `kvray ls` shows those that have."
                )
            methods = {shard: get_actor(shard).prefetch for shard in shards}
            answers = all_of(ask_all(methods, self._timeout_s, *prompt, traceparent()))
            last = min(answers, key=lambda answer: answer["num_tokens"])
            staged_tokens = max(answer["staged_tokens"] for answer in answers)
            made.set_attributes(
                {
                    "kvray.tokens.ready": last["num_tokens"],
                    "kvray.tokens.staged": staged_tokens,
                    "kvray.miss.reason": last["reason"],
                }
            )
        return Prefetched(
            num_tokens=last["num_tokens"],
            staged_tokens=staged_tokens,
            reason=last["reason"],
            sources=tuple((stop, source) for stop, source in last.get("sources", ())),
        )

    def set_weights_version(self, replica: str, version: str | int | None) -> list[int]:
        """Name the weights that a running engine has now, before it answers with them.

        Blocks of one version never answer for another. Call it with None before the weights are
        replaced: the engine leaves the tier. Call it with the new version when they are loaded, the
        engine's own prefix cache is reset, and no earlier request runs any more: it returns. One
        client at a time should do so.

        Args:
            replica: name of the replica, which has registered.
            version: what equal weights are called on all replicas; None: they are being replaced.

        Returns:
            The replica's ranks, all of which go by it now.

        Raises:
            ConfigError: no engine of that name is connected, the version is empty or too long, or
                the tier asks for a token that the configuration does not name.
            ShardUnavailable: the lookup, a shard or a rank did not answer. Some of the ranks may go
                by the version; call again.
        """
        with self._tier():
            return tier.set_weights_version(
                replica, version, config=self._config, timeout_s=self._timeout_s
            )

    def explain(
        self, request_id: int | str | None = None, *, replica: str | None = None, last: int = 1
    ) -> dict[str, Any]:
        """Return what came of requests, and why they hit or missed, as docs/explain.md says.

        Args:
            request_id: the engine's number of the request, or its `x-request-id` where the engine's
                server keeps that; None: the latest.
            replica: whose; None: of any.
            last: how many requests at most, the latest first.

        Raises:
            ConfigError: no such request is known.
            ShardUnavailable: no tier runs there.
        """
        with self._tier():
            return explain.explain_requests(
                replica=replica, request=request_id, last=last, timeout_s=self._timeout_s
            )

    def explain_tokens(
        self,
        tokens: Tokens,
        *,
        replica: str | None = None,
        salt: str | int | None = None,
        lora: str | None = None,
    ) -> dict[str, Any]:
        """Return the part of a prompt that is stored now, and the history of the rest.

        Args:
            tokens: the prompt's token ids.
            replica: in whose namespace; None: in that of each replica that is there.
            salt: the request's cache salt.
            lora: path of the request's LoRA adapter, as the nodes have it.

        Raises:
            ConfigError: a value cannot be used, or no such replica has registered.
            ShardUnavailable: no tier runs there, or a shard did not answer.
        """
        packed = pack_tokens(tokens).tobytes()
        with self._tier():
            return explain.explain_prompt(
                packed, replica=replica, salt=salt, lora=lora, timeout_s=self._timeout_s
            )

    def contents(self, namespace: str | None = None, *, hottest: int = 20) -> dict[str, Any]:
        """Return what each shard has of each namespace, and the prefixes of one used most.

        Args:
            namespace: the first 8 hex digits of its digest; None: no prefixes.
            hottest: how many prefixes at most of each shard.

        Raises:
            ConfigError: `namespace` is no such name.
            ShardUnavailable: no tier runs there.
        """
        with self._tier():
            return tier.contents(namespace, hottest, timeout_s=self._timeout_s)

    def clear(self) -> int:
        """Evict every block that nobody leases, on every node; return how many.

        Raises:
            ConfigError: the tier asks for a token that the configuration does not name.
            ShardUnavailable: no tier runs there, or a shard did not answer.
        """
        with self._tier():
            return tier.clear(timeout_s=self._timeout_s, config=self._config)

    def drain(self, node: str, *, seconds: float | None = None) -> str:
        """Have what only a node has go to others, as it is to be taken away; return its shard.

        It goes on in the background, and until `call_off_drain` the node gets nothing for later;
        `status` has a shard's progress in `drain`.

        Args:
            node: its host's name or IP, the beginning of its id, or the name of its shard.
            seconds: how long blocks may go; None: as long as it takes.

        Raises:
            ConfigError: no node, or several, are named so, or the tier asks for a token that the
                configuration does not name.
            ShardUnavailable: no tier runs there, or the shard did not answer.
        """
        with self._tier():
            return tier.order_drain(
                node, "drain", seconds, config=self._config, timeout_s=self._timeout_s
            )

    def call_off_drain(self, node: str) -> str:
        """Have a node stay that `drain` was to take; arguments and errors as there."""
        with self._tier():
            return tier.order_drain(
                node, "call_off_drain", config=self._config, timeout_s=self._timeout_s
            )

    def close(self) -> None:
        """End the Ray connection if this client made it. Twice is fine."""
        if self._owns_connection and os.getpid() == self._pid:
            with _CONNECTING:
                connection.disconnect()
        self._owns_connection = False

    def _tier(self) -> AbstractContextManager[None]:
        """Mean this tier in a block; without a connection Ray would start a cluster of its own."""
        if os.getpid() != self._pid or not ray.is_initialized():
            raise ShardUnavailable(
                "This client has no connection to Ray: it was closed, or Ray was shut down, or this"
                " process is a fork of the one that made it; make a Client in this process, and"
                " start processes by spawn."
            )
        return tier_named(self.cluster_name)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
