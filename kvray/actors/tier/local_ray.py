"""A Ray cluster of one node, started and ended by kvray, for a machine that has none.

It is `ray start --head --block` in a process of its own, which ends all its children when it ends.
`ray stop` would end every Ray of the machine. The cluster's sessions, token and address lie in one
directory of this user; HOME and /tmp/ray stay as they are.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from kvray.actors.owner.ownership import is_own
from kvray.actors.tier.rollout import Patience
from kvray.config import without_settings
from kvray.errors import ConfigError

_STILL_S = 90.0
"""How long a start may show no progress: a busy machine is slow, a frozen process never ends."""
_STOP_TIMEOUT_S = 20.0
_LAST_BREATH_S = 5.0
_STARTS_MAX = 10
OVERWHELMED = re.compile("imed out|to connect to GCS|may not have started|ode info")
"""What Ray says when its parts took longer than half a minute, as on a busy machine."""
PATIENT = {
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
}
"""Variables of a Ray that gives its own processes time to start; it has half a minute for some."""
OBJECT_STORE_BYTES = 80 * 2**20
"""The least Ray accepts: kvray keeps no blocks in Ray's object store."""
_PR_SET_PDEATHSIG = 1
_MARK = "KVRAY_LOCAL_RAY"
"""Variable of every process of a local cluster: its directory. It identifies processes that a
killed parent left behind."""
_DASHBOARD = re.compile(r"RAY_API_SERVER_ADDRESS='(http://[^']+)'")
_STATE_FILE = "ray.json"
_SOCKET_PATH = "ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""The longest path of a socket of Ray; Linux takes up to 107 bytes."""


class LocalRay(NamedTuple):
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
    parent, prefix = Path(tempfile.gettempdir()), f"kvray-{os.getuid()}-"
    directory = parent / f"{prefix}{cluster_name}"
    if _sockets_fit(directory):
        return directory
    return parent / (prefix + hashlib.sha256(cluster_name.encode()).hexdigest()[:8])


def find(cluster_name: str) -> LocalRay | None:
    """Return the local cluster that runs for the tier, if one does."""
    directory = local_dir(cluster_name)
    if not is_own(directory):
        return None
    try:
        local = LocalRay(**json.loads((directory / _STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return local if _process(local.pid, local.started) is not None else None


def start(
    cluster_name: str,
    *,
    port: int | None = None,
    dashboard: bool = False,
    die_with_parent: bool = False,
    check: Callable[[], None] = lambda: None,
    waiting: Callable[[float], None] = lambda elapsed_s: None,
) -> LocalRay:
    """Start the local cluster of a tier and return when it answers.

    `die_with_parent` ends it with this thread, however its process dies. `check` is called when
    nothing of an earlier cluster is left, before this one starts. `waiting` is called a few times a
    second with the seconds it has taken. A start that raises leaves nothing behind.
    """
    if port is not None:
        _check_port(port)
    token = secrets.token_hex(32)
    with _claimed_directory(cluster_name) as directory:
        log = directory / "ray-start.log"
        check()
        command = _command(directory, port=port or 0, dashboard=dashboard)
        patience = Patience(_STILL_S)
        for starts_left in reversed(range(_STARTS_MAX)):
            process = _spawn(command, directory, log, token, die_with_parent=die_with_parent)
            address = _await_address(process, directory, log, patience, waiting)
            if address is not None:
                break
            if not (starts_left and OVERWHELMED.search(log.read_text(errors="replace"))):
                status = process.poll()
                raise ConfigError(
                    f"Ray did not start, but ended with status {status}: {_tail(log)}"
                )
            _end_all(directory)
            shutil.rmtree(directory / "ray", ignore_errors=True)  # no address of before is read
        assert address is not None
        found = _DASHBOARD.search(log.read_text(errors="replace")) if dashboard else None
        local = LocalRay(
            address=address,
            token=token,
            pid=process.pid,
            started=psutil.Process(process.pid).create_time(),
            dashboard_url=found[1] if found is not None else None,
        )
        state = directory / _STATE_FILE
        state.touch(mode=0o600)
        state.write_text(json.dumps(local._asdict()))
    process.returncode = 0  # It outlives this object, which would warn of that.
    return local


def stop(cluster_name: str) -> bool:
    """End the local cluster of the tier, or the rest of one, and remove its directory.

    False: no process of it was there.
    """
    directory = local_dir(cluster_name)
    ended = _end_all(directory)
    if is_own(directory):
        shutil.rmtree(directory, ignore_errors=True)
    return ended


def read_address(temp_dir: Path) -> str:
    """Return the address that a head with this `--temp-dir` has written to a file; "": not yet."""
    try:
        return (temp_dir / "ray_current_cluster").read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _sockets_fit(directory: Path) -> bool:
    return len(os.fsencode(directory / _SOCKET_PATH)) <= 107


@contextlib.contextmanager
def _claimed_directory(cluster_name: str) -> Iterator[Path]:
    """Have the cluster's directory for a start; a start that fails leaves nothing there."""
    directory = local_dir(cluster_name)
    if not (str(directory).isascii() and _sockets_fit(directory)):
        raise ConfigError(
            f"Ray cannot use {directory.parent}: the path is too long or not ASCII; set TMPDIR to a"
            " shorter one, such as /tmp."
        )
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process
            if not is_own(directory):  # or it has just been removed
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        except BlockingIOError:
            raise ConfigError(
                f"Another process is starting a local Ray for the tier {cluster_name!r}; wait for"
                " it, or choose another cluster_name."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{directory} cannot be used for a local Ray ({error.strerror}): it is another"
                " user's; remove it, or choose another cluster_name."
            ) from None
        if find(cluster_name) is not None:
            raise ConfigError(
                f"A local Ray for the tier {cluster_name!r} is running already; end it with"
                " `kvray down`, or choose another cluster_name."
            )
        try:
            _end_all(directory)
            (directory / _STATE_FILE).unlink(missing_ok=True)
            shutil.rmtree(directory / "ray", ignore_errors=True)
            yield directory
        except BaseException:
            _end_all(directory)
            shutil.rmtree(directory, ignore_errors=True)
            raise


def _check_port(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ConfigError(
            f"Port {port} cannot be used for Ray ({error.strerror}); choose another --port."
        ) from None


def _command(directory: Path, *, port: int, dashboard: bool) -> list[str]:
    return [
        sys.executable,
        *["-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"],
        f"--port={port}",
        f"--temp-dir={directory / 'ray'}",
        f"--include-dashboard={'true' if dashboard else 'false'}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--log-color=false",  # what it says when it fails is shown as it is
        # One node never scales, and kvray's drivers take no worker's log: each costs a process.
        "--no-monitor",
        "--include-log-monitor=false",
    ]


def _spawn(
    command: list[str], directory: Path, log: Path, token: str, *, die_with_parent: bool
) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={
                **PATIENT,
                **without_settings(),
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": token,
                # Otherwise Ray waits half a minute for actors to move to another node.
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
                _MARK: str(directory),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent if die_with_parent else None,  # noqa: PLW1509
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _await_address(
    process: "subprocess.Popen[bytes]",
    directory: Path,
    log: Path,
    patience: Patience,
    waiting: Callable[[float], None],
) -> str | None:
    """Return the address that Ray writes down once its head answers; None: it ended before."""
    began = time.monotonic()
    started = False
    while not patience.is_over(_written(directory)):
        waiting(time.monotonic() - began)
        if process.poll() is not None:
            return None
        started = started or "Ray runtime started" in log.read_text(errors="replace")
        if started and (address := read_address(directory / "ray")):
            return address
        time.sleep(0.1)
    took_s = time.monotonic() - began
    raise ConfigError(
        f"Ray did not start: after {took_s:.0f} s it made no progress; it said: {_tail(log)}"
    )


def _written(directory: Path) -> tuple[int, int]:
    """Return the number of files that a starting Ray has written there, and their bytes.

    What it writes again and again, idle or not, is left out.
    """
    found = 0, 0
    for path in directory.rglob("*"):
        if not path.name.startswith("debug_state"):
            with contextlib.suppress(OSError):
                found = found[0] + 1, found[1] + path.lstat().st_size
    return found


def _tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace").split()[-40:])


def _process(pid: int, created: float) -> psutil.Process | None:
    """Return the living process of that pid, unless the pid now is another's."""
    try:
        process = psutil.Process(pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process if alive and abs(process.create_time() - created) < 1 else None
    except (psutil.Error, TypeError, ValueError):
        return None


def _end_all(directory: Path) -> bool:
    """End every process of the local cluster in `directory`; False if there was none."""
    found = _family(directory)
    # `ray start --block` ends its children in the right order.
    for main in found:
        with contextlib.suppress(psutil.Error):
            if {"start", "--head", "--block"} <= set(main.cmdline()):
                main.terminate()
                main.wait(_STOP_TIMEOUT_S)
    _, left = psutil.wait_procs(found, timeout=_LAST_BREATH_S)
    left = list({*left, *_family(directory)})
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(left, timeout=_LAST_BREATH_S)
    return bool(found)


def _family(directory: Path) -> list[psutil.Process]:
    """Return the living processes that carry the cluster's mark, and their children."""
    me = psutil.Process()
    kept = {me, *me.parents()}  # if this runs inside of that cluster
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == str(directory):
                found.update([process, *process.children(recursive=True)])
    return sorted(found - kept, key=lambda process: process.pid)
