"""A Ray cluster of several nodes on this machine: each its own processes, memory and address.

Every node is `ray start --block` in a process of its own with an environment of its own. With a
network each has an address and a cable; without one they share the loopback device, and are told
from each other by their node ids. Nothing outlives whoever made it, however that ends.
"""

import contextlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from kvray.actors.local_ray import read_address
from kvray.cli.chaos.keeper import MARK
from kvray.cli.chaos.network import Network
from kvray.config import without_settings
from kvray.errors import ConfigError

RESOURCE = "kvray_shard"
"""Ray resource of the nodes that are to have a shard, which the head has not."""

_KEEPER = "kvray.cli.chaos.keeper"
_OBJECT_STORE_BYTES = 80 * 2**20
_START_TIMEOUT_S = 90.0
_ADDRESS_TIMEOUT_S = 10.0
_STARTS_MAX = 3
"""How often a node is started that ends by itself: Ray gives some of its own waits few seconds."""
_START_PAUSE_S = 1.0
_CLOSE_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0
_KILL_TIMEOUT_S = 5.0
_PORT = 6379
_SHM = Path("/dev/shm")
_HAS_STARTED = "Ray runtime started"

Environ = dict[str, str]


class Node:
    """One Ray node. Made by `Machine`; killed, stopped and started again by whoever likes."""

    def __init__(
        self, name: str, *, command: list[str], environ: Environ, directory: Path, arena_dir: Path
    ) -> None:
        """Describe a node that is not running yet.

        Args:
            name: for people.
            command: what starts it.
            environ: variables of all its processes; engines of this node need the same ones.
            directory: where its log goes.
            arena_dir: its `arena.dir`.
        """
        self.name = name
        self.environ = environ
        self.arena_dir = arena_dir
        self._command = command
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its main process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def has_started(self) -> bool:
        """Whether it said that it has joined the cluster since it was started last."""
        return self.is_running and _HAS_STARTED in self._log.read_text(errors="replace")

    @property
    def _has_given_up(self) -> bool:
        """Whether its main process ended by itself, with an error."""
        return self._process is not None and (self._process.poll() or 0) > 0

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

    def wait_started(
        self,
        *,
        timeout_s: float = _START_TIMEOUT_S,
        waiting: Callable[[float], None] = lambda elapsed_s: None,
    ) -> None:
        """Return when it has joined; one that gives up is started again.

        Raises:
            ConfigError: it was killed, gave up too often, or did not join in time.
        """
        began, starts = time.monotonic(), 1
        while not self.has_started:
            elapsed_s = time.monotonic() - began
            waiting(elapsed_s)
            if elapsed_s < timeout_s and self._has_given_up and starts < _STARTS_MAX:
                time.sleep(_START_PAUSE_S)
                self.begin_start()
                starts += 1
            elif elapsed_s > timeout_s or not self.is_running:
                said = " ".join(self._log.read_text(errors="replace").split()[-100:])
                raise ConfigError(f"The Ray node {self.name} did not start; it said: {said}")
            time.sleep(0.05)

    def start(self) -> None:
        """Start it and return when it has joined.

        Raises:
            ConfigError: as `wait_started`.
        """
        self.begin_start()
        self.wait_started()

    def stop(self) -> None:
        """Let it leave the cluster in order. Twice is fine."""
        if self._process is not None and self.is_running:
            family = self.family()
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT_S)
            psutil.wait_procs(family, timeout=_KILL_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End all of its processes at once, the raylet first. Twice is fine."""
        family = self.family()
        for process in sorted(family, key=lambda one: _title(one).find("raylet") < 0):
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=_KILL_TIMEOUT_S)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def family(self) -> list[psutil.Process]:
        """Return its living processes."""
        if self._process is None:
            return []
        try:
            main = psutil.Process(self._process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.Error:
            return []

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return its processes of actors whose class or repr begins with `kind`."""
        return [one for one in self.family() if _title(one).startswith(f"ray::{kind}")]

    def raylet(self) -> psutil.Process | None:
        """Return the process that Ray's node stands and falls with."""
        found = [one for one in self.family() if _title(one).endswith("/raylet")]
        return found[0] if found else None


class Machine:
    """One head, which gets no shard, and nodes that do; `close` removes everything.

    Ray writes to `directory`, and whoever uses the machine to `scratch`.
    """

    def __init__(
        self,
        *,
        num_nodes: int = 2,
        has_network: bool = False,
        mount_bytes: int | None = None,
        disk_bytes: int | None = None,
        has_nvme: bool = False,
        environ: Mapping[str, str] | None = None,
        waiting: Callable[[float], None] = lambda elapsed_s: None,
    ) -> None:
        """Start the cluster and return when all nodes have joined.

        Args:
            num_nodes: nodes beside the head.
            has_network: give each an address and a cable; needs root.
            mount_bytes: give each a tmpfs of that size for its arena; needs root. None: a
                directory in /dev/shm.
            disk_bytes: put everything that Ray writes on a tmpfs of that size; needs root.
            has_nvme: give each a directory of its own for blocks on disk.
            environ: variables of every node besides those of this process, whose settings of
                kvray are left out.
            waiting: called a few times a second while Ray starts.

        Raises:
            ConfigError: a node did not start, or there is no network to be had.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="kvm-"))  # short: Ray's sockets lie in it
        self.scratch = _SHM / self.directory.name
        self._keeper = _start_keeper(self.directory, self.scratch)
        self.scratch.mkdir(mode=0o700)
        self.token = secrets.token_hex(16)
        self._has_nvme = has_nvme
        self.network: Network | None = None
        self.nodes: list[Node] = []
        self._holders: list[subprocess.Popen[bytes]] = []
        self._described: list[Node] = []
        self._own = {**without_settings(), **(environ or {}), MARK: str(self.directory)}
        self._own |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "UCX_TLS": "tcp",
        }
        self._own.pop("RAY_ADDRESS", None)
        try:
            if disk_bytes is not None:
                _mount(self.directory, disk_bytes)
            self._start(num_nodes, has_network, mount_bytes, waiting)
        except BaseException:
            self.close()
            raise

    def environ(self) -> Environ:
        """Return the variables of a process that talks to this cluster."""
        return {**self._own, "RAY_ADDRESS": self.address}

    def command(self, *args: str) -> list[str]:
        """Return what runs a command of kvray where this cluster can be reached."""
        return [*self._enter(0), sys.executable, "-m", "kvray", *args]

    def run(self, *args: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """Run a command of kvray as somebody on the head would.

        Raises:
            ConfigError: it did not end in time, and was killed.
        """
        try:
            return subprocess.run(
                self.command(*args),
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"`kvray {args[0]}` did not end within {timeout_s:.0f} s.") from None

    def write_config(
        self, settings: Mapping[str, Mapping[str, Any]], *, cluster_name: str = "nodes"
    ) -> Path:
        """Write a tier's configuration for this cluster, and return its path.

        Args:
            settings: section -> key -> value, besides where Ray is and who gets a shard.
            cluster_name: names the tier.
        """
        values = {name: dict(section) for name, section in settings.items()}
        values.setdefault("ray", {})["address"] = self.address
        values.setdefault("shard", {})["resource"] = RESOURCE
        path = self.scratch / "kvray.yaml"
        path.write_text(yaml.safe_dump({"cluster_name": cluster_name, **values}))
        return path

    def family(self) -> list[psutil.Process]:
        """Return the living processes of the head and of all nodes."""
        return [process for node in (self.head, *self.nodes) for process in node.family()]

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return the processes of actors of any node whose class or repr begins with `kind`."""
        return [process for node in (self.head, *self.nodes) for process in node.actors(kind)]

    def close(self) -> None:
        """End every process, and remove every file, mount and network. Twice is fine."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        for child in self._holders:
            child.wait()
        for node in self._described:
            node.kill()

    def __enter__(self) -> "Machine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self,
        num_nodes: int,
        has_network: bool,
        mount_bytes: int | None,
        waiting: Callable[[float], None],
    ) -> None:
        if has_network:
            self.network = Network(self._spawn_holder)
            for _ in range(num_nodes + 1):
                self.network.plug_in()
        self.head = self._describe(0, ["--head", f"--port={_PORT if has_network else 0}"])
        self.head.begin_start()
        self.head.wait_started(waiting=waiting)
        self.address = self._await_address()
        for number in range(1, num_nodes + 1):
            arena_dir = self._make_arena_dir(number, mount_bytes)
            resources = json.dumps({RESOURCE: 1})
            options = [f"--address={self.address}", f"--resources={resources}"]
            self.nodes.append(self._describe(number, options, arena_dir))
            self.nodes[-1].begin_start()
        for node in self.nodes:
            node.wait_started(waiting=waiting)

    def _await_address(self) -> str:
        """Return the head's address, which it writes down a moment after its start."""
        deadline = time.monotonic() + _ADDRESS_TIMEOUT_S
        while not (address := read_address(self.directory / "head")):
            if time.monotonic() > deadline:
                raise ConfigError(f"Ray's head wrote no address within {_ADDRESS_TIMEOUT_S:.0f} s.")
            time.sleep(0.05)
        return address

    def _describe(self, number: int, options: list[str], arena_dir: Path | None = None) -> Node:
        name = f"node{number}" if number else "head"
        host = "127.0.0.1" if self.network is None else self.network.address(number)
        command = [
            *self._enter(number),
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options),
            f"--node-ip-address={host}",
            f"--temp-dir={self.directory / name}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--num-cpus=0",
            "--disable-usage-stats",
        ]
        if number == 0:
            command.append("--include-dashboard=false")
        arena_dir = arena_dir or self.scratch / name
        environ = {**self._own, "KVRAY_ARENA__DIR": str(arena_dir)}
        if self._has_nvme:
            environ["KVRAY_NVME__DIR"] = str(self.directory / f"{name}-nvme")
        node = Node(
            name,
            command=command,
            environ=environ,
            directory=self.directory,
            arena_dir=arena_dir,
        )
        self._described.append(node)
        return node

    def _enter(self, number: int) -> list[str]:
        return [] if self.network is None else self.network.enter(number)

    def _make_arena_dir(self, number: int, mount_bytes: int | None) -> Path:
        if mount_bytes is None:
            directory = self.scratch / f"node{number}"
            directory.mkdir(parents=True, mode=0o700)
            return directory
        directory = self.directory / f"shm{number}"
        directory.mkdir()
        _mount(directory, mount_bytes)
        return directory

    def _spawn_holder(self, command: list[str]) -> int:
        child = subprocess.Popen(
            command, env=self._own, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self._holders.append(child)
        return child.pid


def _start_keeper(*directories: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", _KEEPER, *map(str, directories)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _mount(directory: Path, size: int) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "kvray", str(directory)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"No tmpfs can be mounted at {directory}: {done.stderr.strip()}.")


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1])
    return ""
