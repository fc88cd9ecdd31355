"""What scheduler and worker of one engine process share: settings, link, namespace, figures.

The engine builds both halves in one process (rank 0) from the same `llm_args` object and never
introduces them to each other. They meet here: the worker learns the pool's geometry, without
which no namespace is complete, and the scheduler keys requests with that namespace.
"""

import atexit
import logging
import os
import socket
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

from kvray import node
from kvray.block import Namespace
from kvray.config import KVRayConfig, cache_dir, load_config
from kvray.connector.boundary import Boundary
from kvray.connector.engine_args import EngineArgs, read_engine_args
from kvray.errors import ConfigError
from kvray.fingerprint import fingerprint_model
from kvray.node import NodeLink, Registration
from kvray.store import Arena, Lease

_log = logging.getLogger("kvray.connector")


class Closable(Protocol):
    """A half of the connector."""

    def shutdown(self) -> None:
        """Let go of the tier. Twice is fine."""
        ...


class Engine:
    """One engine in this process; `engine_for` returns it."""

    def __init__(self, args: EngineArgs, config: KVRayConfig, link: NodeLink) -> None:
        """Start without a namespace: that comes with the worker's pool."""
        self.args = args
        self.config = config
        self.link = link
        self.totals: Counter[str] = Counter()
        self.boundary = Boundary(self.totals)
        self.namespace_digest = b""
        """Of the pool that the worker has registered; empty before and after."""
        self.is_host_pool = True
        self.replica = config.connector.replica or f"{socket.gethostname()}-{os.getpid()}"
        self._registration: Registration | None = None

    @property
    def verifies_loads(self) -> bool:
        """Whether loaded blocks are checked: always, never, or because the pool is on the host."""
        mode = self.config.connector.verify_on_load
        return mode == "always" or (mode == "auto" and self.is_host_pool)

    def register(
        self, *, shape: tuple[int, ...], dtype: str, block_bytes: int, is_host: bool
    ) -> Namespace:
        """Complete the namespace with the pool's geometry and tell the shard.

        Args:
            shape: [num_blocks, num_layers, kv_factor, block_elems].
            dtype: the pool's element type.
            block_bytes: bytes of one rank's part of a block.
            is_host: whether the pool lies in host memory.

        Returns:
            The namespace.

        Raises:
            ConfigError: the model cannot be told from others.
            LayoutMismatch: another replica claims the same `model_key` with another layout.
        """
        args = self.args
        self.is_host_pool = is_host
        namespace = Namespace(
            model=_model_identity(args.model, self.config.connector.model_key),
            quantization=args.quantization,
            overrides=args.overrides,
            kv_dtype=dtype,
            num_layers=shape[1],
            kv_factor=shape[2],
            block_elems=shape[3],
            tokens_per_block=args.tokens_per_block,
            part_bytes=block_bytes,
            num_parts=args.num_ranks,
            tp_layout=f"tp{args.num_ranks}",
            layer_group=0,
            attention_backend=args.attention_backend,
            engine=args.engine,
        )
        self.unregister()
        registration = Registration(
            replica=self.replica,
            rank=args.rank,
            namespace=namespace,
            counters=lambda: dict(self.totals),
        )
        self.link.register(registration)
        self._registration, self.namespace_digest = registration, namespace.digest()
        return namespace

    def close(self) -> None:
        """One half has ended; the link is given back. The other half may go on."""
        self.link.detach()

    def unregister(self) -> None:
        """Take this rank off the shard's list; nothing is promised in its name any more."""
        if self._registration is not None:
            self.link.unregister(self._registration)
            self._registration, self.namespace_digest = None, b""


def engine_for(llm_args: Any, config_path: str | None) -> Engine:
    """Return the engine that `llm_args` describes, the same for both halves of a process.

    Raises:
        ConfigError: the configuration, or an engine setting, cannot be used.
    """
    args = read_engine_args(llm_args)
    config = load_config(config_path)
    link = node.attach(
        config.node_dir,
        label=config.connector.replica or f"engine-{os.getpid()}",
        lock_wait_s=config.arena.lock_wait_s,
        attach_retry_s=config.connector.attach_retry_s,
    )
    if not args.block_reuse:
        _log.warning(
            "kvray: kv_cache_config.enable_block_reuse is false: the engine ignores every match;"
            " set it to true to load from the tier."
        )
    return link.member(llm_args, args, lambda: Engine(args, config, link))


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


def fingerprints_dir() -> Path:
    """Return where fingerprints of checkpoints are cached."""
    return cache_dir() / "fingerprints"


def _model_identity(model: str, model_key: str | None) -> str:
    if model_key is not None:
        return f"key:{model_key}"
    if not model or not Path(model).exists():
        raise ConfigError(
            f"The checkpoint {model!r} is not on this machine, so it cannot be told from others;"
            " name model and revision in connector.model_key."
        )
    return "sha256:" + fingerprint_model(model, cache_dir=fingerprints_dir())
