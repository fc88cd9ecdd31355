"""A Ray cluster of one node, started and ended by kvray, for a machine that has none.

It is `ray start --head --block` in a process of its own: that process ends every process it
started when it is told to, so nothing but our own Ray is ever touched (`ray stop` would end every
Ray of the machine). Its sessions, its token and what is needed to find it again lie in one
directory of this user; HOME and /tmp/ray stay as they are.
"""

import ctypes
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import ray

from kvray.config import KVRayConfig
from kvray.errors import ConfigError, ShardUnavailable

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 20.0
_OBJECT_STORE_BYTES = 80 * 2**20
"""The least Ray accepts: kvray keeps no blocks in Ray's object store."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRay:
    """A running local cluster."""

    address: str
    token: str
    pid: int
    started: float
    """Creation time of process `pid`, so that a later process of that pid is never ended."""
    dashboard_url: str | None

    def environ(self) -> dict[str, str]:
        """Return the variables with which a process reaches this cluster."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "RAY_ADDRESS": self.address}


def local_dir(cluster_name: str) -> Path:
    """Return the directory of the local cluster for the tier `cluster_name`."""
    return Path(tempfile.gettempdir()) / f"kvray-{os.getuid()}-{cluster_name}"


def find(cluster_name: str) -> LocalRay | None:
    """Return the local cluster that runs for the tier, if one does."""
    try:
        local = LocalRay(**json.loads((local_dir(cluster_name) / "ray.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return local if _process(local) is not None else None


def start(
    cluster_name: str,
    *,
    port: int | None = None,
    dashboard: bool = False,
    die_with_parent: bool = False,
    waiting: Callable[[float], None] = lambda elapsed_s: None,
) -> LocalRay:
    """Start a local cluster and return when it answers.

    Args:
        cluster_name: the tier it is for; one local cluster each.
        port: port of the head; None: a free one.
        dashboard: start Ray's dashboard too.
        die_with_parent: end it when this process dies, however it dies.
        waiting: called a few times a second with the time it has taken so far.

    Raises:
        ConfigError: the port is in use, or Ray did not start.
    """
    directory = local_dir(cluster_name)
    if port is not None:
        _check_port(port)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    token = secrets.token_hex(32)
    log = directory / "ray-start.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(directory, port=port or 0, dashboard=dashboard),
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if die_with_parent else None,  # noqa: PLW1509
        )
    try:
        local = LocalRay(
            address=_await_address(process, directory, log, waiting),
            token=token,
            pid=process.pid,
            started=psutil.Process(process.pid).create_time(),
            dashboard_url=_dashboard_url(log) if dashboard else None,
        )
        state = directory / "ray.json"
        state.touch(mode=0o600)
        state.write_text(json.dumps(asdict(local)))
    except BaseException:
        _end(psutil.Process(process.pid))
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return local


def stop(cluster_name: str) -> bool:
    """End the local cluster of the tier and remove its directory; False if none runs."""
    local = find(cluster_name)
    process = None if local is None else _process(local)
    if process is not None:
        _end(process)
    shutil.rmtree(local_dir(cluster_name), ignore_errors=True)
    return process is not None


def connect(address: str) -> None:
    """Connect this process to a Ray cluster as a driver.

    Raises:
        ShardUnavailable: nobody answers there, or the token is not the cluster's.
    """
    _check_address(address)
    # Ray tries 20 times 41 s by default: whoever waits at a terminal wants to know sooner.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")
    try:
        ray.init(
            address=address,
            namespace="kvray",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise ShardUnavailable(
            f"The Ray cluster at {address} cannot be reached ({cause}); check ray.address, and"
            " RAY_AUTH_MODE and RAY_AUTH_TOKEN if it wants a token."
        ) from None


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


def _check_address(address: str) -> None:
    """Find out within seconds whether anybody listens at `host:port`."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{address!r} is no Ray address; write host:port, for example 10.0.0.5:6379."
        )
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ShardUnavailable(
            f"Nobody answers at the Ray address {address} ({error.strerror or error}); start Ray"
            " there, or correct ray.address."
        ) from None


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(
                f"Port {port} cannot be used for Ray ({error.strerror}); choose another --port."
            ) from None


def _command(directory: Path, *, port: int, dashboard: bool) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--port={port}",
        f"--temp-dir={directory / 'ray'}",
        f"--include-dashboard={'true' if dashboard else 'false'}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
    ]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _await_address(
    process: "subprocess.Popen[bytes]",
    directory: Path,
    log: Path,
    waiting: Callable[[float], None],
) -> str:
    """Return the address that Ray writes down once its head answers."""
    began = time.monotonic()
    started = False
    while time.monotonic() - began < _START_TIMEOUT_S:
        waiting(time.monotonic() - began)
        if process.poll() is not None:
            break
        started = started or "Ray runtime started" in log.read_text(errors="replace")
        address = directory / "ray" / "ray_current_cluster"
        if started and address.exists():
            return address.read_text().strip()
        time.sleep(0.1)
    tail = " ".join(log.read_text(errors="replace").split()[-40:])
    raise ConfigError(f"Ray did not start within {_START_TIMEOUT_S:.0f} s; it said: {tail}")


def _dashboard_url(log: Path) -> str | None:
    for word in log.read_text(errors="replace").split():
        if word.startswith("http://") and word.count(":") == 2:
            return word.strip("'\"[]m\x1b")
    return None


def _process(local: LocalRay) -> psutil.Process | None:
    try:
        process = psutil.Process(local.pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process if alive and abs(process.create_time() - local.started) < 1 else None
    except psutil.NoSuchProcess:
        return None


def _end(process: psutil.Process) -> None:
    """End `ray start --block`, which ends what it started; then whatever is left of it."""
    try:
        family = [process, *process.children(recursive=True)]
        process.terminate()
        psutil.wait_procs([process], timeout=_STOP_TIMEOUT_S)
    except psutil.NoSuchProcess:
        return
    _, left = psutil.wait_procs(family, timeout=5)
    for one in left:
        one.kill()
    psutil.wait_procs(left, timeout=5)
