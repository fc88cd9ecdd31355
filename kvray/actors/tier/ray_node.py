"""A node of a Ray cluster: `ray start --block` in a process of its own.

It ends all its children when it ends. `ray stop` would end every Ray of the machine.
"""

import contextlib
import ctypes
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from kvray.actors.tier.rollout import Patience
from kvray.config import without_settings
from kvray.errors import ConfigError

OBJECT_STORE_BYTES = 80 * 2**20
"""The least Ray accepts: kvray keeps no blocks in Ray's object store."""
_START = (sys.executable, "-m", "ray.scripts.scripts", "start")
_STILL_S = 90.0
"""How long a start may show no progress: a busy machine is slow, a frozen process never ends."""
_STARTS_MAX = 10
"""Ray gives its parts half a minute, so a node that gives up is started again."""
_POLL_S = 0.1
_FRAMES = re.compile(r"(?s).*\n  [^\n]*\n")
"""What Ray writes up to the end of a traceback, but for the error."""
_OVERWHELMED = re.compile("imed out|to connect to GCS|may not have started|ode info")
"""What Ray says when its parts, or the head, took longer than that, as on a busy machine."""
_PATIENT = {
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_worker_niceness": "0",
}
"""Variables of a Ray that gives its own processes time to start, and the tier's their turn."""
_HAS_STARTED = "Ray runtime started"
_PR_SET_PDEATHSIG = 1


def ray_environ(token: str) -> dict[str, str]:
    """Return the variables of a cluster's nodes, without kvray's settings of this process."""
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return {**_PATIENT, **without_settings(), **own}


def read_address(temp_dir: Path) -> str:
    """Return the address that a head with this `--temp-dir` has written to a file; "": not yet."""
    try:
        return (temp_dir / "ray_current_cluster").read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


class RayNode:
    """A node that is started, and may be started again after its end."""

    def __init__(
        self,
        name: str,
        *options: str,
        temp_dir: Path,
        log: Path,
        environ: Mapping[str, str],
        enter: Sequence[str] = (),
        dies_with_parent: bool = False,
    ) -> None:
        """Describe a node that is not running yet.

        Args:
            name: it stands in errors.
            options: of `ray start`; a head has `--head`.
            temp_dir: where Ray writes its sessions.
            log: what it says since its last start.
            environ: all variables of its processes.
            enter: the beginning of a command that runs it elsewhere.
            dies_with_parent: end it with the thread that starts it, however its process dies.
        """
        self._name = name
        self._is_head = "--head" in options
        self._temp_dir = temp_dir
        self._log = log
        self._environ = environ
        self._dies_with_parent = dies_with_parent
        self._command = [
            *enter,
            *_START,
            *("--block", "--disable-usage-stats", "--include-log-monitor=false"),
            "--log-color=false",  # what it says when it fails is shown as it is
            f"--temp-dir={temp_dir}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            *options,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its main process lives."""
        return self.process is not None and self.process.poll() is None

    @property
    def has_started(self) -> bool:
        """Whether it has joined the cluster since its last start."""
        return self.is_running and _HAS_STARTED in self.said()

    def begin(self) -> None:
        """Start it, and do not wait for it."""
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent if self._dies_with_parent else None,  # noqa: PLW1509
            )

    def wait(
        self,
        *,
        clear: Callable[[], None] = lambda: None,
        waiting: Callable[[float], None] = lambda elapsed_s: None,
    ) -> str:
        """Return the address of the cluster's head, or "" for other nodes, when it has joined.

        A node that gives up is started again, after `clear` has removed what is left of it.
        `waiting` is called all the time with the seconds it has taken.

        Raises:
            ConfigError: it was killed, gave up too often, or made no progress.
        """
        patience, starts, began = Patience(_STILL_S), 1, time.monotonic()
        while True:
            took_s = time.monotonic() - began
            waiting(took_s)
            if self.has_started:
                address = read_address(self._temp_dir) if self._is_head else ""
                if address or not self._is_head:
                    return address
            if not self.is_running:
                status = self.process.poll() if self.process is not None else None
                has_given_up = (status or 0) > 0 and _OVERWHELMED.search(self.said())
                if not has_given_up or starts == _STARTS_MAX:
                    raise self._failure(f"but ended with status {status}")
                clear()
                self.begin()
                starts += 1
            elif patience.is_over((starts, *self._written())):
                raise self._failure(f"and made no progress within {took_s:.0f} s")
            time.sleep(_POLL_S)

    def said(self) -> str:
        """Return what it has written since its last start."""
        return self._log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Return its living processes."""
        with contextlib.suppress(psutil.Error):
            if self.process is not None:
                main = psutil.Process(self.process.pid)
                return [main, *main.children(recursive=True)]
        return []

    def _failure(self, how: str) -> ConfigError:
        said = _FRAMES.sub("", self.said()).strip() or self.said()
        said = " ".join(said.split()[-100:])
        return ConfigError(f"{self._name} did not start, {how}; it said: {said}")

    def _written(self) -> tuple[int, int]:
        """Return the number of files that a starting Ray has written, and their bytes.

        What it writes again and again, idle or not, is left out.
        """
        number, size = len(self.family()), self._log.stat().st_size
        for path in self._temp_dir.rglob("*"):
            if not path.name.startswith("debug_state"):
                with contextlib.suppress(OSError):
                    number, size = number + 1, size + path.lstat().st_size
        return number, size


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
