"""This process's connection to a Ray cluster: made in seconds, or refused in a sentence.

Ray by itself tries for many minutes to reach what is not there, and puts its own signal handlers
in place of the caller's.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator

import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils

from kvray.actors.local_ray import LocalRay, find
from kvray.actors.ray_calls import NAMESPACE, first_line
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, ShardUnavailable

_KEPT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CONNECT_TRIES = 2
_PROBE_S = 5.0
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_HTTP2_SETTINGS = 4


def connect(address: str) -> None:
    """Connect this process to a Ray cluster as a driver.

    Raises:
        ShardUnavailable: nobody answers there, or the token is not the cluster's.
    """
    _check_address(address)
    try:
        with _few_tries(), _signals_kept():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        disconnect()
        cause = _cause(error.__cause__ or error)
        raise ShardUnavailable(
            f"The Ray cluster at {address} cannot be reached ({cause}); check ray.address, and"
            " RAY_AUTH_MODE and RAY_AUTH_TOKEN if it wants a token."
        ) from None


def disconnect() -> None:
    """End this process's connection, if it has one. Twice is fine.

    Ray takes its signal handlers away with it, and would leave those of the system: a second
    Ctrl-C or SIGTERM ended the process in the middle of its clean-up.
    """
    with _signals_kept():
        ray.shutdown()


def connect_configured(config: KVRayConfig) -> None:
    """Connect to the cluster of the configuration: its address, else the local one of its tier.

    Raises:
        ShardUnavailable: nobody answers, or there is neither an address nor a local cluster.
    """
    address = config.ray.address
    if address is None:
        local = find(config.cluster_name)
        if local is None:
            raise ShardUnavailable(
                f"No local tier named {config.cluster_name!r} is running; start it with"
                " `kvray up`, or set ray.address to the Ray cluster that has it."
            )
        _adopt_token(local)
        address = local.address
    connect(address)


def _adopt_token(local: LocalRay) -> None:
    """Have this process, and what it starts, use the token of a local cluster from now on.

    Ray reads mode and token once, at import: it has to be told to read them again.
    """
    os.environ.update(local.environ())
    ray._raylet.Config.initialize("")  # type: ignore[attr-defined]
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _few_tries() -> Iterator[None]:
    """Have Ray give up soon: by default it tries 20 times, for up to 41 s each."""
    before = ray_constants.NUM_REDIS_GET_RETRIES
    ray_constants.NUM_REDIS_GET_RETRIES = _CONNECT_TRIES
    try:
        yield
    finally:
        ray_constants.NUM_REDIS_GET_RETRIES = before


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Have Ray leave the caller's handlers alone: its own, and none, end the process at once.

    Ray's handler in Python is not set at all. The one in C++, which comes first, is replaced again;
    until then this thread, and those that Ray starts here, take no signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray sets no handler either
        return
    handlers = {signum: signal.getsignal(signum) for signum in _KEPT_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_SIGNALS)
    setter = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = setter
        for signum, handler in handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _cause(error: BaseException) -> str:
    """Return what an error of Ray says, where its first line is but the head of a traceback."""
    head = first_line(error)
    if not head.endswith("Traceback (most recent call last):"):
        return head
    return str(error).strip().splitlines()[-1].partition(". ")[0]


def _check_address(address: str) -> None:
    """Find out within seconds whether a server like Ray's listens at `host:port`."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        raise ConfigError(
            f"{address!r} is no Ray address; write host:port, for example 10.0.0.5:6379."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S) as probe:
            speaks = _speaks_http2(probe)
    except (OSError, OverflowError) as error:
        raise ShardUnavailable(
            f"Nobody answers at the Ray address {address} ({error}); start Ray there, or correct"
            " ray.address."
        ) from None
    if not speaks:
        raise ShardUnavailable(
            f"What answers at {address} is no Ray head; correct ray.address (6379 is Ray's usual"
            " port)."
        )


def _speaks_http2(probe: socket.socket) -> bool:
    """Return whether the server answers as gRPC's do; if not, Ray would try for minutes."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True
    answer = b""
    with contextlib.suppress(OSError):
        probe.sendall(_HTTP2_HELLO)
        while len(answer) < 9 and (chunk := probe.recv(9 - len(answer))):
            answer += chunk
    return len(answer) == 9 and answer[3] == _HTTP2_SETTINGS
