"""One Ray node on this machine: `ray start --block` in a process of its own."""

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from kvray.actors.tier.local_ray import OVERWHELMED
from kvray.actors.tier.rollout import Patience
from kvray.errors import ConfigError

_STILL_S = 90.0
_STARTS_MAX = 10
"""Ray gives its parts half a minute, so a node that gives up is started again."""
_START_PAUSE_S = 1.0
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.05
_HAS_STARTED = "Ray runtime started"
_NODE_ID = "--node_id="

Environ = dict[str, str]


class Node:
    """One Ray node. `Machine` makes it; anyone may kill it and start it again."""

    def __init__(
        self, name: str, *, command: list[str], environ: Environ, log: Path, arena_dir: Path
    ) -> None:
        """Describe a node that is not running yet; engines of it need the same `environ`."""
        self.name = name
        self.environ = environ
        self.arena_dir = arena_dir
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its main process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_started(self) -> bool:
        """Whether it has joined the cluster since its last start."""
        return self.is_running and _HAS_STARTED in self._log.read_text(errors="replace")

    def begin_start(self) -> None:
        """Start it, and do not wait for it; it gets another node id each time."""
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_started(self) -> None:
        """Return when it has joined; if it gives up, it is started again.

        Raises:
            ConfigError: it was killed, gave up too often, or made no progress.
        """
        patience, starts = Patience(_STILL_S), 1
        while not self.has_started:
            is_late = patience.is_over((starts, self._log.stat().st_size, len(self.family())))
            if self._has_given_up() and not is_late and starts < _STARTS_MAX:
                time.sleep(_START_PAUSE_S)
                self.begin_start()
                starts += 1
            elif is_late or not self.is_running:
                said = " ".join(self._log.read_text(errors="replace").split()[-100:])
                raise ConfigError(f"The Ray node {self.name} did not start; it said: {said}")
            time.sleep(_POLL_S)

    def _has_given_up(self) -> bool:
        """Return whether it ended because its parts, or the head, were too slow for Ray."""
        if self._process is None or not (self._process.poll() or 0) > 0:
            return False
        return OVERWHELMED.search(self._log.read_text(errors="replace")) is not None

    def start(self) -> None:
        """Start it and return when it has joined.

        Raises:
            ConfigError: as `wait_started`.
        """
        self.begin_start()
        self.wait_started()

    def kill(self) -> None:
        """End all of its processes at once, the raylet first. Twice is fine."""
        family = self.family()
        for process in sorted(family, key=lambda one: "raylet" not in _title(one)):
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=_KILL_TIMEOUT_S)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def empty(self) -> None:
        """Remove its blocks in memory and on disk: another machine comes in its place."""
        found = [*self.arena_dir.glob("kvray-*")]
        found += [Path(self.environ[name]) for name in ("KVRAY_NVME__DIR",) if name in self.environ]
        for path in found:
            shutil.rmtree(path, ignore_errors=True)

    def family(self) -> list[psutil.Process]:
        """Return its living processes."""
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                main = psutil.Process(self._process.pid)
                return [main, *main.children(recursive=True)]
        return []

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return its processes of actors whose class or repr begins with `kind`."""
        return [one for one in self.family() if _title(one).startswith(f"ray::{kind}")]

    @property
    def node_id(self) -> str | None:
        """Ray's id of it since its last start; None if it is not running."""
        with contextlib.suppress(psutil.Error):
            if (raylet := self.raylet()) is not None:
                told = (one.removeprefix(_NODE_ID) for one in raylet.cmdline() if _NODE_ID in one)
                return next(told, None)
        return None

    def raylet(self) -> psutil.Process | None:
        """Return the raylet, with which the node lives and dies."""
        return next((one for one in self.family() if _title(one).endswith("/raylet")), None)


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1])
    return ""
