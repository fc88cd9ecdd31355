"""The state that the two halves of a connector share in one engine process.

The engine builds both in the process of rank 0 from one object of arguments, and never introduces
them to each other. They meet here: the rank's half registers its pool, without which no namespace
is complete, and the leader's half keys requests with that namespace.
"""

import atexit
import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvray import node
from kvray.config import KVRayConfig
from kvray.engine.figures import Boundary, EngineFigures
from kvray.engine.meta import PrefixLease, Release
from kvray.engine.model.engine_args import EngineArgs
from kvray.engine.registered_pool import RegisteredPool
from kvray.engine.request import Identity
from kvray.engine.saver import PendingReads
from kvray.errors import ConfigError
from kvray.identity.tenant import TenantSalts
from kvray.node import NodeLink
from kvray.store import Arena, Lease
from kvray.store.machine.access import Access

_log = logging.getLogger("kvray.connector")


class SharedState:
    """Of one engine in this process; `shared_state_for` returns it.

    The engine's executor thread calls both halves, one after the other. Between them cross the
    registered pool, and which pages saves still read (`pending_reads`, which the saver's thread
    writes too).
    """

    def __init__(
        self,
        args: EngineArgs,
        config: KVRayConfig,
        link: NodeLink,
        tenants: TenantSalts | None = None,
    ) -> None:
        self.args = args
        self.config = config
        self.link = link
        self.figures = EngineFigures()
        self.boundary = Boundary(self.figures.totals)
        self.tenants = tenants
        self._warned_tenantless = False
        self.pool = RegisteredPool(
            args,
            link,
            self.figures,
            model_key=config.connector.model_key,
            weights_version=config.connector.weights_version,
            replica=config.connector.replica,
            tenants_check=None if tenants is None else tenants.check,
        )
        self.pending_reads = PendingReads()
        self.spans_nodes = args.is_spread
        """Whether ranks that each hold a share of a request's KV are on several nodes."""
        self.to_release: list[Release] = []
        """Leases of ranks on other nodes; the next pass tells those ranks to end them."""

    @property
    def may_stage(self) -> bool:
        """Whether the shard may be asked to stage blocks."""
        return self.pool.has_peers and self.config.connector.stage_wait_s > 0

    @property
    def verifies_promises(self) -> bool:
        """Whether blocks are checked before they are promised; ranks check those that they hold."""
        return not self.args.holds_loads and self.verifies_loads

    @property
    def verifies_loads(self) -> bool:
        """Whether loaded blocks are checked: always, never, or because the pool is on the host."""
        mode = self.config.connector.verify_on_load
        return mode == "always" or (mode == "auto" and self.pool.identity.is_host)

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
        if not self._warned_tenantless:
            self._warned_tenantless = True
            _log.warning(
                "kvray: a request names no tenant, so it shares nothing and nothing of it is kept;"
                " have what admits requests set cache_salt to <tenant>/<salt> (said once)."
            )
        return None

    def release_leases(self, arena: Arena, *leases: Lease) -> None:
        """End `leases` now, or from the link's thread if the arena is busy."""
        with self.boundary.around("a release"):
            if not arena.release(*leases):
                self.link.defer(arena, lambda held: held.release(*leases))

    def release_prefix(self, prefix: PrefixLease | None) -> None:
        """End all leases of a prefix, if there is one."""
        if prefix is not None:
            self.release_leases(prefix.arena, *prefix.held.leases)
            self.release_away(prefix.away)

    def release_away(self, away: Mapping[int, tuple[str, Lease]]) -> None:
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
        return not self.pool.identity.is_host and request_id in self.pending_reads

    def close(self) -> None:
        """Give the link back: one half has ended, which leaves the other nothing to do."""
        self.pool.model_name.close()
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
    for other in shared.link.members():
        if not isinstance(other, SharedState) or other.args != shared.args:
            continue
        if other.pool.is_registered:
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
