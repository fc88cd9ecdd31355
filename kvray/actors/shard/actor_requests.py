"""What other actors and people ask a serving shard.

Actors ask for blocks: of a prompt, for ranks, from disk. People ask about requests, blocks and
contents, and wait longer. A prompt that no engine has seen gets the keys that its engine will give
it.

`actor.py` lists all of these calls, each with the threads that it runs in.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvray.actors.lookup.delta import Delta, Poll
from kvray.actors.ray_glue.arguments import unpacked
from kvray.actors.shard.loop_thread import ANSWER_S
from kvray.actors.shard.serving import Serving, ShardParts
from kvray.actors.staging.replicas import Reader, keys_of
from kvray.config import cache_dir
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.block import UNNAMED, BlockKey, Namespace, frame, namespace_id
from kvray.identity.fingerprint import fingerprint_model
from kvray.identity.keys import MediaItem, chain_keys, request_seed
from kvray.identity.tenant import TenantSalts
from kvray.index import PARTS_MAX
from kvray.routing import Profile
from kvray.store.arena import key_index, lease, quotas, slabs
from kvray.store.arena.layout import READY
from kvray.store.arena.tables import Array, Tables
from kvray.store.retention import hot_prefixes
from kvray.store.sizing import Plan
from kvray.trace.arrival import runs_between, source_of
from kvray.trace.request_note import RequestNote, unpack
from kvray.trace.spans import span, under

T = TypeVar("T")


KEYS_MAX = 2**17  # blocks of a prompt that one question may be about
_HOTTEST_MAX = 1000
_DIGITS = 8
_UNUSED = "kvray's supervisor"
_LOOK_S = 0.2
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request, as its engine noted it."""

    replica: str
    rank: int
    note: RequestNote
    namespace: Namespace | None  # of the replica; None if the shard has forgotten it
    is_leaving: bool = False
    """Whether its node is being drained."""


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
    """Whether the node is being drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as a replica's engine sees it."""

    keys: bytes  # of its full blocks, end to end
    namespace: Namespace


def _on_loop(find: Callable[[Serving], Callable[..., T]]) -> Callable[..., T]:
    """Return a method that calls what `find` finds in a serving shard, with its own arguments."""

    def method(self: "ActorRequests", *args: Any) -> T:
        called = find(self._parts.serving())
        return self._parts.loop.call(lambda: called(*args), ANSWER_S)

    return method


class ActorRequests:
    """Answers from any thread; what belongs to the event loop, the loop is asked for."""

    drain = _on_loop(lambda serving: serving.drain.order)
    call_off_drain = _on_loop(lambda serving: serving.drain.call_off)
    lease_ranks = _on_loop(lambda serving: serving.stager.leases.lease)
    release_ranks = _on_loop(lambda serving: serving.stager.leases.release)

    def __init__(self, parts: ShardParts) -> None:
        self._parts = parts

    def delta(self, poll: Poll) -> Delta:
        """See `Announcer.delta`; ShardUnavailable while the shard does not serve."""
        self._parts.serving()
        heartbeat_s = self._parts.settings.shard.heartbeat_s
        return self._parts.loop.wait(
            self._parts.announcer.delta(poll, heartbeat_s),
            max(heartbeat_s, poll.pace_s) + ANSWER_S,
        )

    def prefetch(
        self,
        replica: str,
        tokens: bytes,
        salt: str | int | None = None,
        lora: str | None = None,
        media: Sequence[tuple[int, bytes]] = (),
        trace: str = "",
    ) -> dict[str, Any]:
        """Bring a prompt's blocks here for a replica before its engine sees the request.

        Salt, lora and media are as for `prompt_keys`; spans are below `trace`. Returns num_tokens
        and num_blocks that lead and are here now for all ranks, staged_tokens that were not here
        before, sources, [stop, source] each, of the tokens up to there, and the reason why it is
        not more.
        ConfigError: no rank of `replica` has registered here.
        """
        rank, reader = self._parts.first_reader(replica)
        tenants = self._parts.tenants
        keys = prompt_keys(reader, tokens, salt=salt, lora=lora, media=media, tenants=tenants)
        if not keys:
            nothing = {"num_tokens": 0, "staged_tokens": 0, "num_blocks": 0}
            return {**nothing, "sources": [], "reason": "none"}
        size = reader.namespace.tokens_per_block
        with under(trace):
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

    def profile(self, replica: str) -> Profile:
        """Return what a router has to know of a replica that is registered here.

        ShardUnavailable: nobody can make the keys of its prompts yet. ConfigError: no rank of
        `replica` has registered here.
        """
        rank, reader = self._parts.first_reader(replica)
        check_named(reader)
        stager = self._parts.serving().stager
        num = self._parts.settings.lookup_partitions
        return self._parts.loop.call(lambda: stager.profile(replica, rank, num), ANSWER_S)

    def promote(self, trace: str, *packed_order: Any) -> int:
        """Bring blocks from disk into its memory for another shard; return how many.

        The `FetchOrder` is `packed`, or itself.
        """
        nvme, order = self._parts.serving().nvme, unpacked(*packed_order)
        if nvme is None:
            return 0
        with under(trace), span("promote", {"kvray.shard": self._parts.name}) as made:
            report = self._parts.loop.wait(nvme.reads.promote(order), order.deadline_s + ANSWER_S)
            num_blocks = sum(source.num_blocks for source in report.sources.values())
            made.set_attribute("kvray.blocks", num_blocks)
        return num_blocks

    def room(self) -> int:
        """Return how many bytes of its arena are free."""
        tables = self._parts.serving().owner.arena.tables
        return slabs.free_bytes(tables)

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
        self, trace: str, replica: str, ranks: Sequence[int], wait_s: float, *request: Any
    ) -> dict[str, Any]:
        """See `ReplicaStager.stage_here`; the keys are end to end, `in_pieces`."""
        stager = self._parts.serving().stager
        about = {"kvray.shard": self._parts.name, "kvray.replica": replica}
        with under(trace), span("stage", about) as made:
            work = stager.stage_here(replica, ranks, wait_s, *request)
            staged = self._parts.loop.wait(work, wait_s + ANSWER_S)
            made.set_attribute("kvray.blocks", staged["num_blocks"])
            made.set_attribute("kvray.miss.reason", staged["reason"])
        return staged

    def asked(self, replica: str | None, request: int | str | None, last: int) -> list[Asked]:
        """Return the requests that `RequestLog.find` finds for these arguments."""
        find = partial(self._parts.request_log.find, replica, request, last)
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

    def whereabouts(self, before: float | None, *keys: bytes) -> Whereabouts:
        """Return where blocks are, and when they left; only removals `before` count, if given.

        The keys are end to end, `in_pieces`.
        """
        serving = self._parts.serving()
        owner, nvme = serving.owner, serving.nvme
        packed = key_index.pack_keys(keys_of(b"".join(keys), keys_max=KEYS_MAX))
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
        self, replica: str, tokens: bytes, salt: str | int | None, lora: str | None
    ) -> Prompt:
        """Return the keys that a prompt would have in a replica that is registered here.

        ConfigError: it is not, or a value cannot be used.
        """
        _, reader = self._parts.first_reader(replica)
        keys = prompt_keys(reader, tokens, salt=salt, lora=lora, tenants=self._parts.tenants)
        if len(keys) > KEYS_MAX:
            raise ConfigError(f"A prompt of {len(keys)} blocks is too long; at most {KEYS_MAX}.")
        return Prompt(keys=b"".join(keys), namespace=reader.namespace)

    def on_disk(self, parts: int, *keys: bytes) -> bytes:
        """Return one byte for each key: 1 if this node has all `parts` of it on its disk only.

        `parts` is a mask; the keys are end to end, `in_pieces`.
        """
        wanted = [part for part in range(PARTS_MAX) if parts >> part & 1]
        if not wanted or parts >> PARTS_MAX:
            raise ConfigError(f"{parts!r:.40} is no mask of parts.")
        serving = self._parts.serving()
        nvme, packed = serving.nvme, key_index.pack_keys(keys_of(b"".join(keys)))
        if nvme is None:
            return bytes(len(packed))
        disk, memory = (
            np.logical_and.reduce([lease.present(tables, packed, part) for part in wanted])
            for tables in (nvme.store.tables, serving.owner.arena.tables)
        )
        return bytes(disk & ~memory)

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


def prompt_keys(
    reader: Reader,
    tokens: bytes,
    *,
    salt: str | int | None = None,
    lora: str | None = None,
    media: Sequence[tuple[int, bytes]] = (),
    tenants: TenantSalts | None = None,
) -> list[BlockKey]:
    """Return the keys of a prompt's full blocks.

    Its engine computes the last token itself, so it has no use for a block that ends with it; but a
    prompt may be the beginning of others.

    Args:
        reader: a rank of the replica that the prompt is for.
        tokens: the prompt's token ids, little-endian int32 end to end.
        salt: the request's cache salt.
        lora: path of the request's adapter, as the engine is given it and as this node has it.
        media: position and digest of each `MediaItem`.
        tenants: derives salts with the secret of this node, if it has one.
    """
    check_named(reader)
    if len(tokens) % 4:
        raise ConfigError(f"{len(tokens)} bytes are no whole number of token ids of 4 bytes.")
    salt = salt if reader.tenants is None else _of_tenant(reader.tenants, salt, tenants)
    adapter = None if lora is None else _adapter(reader, lora)
    return chain_keys(
        np.frombuffer(tokens, dtype="<i4"),
        tokens_per_block=reader.namespace.tokens_per_block,
        seed=request_seed(reader.namespace.digest(), salt=salt, lora=adapter),
        media=[MediaItem(position=position, digest=digest) for position, digest in media],
    )


def check_named(reader: Reader) -> None:
    """Raise ShardUnavailable while a replica's prompts have no keys."""
    if reader.namespace.model == UNNAMED:
        raise ShardUnavailable(
            "The replica uses no tier until its checkpoint is told from others, of which"
            " `kvray status` says how far it is, and its weights have a version. Try again then, or"
            " name them: by connector.model_key, by Client.set_weights_version."
        )


def _of_tenant(check: str, salt: str | int | None, tenants: TenantSalts | None) -> str:
    """Return the salt that the engine derives from a request's, with the secret behind `check`."""
    if tenants is None or tenants.check != check:
        raise ConfigError(
            "The replica keeps tenants apart with another secret than this shard has; give both"
            " the same file in security.tenant_secret_file."
        )
    derived = tenants.derive(salt)
    if derived is None:
        raise ConfigError(
            "The prompt names no tenant, so its blocks are nowhere; give the salt of its request,"
            " <tenant>/<salt>."
        )
    return derived.salt


def _adapter(reader: Reader, path: str) -> bytes:
    """Return what tells an adapter from others, as the engine's connector does."""
    if reader.adapters is None:
        raise ConfigError(
            "The replica has not said how it reads LoRA adapters; update its kvray, or prefetch"
            " prompts without an adapter."
        )
    found = fingerprint_model(path, cache_dir=cache_dir() / "fingerprints")
    return hashlib.sha256(frame(found.encode(), reader.adapters.encode())).digest()


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
