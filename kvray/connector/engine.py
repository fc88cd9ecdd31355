"""What scheduler and worker of one engine process share: settings, link, namespace, figures.

The engine builds both halves in one process (rank 0) from the same `llm_args` object and never
introduces them to each other. They meet here: the worker learns the pool's geometry, without
which no namespace is complete, and the scheduler keys requests with that namespace.
"""

import atexit
import logging
import os
import socket
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kvray import node
from kvray.block import Namespace
from kvray.config import KVRayConfig, load_config
from kvray.connector.adapters import Adapters, fingerprints_dir
from kvray.connector.base import KvCacheConnectorScheduler
from kvray.connector.boundary import Boundary
from kvray.connector.cache_layout import CacheLayout
from kvray.connector.engine_args import EngineArgs, read_engine_args
from kvray.connector.identity import Identity, identify, keep_apart
from kvray.connector.meta import Release
from kvray.connector.prefix import Prefix
from kvray.connector.reads import Reads
from kvray.connector.timings import Timings
from kvray.errors import ConfigError
from kvray.fingerprint import fingerprint_model
from kvray.node import NodeLink, Openings, Registration, RequestNotes
from kvray.store import Arena, Lease, Wanted
from kvray.store.access import Access
from kvray.tenant import TenantSalts

_log = logging.getLogger("kvray.connector")


class Closable(Protocol):
    """A half of the connector."""

    def shutdown(self) -> None:
        """Let go of the tier. Twice is fine."""
        ...


class Engine:
    """One engine in this process; `engine_for` returns it.

    What crosses between the halves, which the engine's executor thread calls one after the other:
    the layout of the pool, which requests were told to go on (`told`), and which are still being
    read (`reads`, which the saver's thread writes too).
    """

    def __init__(
        self,
        args: EngineArgs,
        config: KVRayConfig,
        link: NodeLink,
        tenants: TenantSalts | None = None,
    ) -> None:
        """Start without a namespace: that comes with the worker's pool.

        Args:
            args: of the engine.
            config: of the tier.
            link: to the node's part of it.
            tenants: keeps tenants apart; None: there are none.
        """
        self.args = args
        self.config = config
        self.link = link
        self.totals: Counter[str] = Counter()
        self.timings = Timings()
        self._began_at = time.monotonic()
        self.boundary = Boundary(self.totals)
        self.openings = Openings()
        self.requests = RequestNotes()
        self.tenants = tenants
        self.adapters = Adapters(settings=args.adapters, cache_dir=fingerprints_dir())
        self.is_flat = True
        """Whether the pool came as one tensor: such engines take all of an offer or nothing."""
        self.namespace_digest = b""
        """Of the pool that the worker has registered; empty before and after."""
        self.wanted: list[list[Wanted]] = []
        """For each rank that the leader speaks for, the parts that its lease must have."""
        self.windowed: tuple[bool, ...] = (False,)
        """For each layer group, whether it has a window."""
        self.part_bytes = 0
        """Bytes of the first part of a block."""
        self.is_host_pool = True
        self.told: dict[int, bool] = {}
        """Parked requests -> whether the engine was told that it may go on."""
        self.reads = Reads()
        self.has_ranks_away = False
        """Whether the shard has found ranks of this engine on other nodes."""
        self.to_release: list[Release] = []
        """Leases of ranks on other nodes that the next pass has them end."""
        self.replica = config.connector.replica or f"{socket.gethostname()}-{os.getpid()}"
        self._registration: Registration | None = None
        self._warned_tenantless = False

    @property
    def num_parts_ranks(self) -> int:
        """Ranks that each hold a share of every request's KV; with attention DP there is one."""
        return 1 if self.args.attention_dp else self.args.num_ranks

    @property
    def part_rank(self) -> int:
        """This rank among them."""
        return 0 if self.args.attention_dp else self.args.rank

    @property
    def spans_nodes(self) -> bool:
        """Whether ranks that each hold a share of a request's KV are on several nodes."""
        return self.has_ranks_away or self.args.is_spread

    @property
    def has_windows(self) -> bool:
        """Whether some layers look back over a window only."""
        return any(self.windowed)

    @property
    def takes_offers_later(self) -> bool:
        """Whether the runtime may come back for an offer after passes without it.

        One that does says by `cancel_load` what it will never come back for.
        """
        return hasattr(KvCacheConnectorScheduler, "cancel_load")

    @property
    def asks_peers(self) -> bool:
        """Whether blocks of other nodes are asked for; not before the shard says there are such."""
        registration = self._registration
        has_peers = registration is not None and registration.has_peers
        return has_peers and self.config.connector.stage_wait_s > 0

    @property
    def loads_later(self) -> bool:
        """Whether requests are parked while their blocks are made ready."""
        return self.config.connector.load == "async"

    @property
    def verifies_promises(self) -> bool:
        """Whether blocks are checked before they are promised; parked ones are while they wait."""
        return self.verifies_loads and not self.loads_later

    @property
    def verifies_loads(self) -> bool:
        """Whether loaded blocks are checked: always, never, or because the pool is on the host."""
        mode = self.config.connector.verify_on_load
        return mode == "always" or (mode == "auto" and self.is_host_pool)

    def identify(self, request: Any) -> Identity | None:
        """Return what enters the keys of a request beside its tokens; None: it has no keys.

        Raises:
            ConfigError: as `identity.identify`.
        """
        identity = identify(request, self.adapters.fingerprint)
        if identity is None or self.tenants is None:
            return identity
        kept_apart = keep_apart(identity, self.tenants)
        if kept_apart is None:
            self.totals["tenantless_requests"] += 1
            self._warn_tenantless()
        return kept_apart

    def register(self, layout: CacheLayout) -> Namespace:
        """Complete the namespace with the pool's layout and tell the shard.

        Args:
            layout: of this rank's pool.

        Returns:
            The namespace.

        Raises:
            ConfigError: the model cannot be told from others.
            LayoutMismatch: another replica claims the same `model_key` with another layout.
        """
        args, ranks = self.args, self.num_parts_ranks
        parts = layout.parts(self.part_rank, ranks, args.tokens_per_block)
        wanted = layout.wanted(ranks, args.tokens_per_block)
        namespace = Namespace(
            model=_model_identity(args.model, self.config.connector.model_key),
            quantization=args.quantization,
            overrides=args.overrides,
            kv_dtype=layout.dtype,
            num_layers=sum(len(group.layers) for group in layout.groups),
            kv_factor=layout.kv_factor,
            tokens_per_block=args.tokens_per_block,
            part_bytes=sum(part.block_bytes for part in parts),
            num_parts=layout.num_parts(ranks),
            tp_layout=f"dp{args.num_ranks}" if args.attention_dp else f"tp{args.num_ranks}",
            layer_groups=layout.describe(),
            attention_backend=args.attention_backend,
            engine=args.engine,
        )
        self.unregister()
        self.is_host_pool = layout.is_host
        registration = Registration(
            replica=self.replica,
            rank=args.rank,
            namespace=namespace,
            counters=self._counters,
            openings=self.openings,
            requests=self.requests,
            wanted=tuple(wanted[self.part_rank]),
            num_ranks=ranks,
            adapters=args.adapters,
            tenants=None if self.tenants is None else self.tenants.check,
        )
        self.link.register(registration)
        self._registration = registration
        self.is_flat = layout.is_flat
        self.wanted = wanted
        self.windowed = tuple(group.window is not None for group in layout.groups)
        self.part_bytes = parts[0].block_bytes
        self.namespace_digest = namespace.digest()
        return namespace

    def _counters(self) -> dict[str, int]:
        """Return what the shard is told: totals, how long things took, and since when."""
        return {
            **self.openings.counted(dict(self.totals), "miss_tokens_not_stored"),
            **self.timings.counters(),
            "uptime_s": int(time.monotonic() - self._began_at),
        }

    def follow(self, replica: str) -> None:
        """Call the replica as its leader does: the shard has to know which ranks are of one."""
        if replica != self.replica and self._registration is not None:
            self.replica = replica
            self._registration.rename(replica)

    def is_being_read(self, request_id: int) -> bool:
        """Whether a save of this rank still reads the request's blocks.

        Those in host memory are read when their pass has ended.
        """
        return not self.is_host_pool and request_id in self.reads

    def was_told(self, request_id: int) -> bool:
        """Whether the engine was told that a parked request may go on."""
        return self.told.get(request_id, False)

    def close(self) -> None:
        """One half has ended; the link is given back. The other half may go on."""
        self.link.detach()

    def unregister(self) -> None:
        """Take this rank off the shard's list; nothing is promised in its name any more."""
        if self._registration is not None:
            self.link.unregister(self._registration)
            self._registration, self.namespace_digest = None, b""

    def _warn_tenantless(self) -> None:
        if not self._warned_tenantless:
            self._warned_tenantless = True
            _log.warning(
                "kvray: a request names no tenant, so it shares nothing and nothing of it is kept;"
                " have what admits requests set cache_salt to <tenant>/<salt> (said once)."
            )


def engine_for(llm_args: Any, config_path: str | None) -> Engine:
    """Return the engine that `llm_args` describes, the same for both halves of a process.

    Raises:
        ConfigError: the configuration, or an engine setting, cannot be used.
    """
    args = read_engine_args(llm_args)
    config = load_config(config_path)
    if args.is_spread and config.connector.stage_wait_s == 0:
        raise ConfigError(
            f"The engine has {args.num_ranks} ranks, {args.ranks_per_node} on a node; only the"
            " shards can say what all of them have, and connector.stage_wait_s is 0: raise it."
        )
    secret_file = config.security.tenant_secret_file
    # Before anything is keyed: without its secret an engine of tenants must not start.
    tenants = None if secret_file is None else TenantSalts.read(secret_file)
    access = Access.of(config.arena.group)
    link = node.attach(
        config.node_dir,
        label=config.connector.replica or f"engine-{os.getpid()}",
        lock_wait_s=config.arena.lock_wait_s,
        attach_retry_s=config.connector.attach_retry_s,
        access=access,
    )
    if not args.block_reuse:
        _log.warning(
            "kvray: kv_cache_config.enable_block_reuse is false: the engine ignores every match;"
            " set it to true to load from the tier."
        )
    return link.member(llm_args, args, lambda: Engine(args, config, link, tenants))


def registered_engine(engine: Engine) -> Engine:
    """Return the engine whose worker has registered its pool, as seen from the scheduler's half.

    That is `engine` itself, or, if the runtime gave the halves two copies of its arguments, the
    latest engine of this process with equal ones whose worker has not been shut down. Two engines
    with equal arguments have pools of one layout; if they do not, the workers, which check the
    namespace in the metadata against their own, end the engine rather than load a wrong block.

    Raises:
        ConfigError: there is none.
    """
    if engine.namespace_digest:
        return engine
    for other in engine.link.members():
        if isinstance(other, Engine) and other.namespace_digest and other.args == engine.args:
            return other
    raise ConfigError(
        "No worker of this process has registered its pool for this configuration; give scheduler"
        " and worker class the same arguments and the same configuration file."
    )


def release_leases(engine: Engine, arena: Arena, *leases: Lease) -> None:
    """End `leases` now, or from the link's thread if the arena is busy; raises nothing."""
    with engine.boundary.around("a release"):
        if not arena.release(*leases):
            engine.link.defer(arena, lambda held: held.release(*leases))


def release_prefix(engine: Engine, prefix: Prefix) -> None:
    """End the leases of a prefix; raises nothing."""
    release_leases(engine, prefix.arena, *prefix.held.leases)
    release_away(engine, prefix.away)


def release_away(engine: Engine, away: Mapping[int, tuple[str, Lease]]) -> None:
    """Have ranks on other nodes end the leases that were taken in their names."""
    engine.to_release += [Release(rank, *place) for rank, place in away.items()]


def shut_down_at_exit(half: "Closable") -> None:
    """Have a half of the connector shut down when the interpreter ends, if it lives until then.

    TensorRT-LLM has no shutdown call. The half is not kept alive, and with it the engine's pool.
    """
    reference, pid = weakref.ref(half), os.getpid()

    def shut_down() -> None:
        living = reference()
        if living is not None and os.getpid() == pid:
            living.shutdown()

    atexit.register(shut_down)


def _model_identity(model: str, model_key: str | None) -> str:
    if model_key is not None:
        return f"key:{model_key}"
    if not model or not Path(model).exists():
        raise ConfigError(
            f"The checkpoint {model!r} is not on this machine, so it cannot be told from others;"
            " name model and revision in connector.model_key."
        )
    return "sha256:" + fingerprint_model(model, cache_dir=fingerprints_dir())
