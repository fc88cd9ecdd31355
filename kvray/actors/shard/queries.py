"""The queries of people to a shard: requests, blocks and contents; none of them is urgent."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvray.actors.shard.loop_thread import ANSWER_S
from kvray.actors.shard.prompt_keys import prompt_keys
from kvray.actors.shard.serving import ShardParts
from kvray.actors.staging.wire_values import keys_of
from kvray.errors import ConfigError
from kvray.identity.block import Namespace, namespace_id
from kvray.store.arena import key_index, lease, quotas
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables
from kvray.store.hot_prefixes import hot_prefixes
from kvray.store.sizing import Plan
from kvray.trace.request_note import RequestNote, unpack

KEYS_MAX = 2**17  # blocks of a prompt that one question may be about
_HOTTEST_MAX = 1000
_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, as its engine noted it."""

    replica: str
    rank: int
    note: RequestNote
    namespace: Namespace | None  # of the replica; None if the shard has forgotten it
    is_leaving: bool = False
    """Whether its node is to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The places and the history of some blocks; one row a block."""

    host: Array  # how many of its parts are in memory, i8
    either: Array  # how many are in memory or on disk, i8
    left_at: Array
    """When it last left a tier, in seconds since the epoch, f8; 0: not remembered."""
    left_tier: Array  # an index into `block_history.TIERS`
    left_by: Array  # an index into `block_history.CAUSES`
    since: float  # the start of the shard's memory of removed blocks
    is_leaving: bool = False
    """Whether the node is to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as a replica's engine sees it."""

    keys: bytes  # of its full blocks, end to end
    namespace: Namespace


class Queries:
    """Answers for one shard, from any thread."""

    def __init__(self, parts: ShardParts) -> None:
        self._parts = parts

    def asked(self, replica: str | None, request_id: int | None, last: int) -> list[Asked]:
        """Return the requests that `RequestLog.find` finds for these arguments."""
        find = partial(self._parts.request_log.find, replica, request_id, last)
        return [
            Asked(
                replica=name,
                rank=rank,
                note=unpack(packed),
                namespace=self._parts.replicas.namespace_of(name, rank),
                is_leaving=self._parts.announcer.is_leaving,
            )
            for name, rank, packed in self._parts.loop.call(find, ANSWER_S)
        ]

    def whereabouts(self, keys: bytes, before: float | None) -> Whereabouts:
        """Return where blocks are, and when they left; only removals `before` count, if given."""
        serving = self._parts.serving()
        owner, nvme = serving.owner, serving.nvme
        packed = key_index.pack_keys(keys_of(keys, keys_max=KEYS_MAX))
        gone = owner.history.of(packed[:, 0], before=before)
        tiers = [owner.arena.tables, *([] if nvme is None else [nvme.store.tables])]
        return Whereabouts(
            host=_num_parts(tiers[:1], packed),
            either=_num_parts(tiers, packed),
            left_at=gone["at"],
            left_tier=gone["tier"],
            left_by=gone["cause"],
            since=owner.history.since,
            is_leaving=self._parts.announcer.is_leaving,
        )

    def prompt(
        self, replica: str, tokens: bytes, *, salt: str | int | None, lora: str | None
    ) -> Prompt:
        """Return the keys that a prompt would have in a replica that is registered here.

        ConfigError: it is not, or a value cannot be used.
        """
        _, reader = self._parts.first_reader(replica)
        keys = prompt_keys(reader, tokens, salt=salt, lora=lora, tenants=self._parts.tenants)
        if len(keys) > KEYS_MAX:
            raise ConfigError(f"A prompt of {len(keys)} blocks is too long; at most {KEYS_MAX}.")
        return Prompt(keys=b"".join(keys), namespace=reader.namespace)

    def sizing_plan(self) -> Plan:
        """Return what a curve of this node's prompts is drawn from at this moment."""
        return self._parts.loop.call(self._parts.traffic.plan, ANSWER_S)

    def contents(self, namespace: str | None, hottest: int) -> dict[str, Any]:
        """Return the sizes of each namespace in the tiers and, of one, its `hottest` prefixes.

        That one is named by the first 8 hex digits of its digest; None: no prefixes.
        """
        serving = self._parts.serving()
        tables, nvme = serving.owner.arena.tables, serving.nvme
        found: dict[int, dict[str, int]] = {}
        for tier, held in (("host", tables), ("nvme", nvme.store.tables if nvme else None)):
            for number, (blocks, size) in quotas.used(held).items() if held is not None else ():
                one = found.setdefault(number, {})
                one[f"{tier}_blocks"], one[f"{tier}_bytes"] = blocks, size
        prefixes: list[dict[str, Any]] = []
        if namespace is not None:
            prefixes = hot_prefixes(
                tables,
                serving.retention.uses,
                namespace=_number(namespace),
                most=min(hottest, _HOTTEST_MAX),
                now=time.monotonic(),
            )
        return {
            "namespaces": {quotas.name_of(number): one for number, one in found.items()},
            "prefixes": prefixes,
        }


def _num_parts(tiers: Sequence[Tables], packed: Array) -> Array:
    counts = np.zeros(len(packed), dtype=np.int64)
    known = [np.unique(tables.slot_part[tables.slots_in(READY)]) for tables in tiers]
    for part in np.unique(np.concatenate(known)).tolist():
        there = np.zeros(len(packed), dtype=bool)
        for tables in tiers:
            there |= lease.present(tables, packed, part)
        counts += there
    return counts


def _number(namespace: str) -> int:
    """Return the arena's number of a namespace, from the first digits of its digest."""
    try:
        digest = bytes.fromhex(namespace)
    except ValueError:
        digest = b""
    if len(namespace) != _DIGITS or not digest:
        raise ConfigError(f"A namespace is named by {_DIGITS} hex digits, not {namespace!r:.40}.")
    return namespace_id(digest)
