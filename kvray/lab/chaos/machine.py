"""A Ray cluster of several nodes on this machine: each its own processes, memory and address.

With a network each node has an address and a cable. Without one the nodes share the loopback
device, and differ by their node ids. Nothing outlives the process that made it, however that ends.
"""

import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from kvray.actors.tier.local_ray import read_address
from kvray.config import without_settings
from kvray.errors import ConfigError
from kvray.lab.chaos.cleanup import MARK
from kvray.lab.chaos.network import Network
from kvray.lab.chaos.node import Environ, Node, Waiting

RESOURCE = "kvray_shard"
"""Ray resource of the nodes that get a shard; the head does not have it."""

_OBJECT_STORE_BYTES = 80 * 2**20
_ADDRESS_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 30.0
_PORT = 6379
_SHM = Path("/dev/shm")


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
        waiting: Waiting = lambda elapsed_s: None,
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
            ConfigError: a node did not start, or this machine allows no network.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="kvm-"))  # short: Ray's sockets lie in it
        self.scratch = _SHM / self.directory.name
        self._cleanup = subprocess.Popen(
            [sys.executable, "-m", "kvray.lab.chaos.cleanup", self.directory, self.scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.scratch.mkdir(mode=0o700)
        self.token = secrets.token_hex(16)
        self._has_nvme = has_nvme
        self.network: Network | None = None
        self.nodes: list[Node] = []
        self._holders: list[subprocess.Popen[bytes]] = []
        self._described: list[Node] = []
        self._own = {
            **without_settings(),
            **(environ or {}),
            MARK: str(self.directory),
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
        """Return the command line that runs kvray on the head."""
        return [*self._enter(0), sys.executable, "-m", "kvray", *args]

    def run(self, *args: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """Run a command of kvray as a user on the head would.

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
            settings: section -> key -> value, besides Ray's address and the shards' resource.
            cluster_name: names the tier.
        """
        values = {name: dict(section) for name, section in settings.items()}
        values.setdefault("ray", {})["address"] = self.address
        values.setdefault("shard", {})["resource"] = RESOURCE
        path = self.scratch / f"{cluster_name}.yaml"
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
        assert self._cleanup.stdin is not None
        self._cleanup.stdin.close()
        try:
            self._cleanup.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._cleanup.kill()
            self._cleanup.wait()
        for child in self._holders:
            child.wait()
        for node in self._described:
            node.kill()

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, num_nodes: int, has_network: bool, mount_bytes: int | None, waiting: Waiting
    ) -> None:
        if has_network:
            self.network = Network(self._spawn_holder)
            for _ in range(num_nodes + 1):
                self.network.plug_in()
        port = _PORT if has_network else 0
        self.head = self._describe(
            0, self.scratch / "head", "--head", f"--port={port}", "--include-dashboard=false"
        )
        self.head.begin_start()
        self.head.wait_started(waiting=waiting)
        self.address = self._await_address()
        for number in range(1, num_nodes + 1):
            arena_dir = self._make_arena_dir(number, mount_bytes)
            resources = f"--resources={json.dumps({RESOURCE: 1})}"
            node = self._describe(number, arena_dir, f"--address={self.address}", resources)
            self.nodes.append(node)
            node.begin_start()
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

    def _describe(self, number: int, arena_dir: Path, *options: str) -> Node:
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
        environ = {**self._own, "KVRAY_ARENA__DIR": str(arena_dir)}
        if self._has_nvme:
            environ["KVRAY_NVME__DIR"] = str(self.directory / f"{name}-nvme")
        node = Node(
            name, command=command, environ=environ, directory=self.directory, arena_dir=arena_dir
        )
        self._described.append(node)
        return node

    def _enter(self, number: int) -> list[str]:
        return [] if self.network is None else self.network.enter(number)

    def _make_arena_dir(self, number: int, mount_bytes: int | None) -> Path:
        if mount_bytes is None:
            directory = self.scratch / f"node{number}"
            directory.mkdir(parents=True, mode=0o700)
        else:
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


def _mount(directory: Path, size: int) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "kvray", str(directory)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"No tmpfs can be mounted at {directory}: {done.stderr.strip()}.")
