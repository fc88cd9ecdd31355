"""All that kvray uses from inside Ray: no public call does it.

Each function says why kvray needs it, and what happens with a Ray that no longer has it.
"""

import contextlib
import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from kvray.errors import ShardUnavailable

_KEPT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STATUS_S = 2
_AUTOSCALER_1_STATUS = b"__autoscaling_status"
"""Where the older autoscaler writes what it does; the newer one does not."""


@contextlib.contextmanager
def few_tries() -> Iterator[None]:
    """Have Ray give up soon within the block: by default it tries 20 times, for up to 41 s each.

    Without it a command waits for minutes if nobody answers.
    """
    with _replaced("ray._private.ray_constants", "NUM_REDIS_GET_RETRIES", 1):
        yield


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Have Ray leave the caller's signal handlers alone: its own end the process at once.

    Ray does not set its handler in Python. The caller's handler then replaces the one in C++. Until
    then this thread, and those that Ray starts here, take no signal.

    Without it Ray sets its Python handler for a moment in which nobody takes a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray sets no handler either
        return
    handlers = {signum: signal.getsignal(signum) for signum in _KEPT_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_SIGNALS)
    try:
        with _replaced("ray._private.utils", "set_sigterm_handler", lambda handler: None):
            yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def others_refused() -> Iterator[None]:
    """Raise ShardUnavailable within the block where Ray has no node that this process may use.

    Without it Ray's core ends this process without a word: after ten seconds on a machine that is
    no node, and by SIGABRT where the node's Ray is another user's.
    """
    connect: Any = getattr(ray._private.worker, "connect", None)

    def connect_to_own(node: Any, *args: Any, **options: Any) -> Any:
        socket = Path(getattr(node, "raylet_socket_name", "."))
        if not socket.exists():
            raise ShardUnavailable(
                f"This machine, or container, is no node of that Ray cluster: it has no {socket};"
                " run this on a node of it."
            )
        if not os.access(socket, os.W_OK):
            raise ShardUnavailable(
                f"The Ray of this node is of another user, to whom {socket} belongs; run this as"
                " that user."
            )
        return connect(node, *args, **options)

    with _replaced("ray._private.worker", "connect", connect_to_own):
        yield


def read_token_again() -> None:
    """Have Ray read the mode and token of its authentication from the environment again.

    Ray reads both at import, before the token of a local cluster is known. Without it Ray refuses
    the connection, and the error names RAY_AUTH_MODE and RAY_AUTH_TOKEN.
    """
    with contextlib.suppress(AttributeError):
        ray._raylet.Config.initialize("")  # type: ignore[attr-defined]
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


def available_resources(node_id: str) -> Mapping[str, float] | None:
    """Return the free resources of a node; None if Ray does not know them yet.

    `ray.available_resources` has only the sum of all nodes. Without it a node's whole object store
    counts as free, so that `arena.capacity: auto` takes less.
    """
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return None
    nodes: Mapping[str, Mapping[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return nodes.get(node_id)


def draining_nodes() -> dict[str, float | None]:
    """Return the nodes that Ray wants to go, by id, and the seconds that they have; None: any.

    Ray ends no node at its deadline, which another machine's clock has set: one that lives on after
    it has any time.
    Ray tells actors nothing of it, and its public calls do not either. Without it a node that the
    autoscaler or its cloud takes away goes with its blocks, and `kvray drain` still works.
    """
    try:
        from ray._private.state import state

        found: Mapping[str, int] = state.get_draining_nodes()
    except (ImportError, AttributeError):
        return {}
    left_s = {node: deadline_ms / 1000 - time.time() for node, deadline_ms in found.items()}
    return {node: seconds if seconds > 0 else None for node, seconds in left_s.items()}


def unused_nodes() -> frozenset[str]:
    """Return the nodes that an autoscaler started and of which nothing is in use, by id.

    A node with kvray's actors is never idle to Ray, whatever they need, and so the autoscaler does
    not end it. No public call tells who started a node. Without it the parts of a tier stay on all
    nodes, as with `shard.release_idle_s: null`.
    """
    try:
        from ray.core.generated.autoscaler_pb2 import (  # type: ignore[attr-defined]
            GetClusterStatusReply,
        )

        worker: Any = ray._private.worker.global_worker
        client = worker.gcs_client
        reply: Any = GetClusterStatusReply()
        reply.ParseFromString(client.get_cluster_status(timeout_s=_STATUS_S))
        has_autoscaler = reply.HasField("autoscaling_state") or client.internal_kv_get(
            _AUTOSCALER_1_STATUS, None, timeout=_STATUS_S
        )
    except (ImportError, AttributeError):
        return frozenset()
    except ray.exceptions.RpcError as error:
        raise ShardUnavailable(f"Ray did not say what its nodes do: {error}") from error
    nodes = reply.cluster_resource_state.node_states if has_autoscaler else ()
    return frozenset(
        node.node_id.hex()
        for node in nodes
        # KubeRay names its instances without an autoscaler too; dead ones have no resources.
        if node.instance_id
        and node.total_resources
        and node.available_resources == node.total_resources
    )


@contextlib.contextmanager
def _replaced(module: str, name: str, value: Any) -> Iterator[None]:
    """Give a module's attribute another value within the block, if there is such an attribute."""
    try:
        owner = importlib.import_module(module)
        before = getattr(owner, name)
    except (ImportError, AttributeError):
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
