"""A Ray cluster of several nodes on this machine: each its own processes, memory and address.

With a network each node has an address and a cable. Without one the nodes share the loopback
device, and differ by their node ids. Nothing outlives the process that made it, however that ends.
"""

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from kvray.actors.tier.ray_node import RayNode, ray_environ
from kvray.errors import ConfigError
from kvray.lab.chaos.cleanup import MARK
from kvray.lab.chaos.network import Network

_KILL_TIMEOUT_S = 5.0
_NODE_ID = "--node_id="

Environ = dict[str, str]
RESOURCE = "kvray_shard"
"""Ray resource of the nodes that get a shard; the head does not have it."""
PAIR = "kvray_pair"
"""The same of the first two alone: for a tier of two nodes on a machine of more."""
_CLOSE_TIMEOUT_S = 30.0
_PORT = 6379


def begin(
    module: str, *args: str, env: Environ, enter: Sequence[str] = ()
) -> "subprocess.Popen[bytes]":
    """Begin to run a module of Python in silence; `enter` is the beginning of the command."""
    return subprocess.Popen(
        [*enter, sys.executable, "-m", module, *args],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


class Node:
    """One Ray node. `Machine` makes it; anyone may kill it and start it again."""

    def __init__(self, name: str, ray: RayNode, *, environ: Environ, arena_dir: Path) -> None:
        """Describe a node that is not running yet; engines of it need the same `environ`."""
        self.name = name
        self.ray = ray
        self.environ = environ
        self.arena_dir = arena_dir

    def start(self) -> str:
        """Start it and return the address of a head when it has joined; its id is another one."""
        self.ray.begin()
        return self.ray.wait()

    def kill(self) -> None:
        """End all of its processes at once, the raylet first. Twice is fine."""
        family = self.ray.family()
        for process in sorted(family, key=lambda one: "raylet" not in _title(one)):
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=_KILL_TIMEOUT_S)
        if self.ray.process is not None:
            self.ray.process.kill()
            self.ray.process.wait()

    def empty(self) -> None:
        """Remove its blocks in memory and on disk: another machine comes in its place."""
        nvme = self.environ.get("KVRAY_NVME__DIR")
        for path in (*self.arena_dir.glob("kvray-*"), *([Path(nvme)] if nvme else [])):
            shutil.rmtree(path, ignore_errors=True)

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return its processes of actors whose class or repr begins with `kind`."""
        return actors_of(self.ray.family(), kind)

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
        return next((one for one in self.ray.family() if _title(one).endswith("/raylet")), None)


def actors_of(family: Sequence[psutil.Process], kind: str) -> list[psutil.Process]:
    """Return the processes of actors whose class or repr begins with `kind`."""
    return [one for one in family if _title(one).startswith(f"ray::{kind}")]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return "".join(process.cmdline()[:1])
    return ""


class Machine:
    """One head, without a shard, and nodes; Ray writes to `directory`, users to `scratch`."""

    def __init__(
        self,
        *,
        num_nodes: int = 2,
        has_network: bool = False,
        mount_bytes: int | None = None,
        disk_bytes: int | None = None,
        has_nvme: bool = False,
        environ: Mapping[str, str] | None = None,
        head_options: Sequence[str] = ("--port=0", "--no-monitor"),
    ) -> None:
        """Start the cluster, with `num_nodes` beside the head; return when all have joined.

        A network gives each node an address and a cable. `mount_bytes` is the size of a tmpfs for
        each arena (None: a directory in /dev/shm), `disk_bytes` of one for everything that Ray
        writes (None: a directory in /tmp). These three need root. `has_nvme` gives each node a
        directory of its own for blocks on disk. Every node has the variables of this process, but
        for kvray's settings, and those of `environ`. With a network the head's port is another.
        ConfigError: a node did not start, or this machine allows no network.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="kvm-"))  # short: Ray's sockets lie in it
        self.scratch = Path("/dev/shm") / self.directory.name
        self._cleanup = subprocess.Popen(
            [sys.executable, "-m", "kvray.lab.chaos.cleanup", self.directory, self.scratch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.scratch.mkdir(mode=0o700)
        self.network: Network | None = None
        self.nodes: list[Node] = []
        self._mount_bytes = mount_bytes
        self._has_nvme = has_nvme
        self._spare: Node | None = None
        self._holders: list[subprocess.Popen[bytes]] = []
        self._described: list[Node] = []
        self._own = {
            **ray_environ(secrets.token_hex(16)),
            **(environ or {}),
            MARK: str(self.directory),
            "RAY_USAGE_STATS_ENABLED": "0",
            "UCX_TLS": "tcp",
        }
        self._own.pop("RAY_ADDRESS", None)
        try:
            if disk_bytes is not None:
                _mount(self.directory, disk_bytes)
            if has_network:
                self.network = Network(self._spawn_holder, num_hosts=num_nodes + 1)
            port = [f"--port={_PORT}"] if has_network else []
            options = ("--head", "--include-dashboard=false", *head_options, *port)
            self.head = self._describe(0, "head", self.scratch / "head", *options)
            self.address = self.head.start()
            for number in range(1, num_nodes + 1):
                self.nodes.append(self._describe_node(number))
                self.nodes[-1].ray.begin()
            for node in self.nodes:
                node.ray.wait()
        except BaseException:
            self.close()
            raise

    def environ(self) -> Environ:
        """Return the variables of a process that talks to this cluster."""
        return {**self._own, "RAY_ADDRESS": self.address}

    def run(self, *args: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """Run a command as a user on the head would; ConfigError: it did not end in time."""
        try:
            return subprocess.run(
                [*self._enter(0), sys.executable, "-m", "kvray", *args],
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"`kvray {args[0]}` did not end within {timeout_s:.0f} s.") from None

    def begin(self, module: str, *args: str) -> "subprocess.Popen[bytes]":
        """Begin to run a module of Python as a user on the head would."""
        return begin(module, *args, env=self.environ(), enter=self._enter(0))

    def write_config(
        self,
        settings: Mapping[str, Mapping[str, Any]],
        *,
        cluster_name: str = "nodes",
        resource: str = RESOURCE,
    ) -> Path:
        """Write the configuration of a tier on the nodes with `resource`, with Ray's address."""
        values = {name: dict(section) for name, section in settings.items()}
        values.setdefault("ray", {})["address"] = self.address
        values.setdefault("shard", {})["resource"] = resource
        path = self.scratch / f"{cluster_name}.yaml"
        path.write_text(yaml.safe_dump({"cluster_name": cluster_name, **values}))
        return path

    def actors(self, kind: str) -> list[psutil.Process]:
        """Return the processes of actors of any node whose class or repr begins with `kind`."""
        return [process for node in self._described for process in node.actors(kind)]

    def begin_join(self) -> Node:
        """Begin to start one more node, and return it; there may be one at a time."""
        number = len(self.nodes) + 1
        if self._spare is None:
            if self.network is not None:
                self.network.plug_in(number)
            self._spare = self._describe_node(number)
        self.nodes.append(self._spare)
        self._spare.ray.begin()
        return self._spare

    def take_away(self, node: Node) -> None:
        """End a node that has joined, with all that it has."""
        self.nodes.remove(node)
        node.kill()
        node.empty()

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
            child.kill()  # had the cleanup no time for it
            child.wait()
        for node in self._described:
            node.kill()

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe_node(self, number: int) -> Node:
        parent = self.scratch if self._mount_bytes is None else self.directory
        arena_dir = parent / f"shm{number}"
        arena_dir.mkdir(mode=0o700)
        if self._mount_bytes is not None:
            _mount(arena_dir, self._mount_bytes)
        has = {RESOURCE: 1, PAIR: 1} if number <= 2 else {RESOURCE: 1}
        options = (f"--address={self.address}", f"--resources={json.dumps(has)}")
        return self._describe(number, f"node{number}", arena_dir, *options)

    def _describe(self, number: int, name: str, arena_dir: Path, *options: str) -> Node:
        host = "127.0.0.1" if self.network is None else self.network.address(number)
        environ = {**self._own, "KVRAY_ARENA__DIR": str(arena_dir)}
        if self._has_nvme:
            environ["KVRAY_NVME__DIR"] = str(self.directory / f"{name}-nvme")
        ray = RayNode(
            f"The Ray node {name}",
            *options,
            f"--node-ip-address={host}",
            "--num-cpus=0",
            temp_dir=self.directory / name,
            log=self.directory / f"{name}.log",
            environ=environ,
            enter=self._enter(number),
        )
        node = Node(name, ray, environ=environ, arena_dir=arena_dir)
        self._described.append(node)
        return node

    def _enter(self, number: int) -> list[str]:
        return [] if self.network is None else self.network.enter(number)

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
