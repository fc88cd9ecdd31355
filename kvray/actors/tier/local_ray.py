"""A Ray cluster of one node, started and ended by kvray, for a machine that has none.

The cluster's sessions, token and address lie in one directory of this user; HOME and /tmp/ray stay
as they are.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from kvray.actors.owner.ownership import is_own
from kvray.actors.tier.ray_node import RayNode, ray_environ
from kvray.errors import ConfigError

_STOP_TIMEOUT_S = 20.0
_LAST_BREATH_S = 5.0
_MARK = "KVRAY_LOCAL_RAY"
"""Variable of every process of a local cluster: its directory. It identifies processes that a
killed parent left behind."""
_DASHBOARD_PORT = 8265
_DASHBOARD = re.compile(r"RAY_API_SERVER_ADDRESS='(http://[^']+)'")
_STATE_FILE = "ray.json"
_SOCKET_PATH = "ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""The longest path of a socket of Ray; Linux takes up to 107 bytes."""


class LocalRay(NamedTuple):
    """A running local cluster."""

    address: str
    token: str
    pid: int
    dashboard_url: str | None

    def __repr__(self) -> str:
        return f"LocalRay({self.address}, process {self.pid})"  # its token is no one's to read

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
        # Its age would not tell: it counts from the boot, which moves when somebody sets the clock.
        return local if _is_of(psutil.Process(local.pid), directory) else None
    except (OSError, ValueError, TypeError, RecursionError, psutil.Error):
        return None


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
        check()
        head = RayNode(
            "Ray",
            "--head",
            f"--port={port or 0}",
            f"--include-dashboard={'true' if dashboard else 'false'}",
            f"--dashboard-port={_dashboard_port()}",
            "--no-monitor",  # one node never scales
            temp_dir=directory / "ray",
            log=directory / "ray-start.log",
            environ={
                **ray_environ(token),
                # Otherwise Ray waits half a minute for actors to move to another node.
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
                _MARK: str(directory),
            },
            dies_with_parent=die_with_parent,
        )

        def clear() -> None:
            _end_all(directory)
            shutil.rmtree(directory / "ray", ignore_errors=True)  # no address of before is read

        head.begin()
        assert head.process is not None, "it has begun"
        try:
            address = head.wait(clear=clear, waiting=waiting)
        finally:
            # It outlives this object, which would warn of that, or is ended by its mark.
            head.process.returncode = 0
        found = _DASHBOARD.search(head.said()) if dashboard else None
        local = LocalRay(
            address=address,
            token=token,
            pid=head.process.pid,
            dashboard_url=found[1] if found is not None else None,
        )
        state = directory / _STATE_FILE
        state.touch(mode=0o600)
        state.write_text(json.dumps(local._asdict()))
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
        except BaseException as error:
            _end_all(directory)
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, FileNotFoundError):
                says = f"{directory} was removed while Ray started, as by `kvray down`"
                raise ConfigError(f"{says}; run this again.") from None
            raise


def _check_port(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ConfigError(
            f"Port {port} cannot be used for Ray ({error.strerror}); choose another --port."
        ) from None


def _dashboard_port() -> int:
    """Return the one that Ray takes by itself, or any if another dashboard has it."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", _DASHBOARD_PORT)):
        return _DASHBOARD_PORT
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


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
    """Return the living processes of the cluster, and their children."""
    me = psutil.Process()
    kept = {me, *me.parents()}  # if this runs inside of that cluster
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _is_of(process, directory):
                found.update([process, *process.children(recursive=True)])
    return sorted(found - kept, key=lambda process: process.pid)


def _is_of(process: psutil.Process, directory: Path) -> bool:
    """Return whether a process has the cluster's mark, or is a worker of it.

    A worker's title is written over its environment, but its logs are open in the directory.
    """
    if process.environ().get(_MARK) == str(directory):
        return True
    is_worker = any(word.startswith("ray::") for word in process.cmdline()[:1])
    return is_worker and any(one.path.startswith(f"{directory}/") for one in process.open_files())
