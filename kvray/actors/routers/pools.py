"""What the engines' own pools have of a prompt, where their KV events are heard."""

import logging
from collections.abc import Mapping
from typing import Any

from kvray.errors import ConfigError
from kvray.events.pool_content import TOKEN_BYTES, chain_digests
from kvray.events.pool_feed import IS_WHOLE
from kvray.events.subscriber import Source, Subscriber
from kvray.identity.keys import Tokens, pack_tokens
from kvray.routing import PoolMatch

_log = logging.getLogger("ray.serve")

EVENTS_STAT = "kv_event_metadata"
"""Under this name the `record_routing_stats` of a deployment tells where its events are published,
as Ray's own router expects it."""
_BLOCKS_MAX = 200_000  # of one engine


class Pools:
    """Follows the engines' publishers; for one event loop, with a thread that listens."""

    def __init__(self) -> None:
        """Follow nobody yet."""
        self._subscriber = Subscriber(blocks_max=_BLOCKS_MAX)
        self._told: dict[str, Any] = {}
        self._sources: dict[str, Source] = {}

    def follow(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """Follow the replicas that tell in their routing statistics where, and no others."""
        told = {name: one[EVENTS_STAT] for name, one in stats.items() if one.get(EVENTS_STAT)}
        if told != self._told:
            self._told = told
            sources = {name: _source(one) for name, one in told.items()}
            self._sources = {name: one for name, one in sources.items() if one is not None}
            self._subscriber.follow(self._sources)

    def match(
        self, tokens: Tokens, *, salt: str | int | None = None, lora: str | None = None
    ) -> dict[str, PoolMatch]:
        """Return what the pools have of a prompt, for each replica whose events are heard.

        What a salted prompt finds may be too little, as not all engines tell salts. Adapters have
        other names in engines than here, so nothing is known of their prompts.
        """
        if not self._sources or lora is not None or isinstance(salt, int):
            return {}
        try:
            packed = pack_tokens(tokens).tobytes()
        except ConfigError:
            return {}
        found = {name: self._subscriber.content(name) for name in self._sources}
        contents = {name: one for name, one in found.items() if one is not None}
        sizes = frozenset[int]().union(*(one.block_sizes for one in contents.values()))
        heads = {
            size: chain_digests(packed[: size * TOKEN_BYTES], block_size=size, salt=salt)
            for size in sizes
        }
        # Most pools have not even a prompt's first block: the rest is computed for the others.
        near = {name: one for name, one in contents.items() if one.num_tokens(heads)}
        sizes = frozenset[int]().union(*(one.block_sizes for one in near.values()))
        whole = {size: chain_digests(packed, block_size=size, salt=salt) for size in sizes}
        return {
            name: PoolMatch(
                num_tokens=one.num_tokens(whole) if name in near else 0,
                is_sure=one.is_whole and salt is None and self._told[name].get(IS_WHOLE, True),
            )
            for name, one in contents.items()
        }

    def totals(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Return counts of batches and gaps as the export takes them."""
        counts = self._subscriber.totals()
        return {("pool_event_batches_total", (name,)): n for name, n in counts.items()}

    def close(self) -> None:
        """Follow nobody any more."""
        self._subscriber.close()


def _source(told: Any) -> Source | None:
    try:
        replay = told.get("replay_endpoint")
        return Source(
            endpoint=str(told["endpoint"]),
            replay_endpoint=None if replay is None else str(replay),
            topic=str(told.get("topic", "")),
        )
    except (TypeError, KeyError, AttributeError):
        _log.warning("A replica tells of its KV events in a form that is not read: %.200r", told)
        return None
