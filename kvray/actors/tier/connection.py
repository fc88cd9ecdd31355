"""This process's connection to a Ray cluster: made or refused within seconds.

Ray alone tries for minutes if nobody answers, and replaces the caller's signal handlers.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator

import ray

from kvray.actors.names import namespace_of
from kvray.actors.ray_glue.calls import in_short
from kvray.actors.ray_glue.private import few_tries, others_refused, read_token_again, signals_kept
from kvray.actors.tier.local_ray import find
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, ShardUnavailable

_PROBE_S = 5.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HTTP2_SETTINGS = 4


def connect(address: str, cluster_name: str) -> None:
    """Connect this process to a Ray cluster as a driver, in the namespace of a tier.

    ShardUnavailable: nobody answers there, the token is not the cluster's, or this machine is no
    node of it, or one whose Ray is another user's.
    """
    _check_address(address)
    try:
        with few_tries(), signals_kept(), others_refused(), _words_held():
            ray.init(
                address=address,
                namespace=namespace_of(cluster_name),
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
    except ShardUnavailable:
        disconnect()
        raise
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        disconnect()
        cause = in_short(error.__cause__ or error).partition(". ")[0]
        raise ShardUnavailable(
            f"The Ray cluster at {address} cannot be reached ({cause}); check ray.address, and"
            " RAY_AUTH_MODE and RAY_AUTH_TOKEN if it wants a token."
        ) from None


def disconnect() -> None:
    """End this process's connection, if it has one. Twice is fine.

    Ray would leave the system's signal handlers behind: a second Ctrl-C would end the clean-up.
    """
    with signals_kept():
        ray.shutdown()


def connect_configured(config: KVRayConfig) -> None:
    """Connect to the cluster of the configuration: its address, else the local one of its tier."""
    address = config.ray.address
    if address is None:
        local = find(config.cluster_name)
        if local is None:
            raise ShardUnavailable(
                f"No local tier named {config.cluster_name!r} is running; start it with"
                " `kvray up`, or set ray.address to the Ray cluster that has it."
            )
        # For this process and its children; the address of the next local Ray is another one.
        os.environ.update({k: v for k, v in local.environ().items() if k != "RAY_ADDRESS"})
        read_token_again()
        address = local.address
    connect(address, config.cluster_name)


@contextlib.contextmanager
def _words_held() -> Iterator[None]:
    """Hold back stderr until the block ends, and drop it if the block raises.

    Ray's core, below Python, writes there if an address belongs to no Ray.
    """
    stderr = os.dup(2)
    held = os.memfd_create("kvray-stderr", os.MFD_CLOEXEC)
    os.dup2(held, 2)
    try:
        yield
        os.write(stderr, os.pread(held, os.fstat(held).st_size, 0))
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(held)


def _check_address(address: str) -> None:
    """Check within seconds that a server like Ray's listens at `host:port`."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in address:
        raise ConfigError(
            f"{address!r} is no Ray address; write host:port, for example 10.0.0.5:6379, in"
            " --address, ray.address or RAY_ADDRESS."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as probe:
            speaks = _speaks_http2(probe)
    except (OSError, OverflowError, UnicodeError) as error:  # the last of host names
        raise ShardUnavailable(
            f"Nobody answers at the Ray address {address} ({error}); start Ray there, or correct"
            " it in --address, ray.address or RAY_ADDRESS."
        ) from None
    if not speaks:
        raise ShardUnavailable(
            f"The server at {address} is no Ray head, or one with TLS; correct ray.address (6379 is"
            " Ray's usual port), or set RAY_USE_TLS=1 and RAY_TLS_* as the head has them."
        )


def _speaks_http2(probe: socket.socket) -> bool:
    """Return whether the server answers as gRPC servers do; else Ray would try for minutes."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True
    answer = b""
    with contextlib.suppress(ConnectionError):  # a time-out is of a head that hangs
        probe.sendall(_HTTP2_HELLO)
        while len(answer) < 9 and (chunk := probe.recv(9 - len(answer))):
            answer += chunk
    return len(answer) == 9 and answer[3] == _HTTP2_SETTINGS
