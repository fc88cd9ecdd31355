"""The state that the two halves of a connector share in one engine process, and its figures.

The engine builds both in the process of rank 0 from one object of arguments, and never introduces
them to each other. They meet here: the rank's half registers its pool, without which no namespace
is complete, and the leader's half keys requests with that namespace.

A namespace also needs the model's name, which may take minutes to find out, and the version of its
weights, which may change while the engine runs.

`Boundary` stops errors of the tier, and our own defects, so that the engine goes on without the
tier. An exception that leaves a connector's method ends its engine. So everything that may fail
without harm runs inside `Boundary.around`: all but what follows a promise.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from typing import Any

from kvray import node
from kvray.config import KVRayConfig
from kvray.engine.cache_layout import CacheLayout, EngineIdentity, Reading
from kvray.engine.engine_args import EngineArgs
from kvray.engine.meta import ConnectorMeta, Place, PrefixLease, Release
from kvray.engine.model_name import ModelName, fingerprints_dir
from kvray.engine.request import Identity, Prompt
from kvray.errors import ConfigError, KVRayError
from kvray.identity.tenant import TenantSalts
from kvray.node import EngineLog, NodeLink, Registration
from kvray.store import Arena, Lease, PartRequest
from kvray.store.machine.access import Access
from kvray.trace.reasons import DROP_PREFIX, DropReason

_log = logging.getLogger("kvray.connector")

_FIRST, _LAST = 15, 32
"""The first reported bucket ends at 2**15 ns (33 us), the last but one at 2**32 ns (4.3 s)."""
_SENTENCES = {
    DropReason.STORE_DOWN: "the tier is not there",
    DropReason.ARENA_BUSY: "the arena stayed locked",
    DropReason.NO_ROOM: "everything else in the arena is leased, or their parent block is missing",
    DropReason.TOO_MANY: "too many saves wait",
    DropReason.TOO_SLOW: "the copy took too long",
    DropReason.SHUT_DOWN: "the connector was shut down",
    DropReason.NO_PAGE: "the engine names no page for a block before them",
    DropReason.NO_POOL: "this rank does not have the pool that they were planned for",
    DropReason.VOID: "their pass did not get the blocks it was promised, so they may be wrong",
    DropReason.UNWRITTEN: "their request reuses tokens that a cancelled one may not have computed",
    DropReason.NEW_WEIGHTS: "they follow blocks of weights that were replaced",
    DropReason.NOT_SHOWN: "the engine asked without showing all of their request",
    DropReason.ERROR: "an error, which the log shows",
}
_CAUSES_MAX = 256
_NO_DIGITS = str.maketrans("", "", "0123456789")
_REST = 50
"""Times as long as a look at the arena takes is waited before the next one."""
_REST_MAX_S = 0.02
_NAME_WAIT_S = 1.0
"""How long the engine's start waits for the model's name; a known checkpoint takes no time."""


class TimeHistogram:
    """What one kind of call took, in buckets that end at powers of two; one thread observes."""

    __slots__ = ("_buckets", "_sum_ns")

    def __init__(self) -> None:
        self._buckets = [0] * 64
        self._sum_ns = 0

    def observe(self, nanoseconds: int) -> None:
        """Count one call, which took less than 2**63."""
        self._buckets[nanoseconds.bit_length()] += 1
        self._sum_ns += nanoseconds

    def counters(self, name: str) -> dict[str, int]:
        """Return `<name>_us_sum`, and `<name>_ns_below_<bound>` (or `inf`) of buckets with any."""
        counts: Counter[str] = Counter()
        for bits, count in enumerate(list(self._buckets)):
            if count:
                bound = str(2 ** max(bits, _FIRST)) if bits <= _LAST else "inf"
                counts[f"{name}_ns_below_{bound}"] += count
        return {**counts, f"{name}_us_sum": round(self._sum_ns / 1000)} if counts else {}


class EngineFigures:
    """What one engine counts and measures of itself, both halves together."""

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.lease_times = TimeHistogram()  # of a prefix, in the node's arena
        self.stage_times = TimeHistogram()  # waits for the shard
        self.match_times = TimeHistogram()  # the scheduler's half, for each query
        self.plan_times = TimeHistogram()  # the scheduler's half, for each pass
        self.log = EngineLog()
        self._began_at = time.monotonic()
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def told(self, asked: Prompt | str) -> Prompt | None:
        """Return a prompt; of a request without keys log why it has none, once for each reason."""
        if isinstance(asked, Prompt):
            return asked
        if asked not in self._logged and len(self._logged) < _CAUSES_MAX:
            self._logged.add(asked)
            _log.warning("kvray: a request goes without the tier: %s (said once)", asked)
        return None

    def drop(self, num_blocks: int, reason: DropReason) -> None:
        """Count blocks that are not saved, and log the first loss for each reason; any thread may.

        Each rank counts the blocks of its own parts; the leader alone counts blocks that are never
        planned.
        """
        if num_blocks <= 0:
            return
        with self._lock:
            self.totals["dropped_blocks"] += num_blocks
            self.totals[f"{DROP_PREFIX}{reason.value}"] += num_blocks
            is_new = reason not in self._logged
            self._logged.add(reason)
        if is_new:
            _log.warning(
                "kvray: %d blocks and everything after them in their prompts were not saved: %s"
                " (said once)",
                num_blocks,
                _SENTENCES[reason],
            )

    def counters(self) -> dict[str, int]:
        """Return what is reported to the shard: totals, how long calls took, and since when."""
        return {
            **self.totals,
            **self.lease_times.counters("lease"),
            **self.stage_times.counters("stage"),
            **self.match_times.counters("match"),
            **self.plan_times.counters("plan"),
            "uptime_s": int(time.monotonic() - self._began_at),
        }


class Boundary:
    """Counts what it stops in `errors`, and logs each cause once; one for each engine."""

    def __init__(self, totals: Counter[str]) -> None:
        self._totals = totals
        self._logged: set[str] = set()

    def around(self, what: str) -> "_Guard":
        """Return a context that stops any exception; the log says that `what` is lost."""
        return _Guard(self, what)

    def stop(self, what: str, error: BaseException) -> None:
        """Count `error`, and log it if its like was not logged before."""
        self._totals["errors"] += 1
        # Digits differ from request to request.
        cause = f"{what} {type(error).__name__} {error}".translate(_NO_DIGITS)
        if cause in self._logged or len(self._logged) >= _CAUSES_MAX:
            return
        self._logged.add(cause)
        if isinstance(error, KVRayError):
            _log.warning("kvray: %s goes without the tier: %s (said once)", what, error)
        else:
            _log.error(
                "kvray: a defect; %s goes without the tier (said once)", what, exc_info=error
            )


class _Guard:
    """A class, as it is entered for each request: a generator costs twice as much."""

    def __init__(self, boundary: Boundary, what: str) -> None:
        self._boundary = boundary
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._boundary.stop(self._what, error)
        return True


class PendingReads:
    """Counts the saves that still read each request's blocks; `in` takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[int] = Counter()

    def begin(self, request_id: int) -> None:
        """Note that a save begins to read."""
        with self._lock:
            self._counts[request_id] += 1

    def end(self, request_id: int) -> None:
        """Note that a save has read all it will."""
        with self._lock:
            self._counts[request_id] -= 1
            if self._counts[request_id] <= 0:
                del self._counts[request_id]

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._counts


class SharedState:
    """Of one engine in this process; `shared_state_for` returns it.

    The engine's executor thread calls both halves, one after the other. Between them cross the
    registered pool, and which pages saves still read (`pending_reads`, which the saver's thread
    writes too). The link's thread names weights.
    """

    def __init__(
        self,
        args: EngineArgs,
        config: KVRayConfig,
        link: NodeLink,
        tenants: TenantSalts | None = None,
    ) -> None:
        connector = config.connector
        self.args = args
        self.config = config
        self.link = link
        self.figures = EngineFigures()
        self.boundary = Boundary(self.figures.totals)
        self.tenants = tenants
        self.pending_reads = PendingReads()
        self.spans_nodes = args.is_spread
        """Whether ranks that each hold a share of a request's KV are on several nodes."""
        self.num_passes = 0
        """Passes that this process's rank has run with the pool; the engine's thread counts."""
        self.to_release: list[Release] = []
        """Leases of ranks on other nodes; the next pass has those ranks end them."""
        self.rank = args.rank  # as the shard knows it
        self.model_name = ModelName(args.model, connector.model_key, cache_dir=fingerprints_dir())
        version = connector.weights_version
        if version is None and not args.weights_may_change:
            version = ""  # the checkpoint's own
        self.weights: tuple[int, str | None] = (0, version)
        """How often their version has changed, and what it is now. Without one nothing is promised
        or saved: nobody knows whose keys it would have. Any thread replaces it, whole."""
        if version is None:
            _log.warning(
                "kvray: the engine is set up to have its weights replaced while it runs; it goes"
                " without the tier until their version is named, by connector.weights_version or"
                " Client.set_weights_version."
            )
        self.identity = EngineIdentity(weights=self.weights)
        """As it was when the engine's thread last looked for new names."""
        self._naming = threading.Lock()
        self._replica = connector.replica or link.process_name
        self._registration: Registration | None = None
        self._seen: set[int] = set()  # numbers of namespaces that the arena had slots of
        self._look_at = 0.0

    # -- the pool that is registered ----------------------------------------------------------

    @property
    def replica(self) -> str:
        """The replica's name: the shard gives another one if it is taken on this node."""
        return self._replica if self._registration is None else self._registration.replica

    def register(self, layout: CacheLayout) -> None:
        """Register this rank with the shard, and complete the namespace if the model has a name.

        ConfigError: the model cannot be told from others. LayoutMismatch: another replica claims
        the same `model_key` with another layout.
        """
        identity, rank = EngineIdentity.of(self.args, layout), self.args.part_rank
        parts, num_ranks = identity.own.part_requests[rank], self.args.num_parts_ranks
        self._register(identity, parts, rank=self.args.rank, num_ranks=num_ranks)

    def lead(self, identity: EngineIdentity) -> None:
        """Take what a rank has registered, and register a leader without a pool.

        It reads what all its ranks read, which are on this node, and has the number after theirs.
        Raises as `register`.
        """
        every = {one.part: one for parts in identity.own.part_requests for one in parts}
        parts = [every[part] for part in sorted(every)]
        self._register(identity, parts, rank=self.args.num_ranks, num_ranks=1)

    def _register(
        self, identity: EngineIdentity, parts: list[PartRequest], *, rank: int, num_ranks: int
    ) -> None:
        named = identity.named(self.model_name.find(_NAME_WAIT_S), self.weights)
        self.unregister()  # the shard knows one layout of a rank
        registration = Registration(
            replica=self.replica,
            rank=rank,
            namespace=named.own.namespace,
            counters=lambda: {**self.figures.counters(), **self.model_name.counters()},
            log=self.figures.log,
            served=self.args.shown_name,
            part_requests=tuple(parts),
            num_ranks=num_ranks,
            engine_ranks=self.args.num_ranks,
            adapters=self.args.adapters,
            tenants=None if self.tenants is None else self.tenants.check,
            name_weights=self.name_weights,
        )
        self.link.register(registration)
        self._registration, self.rank, self.identity = registration, rank, named
        # The model or its weights may have got a name since `named` was made.
        self.complete_namespace()
        self._renew()

    def unregister(self) -> None:
        """Take this rank off the shard's list; nothing is promised in its name any more."""
        if self._registration is not None:
            self.link.unregister(self._registration)
            self._registration = None
            self.identity = EngineIdentity(weights=self.identity.weights)

    def complete_namespace(self) -> None:
        """Go by the names that the model and its weights have now.

        Only the engine's thread calls this, once a request or pass, so no two reads there differ.
        """
        identity, model, weights = self.identity, self.model_name.name, self.weights
        is_old = identity.model != model or identity.weights != weights
        if is_old and self._registration is not None:
            self.identity = identity.named(model, weights)
            self._renew()

    def name_weights(self, version: str | None) -> None:
        """Take `version` for that of the weights; the same one twice changes nothing.

        None: they are about to be replaced, or have just been. Any thread may call this. The
        engine's thread goes by it from its next request or pass on, the shard from the next report.
        """
        with self._naming:
            changes, before = self.weights
            self.weights = (changes + (version != before), version)
        if version is None and before is not None:
            _log.warning(
                "kvray: the engine's weights are replaced, or it has reset its caches as it does"
                " then; it goes without the tier until their version is named, see"
                " Client.set_weights_version."
            )
        elif version != before:
            _log.info("kvray: the engine's weights are of version %r", version)
        self._renew()

    def _renew(self) -> None:
        """Report the present names; the last of several threads reports the last names."""
        with self._naming:
            registration, readings = self._registration, self.identity.readings
            if registration is not None and readings:
                named = readings[0].named(self.model_name.name, self.weights[1])
                registration.namespace = named.namespace

    def may_load(self, meta: ConnectorMeta) -> bool:
        """Whether the leader's promises belong to this rank's pool.

        The leader may know the model's name before this rank does. This rank takes it from the
        leader for loads, as all ranks have one model, and saves nothing until it knows it itself.
        All ranks have the same weights as well, so their version is the leader's alone to know.
        """
        self.complete_namespace()
        identity = self.identity
        if identity.common or not identity.readings or not meta.model:
            return meta.namespace == identity.common
        return identity.own.named(meta.model).digest == meta.namespace

    def follow(self, replica: str) -> None:
        """Take the leader's name for the replica: the shard must know which ranks belong to it."""
        if replica != self.replica and self._registration is not None:
            self._replica = replica
            self._registration.rename(replica)

    # -- what a prompt may be answered with ---------------------------------------------------

    @property
    def may_stage(self) -> bool:
        """Whether the shard may be asked to stage blocks, from other nodes or from disk."""
        has_peers = self._registration is not None and self._registration.has_peers
        return bool(has_peers) and self.config.connector.stage_wait_s > 0

    @property
    def is_cut_off(self) -> bool:
        """Whether other nodes may have more, but the lookup is away."""
        return self._registration is not None and self._registration.has_peers is None

    @property
    def verifies_promises(self) -> bool:
        """Whether blocks are checked before they are promised; ranks check those that they hold."""
        return not self.args.holds_loads and self.verifies_loads

    @property
    def verifies_loads(self) -> bool:
        """Whether loaded blocks are checked: always, never, or because the pool is on the host."""
        mode = self.config.connector.verify_on_load
        return mode == "always" or (mode == "auto" and self.identity.is_host)

    def stored_by_others(self) -> list[Reading]:
        """Return what is read of blocks of engines with other numbers of ranks, if there are any.

        The shard reports those on all nodes. What is new in this node's arena is looked for as
        well, for so short a share of the time that no request feels it.
        """
        began, arena, registration = time.monotonic(), self.link.arena, self._registration
        if registration is None:
            return []
        known, others = registration.stored | self._seen, self.identity.readings[1:]
        unseen = [one.number for one in others if one.number not in known]
        if unseen and arena is not None and began >= self._look_at:
            found = set(compress(unseen, arena.has_slots_of(unseen)))
            self._seen |= found
            known |= found
            now = time.monotonic()
            self._look_at = now + min(_REST * (now - began), _REST_MAX_S)
        return [one for one in others if one.number in known]

    def under_tenant(self, identity: Identity) -> Identity | None:
        """Return it with its tenant's salt, where the cluster has tenants; None: it names none.

        Nobody could find what is stored under a salt that no other request has.
        """
        if self.tenants is None:
            return identity
        derived = self.tenants.derive(identity.salt)
        if derived is not None:
            return replace(identity, salt=derived.salt, tenant_id=derived.tenant_id)
        self.figures.totals["tenantless_requests"] += 1
        self.figures.told(
            "it names no tenant, so it shares nothing and nothing of it is kept; have what admits"
            " requests set cache_salt to <tenant>/<salt>"
        )
        return None

    # -- leases -------------------------------------------------------------------------------

    def release_leases(self, arena: Arena, *leases: Lease) -> None:
        """End `leases` now, or from the link's thread if the arena is busy."""
        with self.boundary.around("a release"):
            if not arena.release(*leases):
                self.link.defer(arena, lambda held: held.release(*leases))

    def release_prefix(self, prefix: PrefixLease | None) -> None:
        """End all leases of a prefix, if there is one."""
        if prefix is not None:
            here = prefix.arena.arena_id
            self.release_leases(
                prefix.arena, *(lease for arena_id, lease in prefix.leased if arena_id == here)
            )
            self.release_away(prefix.away)

    def release_away(self, away: Mapping[int, Place]) -> None:
        """Have ranks on other nodes end the leases that were taken in their names."""
        self.to_release += [Release(rank, *place) for rank, place in away.items()]

    def release_at(self, arena_id: str, lease: Lease) -> None:
        """End a lease of this rank; one in an arena that is gone has gone with it."""
        arena = self.link.arena_named(arena_id)
        if arena is not None:
            self.release_leases(arena, lease)

    def is_being_read(self, request_id: int) -> bool:
        """Whether a save of this rank still reads the request's pages.

        Pages in host memory are read by the end of their pass.
        """
        return not self.identity.is_host and request_id in self.pending_reads

    def close(self) -> None:
        """Give the link back: one half has ended, which leaves the other nothing to do."""
        self.model_name.close()
        self.link.detach()


def shared_state_for(owner: object, args: EngineArgs, config: KVRayConfig) -> SharedState:
    """Return the state of the engine that `args` describe, one for both halves of a process.

    `owner` is the engine's own object that both halves are built from. ConfigError: the
    configuration cannot be used.
    """
    if args.is_spread and config.connector.stage_wait_s == 0:
        raise ConfigError(
            f"The engine has {args.num_ranks} ranks, {args.ranks_per_node} on a node; raise"
            " connector.stage_wait_s above 0, only the shards can say what all of them have."
        )
    if args.weights_from and config.connector.model_key is None:
        raise ConfigError(
            f"Weights that come by {args.weights_from} need not be those of the checkpoint's files,"
            " so these do not tell them from others; name model and revision in"
            " connector.model_key."
        )
    secret_file = config.security.tenant_secret_file
    # Read before anything is keyed: an engine of tenants must not start without its secret.
    tenants = None if secret_file is None else TenantSalts.read(secret_file)
    link = node.attach(
        config.node_dir,
        label=config.connector.replica or f"engine-{os.getpid()}",
        lock_wait_s=config.arena.lock_wait_s,
        attach_retry_s=config.connector.attach_retry_s,
        access=Access.of(config.arena.group),
    )
    return link.member(owner, args, lambda: SharedState(args, config, link, tenants))


def registered_state(shared: SharedState) -> SharedState:
    """Return the state whose worker has registered its pool, as seen from the scheduler's half.

    The runtime gave the halves two copies of its arguments, so that `shared` has no pool. It is
    the latest state of this process with equal arguments whose worker has not been shut down.
    Two engines with equal arguments have pools of one layout. If they do not, the workers end the
    engine rather than load a wrong block: they check the metadata's namespace against their own.
    ConfigError: there is none.
    """
    members = (one for one in shared.link.members() if isinstance(one, SharedState))
    for other in members:
        if other.args == shared.args and other.identity.readings:
            return other
    raise ConfigError(
        "No worker of this process has registered its pool for this configuration; give scheduler"
        " and worker class the same arguments and the same configuration file."
    )


def shut_down_at_exit(half: Any) -> None:
    """Shut down a half of the connector when the interpreter ends: an engine may have no such call.

    The half, and with it the engine's pool, is not kept alive for that.
    """
    reference, pid = weakref.ref(half), os.getpid()

    def shut_down() -> None:
        living = reference()
        if living is not None and os.getpid() == pid:
            living.shutdown()

    atexit.register(shut_down)
