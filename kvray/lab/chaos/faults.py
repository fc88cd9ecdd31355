"""Makes the faults of a schedule happen, and undoes them."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from kvray.lab.chaos.campaign import NotNow, NotYet
from kvray.lab.chaos.departures import Departures
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import Network
from kvray.lab.chaos.node import Node
from kvray.lab.chaos.schedule import Fault
from kvray.lab.chaos.servers import Server

_FLIPS = 24
_FILE_CHUNK = bytes(4 * 2**20)
_TRANSFER_MBIT = 8
_TRANSFER_BYTES_PER_S = 500_000
"""Only a transfer brings so much over a cable of that speed."""
_VANDAL_TIMEOUT_S = 30.0

T = TypeVar("T")
Undo = Callable[[], None]


class Faults:
    """Strikes parts of a machine; `end` undoes every fault that can be undone."""

    def __init__(
        self,
        machine: Machine,
        servers: Sequence[Server],
        config_path: Path,
        welcome: Callable[[Node], Server],
    ) -> None:
        """Strike the nodes of `machine`, the tier on it, and `servers`, its replicas.

        `welcome` begins to start a replica on a node that joins.
        """
        self._machine = machine
        self._servers = list(servers)
        self._cluster_name = config_path.stem
        self._welcome = welcome
        self._departures = Departures(machine, str(config_path))
        self._joined: Server | None = None
        self._undo: dict[int, Undo] = {}
        self._seen: dict[int, tuple[float, int]] = {}
        """Fault -> time of the last look at its node's cable, and the bytes received until then."""
        self._vandals: list[subprocess.Popen[bytes]] = []

    def strike(self, fault: Fault) -> None:
        """Make a fault happen.

        Raises:
            NotNow: it has no target.
        """
        verb, _, part = fault.kind.partition("_")
        if verb == "kill":
            self._kill(part, fault)
        elif verb == "stop":
            self._undo[fault.number] = self._stop(part, fault)
        elif (undo := getattr(self, f"_{fault.kind}")(fault)) is not None:
            self._undo[fault.number] = undo

    def end(self, fault: Fault) -> None:
        """Undo a fault. Twice is fine."""
        self._seen.pop(fault.number, None)
        self._undo.pop(fault.number, lambda: None)()

    def tend(self) -> None:
        """Restart the nodes that are down, and repeat orders that failed; call it often."""
        self._departures.tend()
        for node in self._machine.nodes:
            if not node.is_running:
                node.kill()  # some of its processes may be left
                node.begin_start()
        self._vandals = [one for one in self._vandals if one.poll() is None]

    def close(self) -> None:
        """Undo everything. Twice is fine."""
        while self._undo:
            self._undo.popitem()[1]()
        self._departures.close()
        for vandal in self._vandals:
            vandal.kill()
            vandal.wait()

    # -- ends and stops ---------------------------------------------------------------------------

    def _kill(self, part: str, fault: Fault) -> None:
        if part == "engine":
            self._send(signal.SIGKILL, fault)
        elif part == "raylet":
            self._departures.require_all_there()
            self._node(fault).kill()
        else:
            self._process(part, fault).kill()

    def _stop(self, part: str, fault: Fault) -> Undo:
        if part == "engine":
            return self._send(signal.SIGSTOP, fault)
        process = self._process(part, fault)
        process.suspend()

        def resume() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):  # also if the pid is another's by now
                process.resume()

        return resume

    def _send(self, signum: signal.Signals, fault: Fault) -> Undo:
        server = _chosen(self._servers, fault)
        if (pid := server.send(signum)) is None:
            raise NotNow("The engine is not running.")
        return partial(server.resume, pid)

    def _process(self, part: str, fault: Fault) -> psutil.Process:
        if part == "raylet":
            raylets = [node.raylet() for node in self._machine.nodes]
            return _chosen([one for one in raylets if one is not None], fault)
        return _chosen(self._machine.actors(part.capitalize()), fault)

    def _node(self, fault: Fault) -> Node:
        return _chosen(self._machine.nodes, fault)

    # -- nodes that go and come -------------------------------------------------------------------

    def _drain(self, fault: Fault) -> Undo:
        return self._leave(fault, self._departures.drain, self._departures.go)

    def _call_off(self, fault: Fault) -> Undo:
        return self._leave(fault, self._departures.drain, self._departures.stay)

    def _preempt(self, fault: Fault) -> Undo:
        return self._leave(fault, self._departures.preempt, self._lose)

    def _leave(
        self, fault: Fault, order: Callable[[Node], None], end: Callable[[Node], None]
    ) -> Undo:
        """Have a node ordered to go; raises NotNow until the order was taken."""
        if fault.number not in self._undo:
            self._departures.require_all_there()
            node = self._node(fault)
            order(node)
            self._undo[fault.number] = partial(end, node)
        self._departures.require_taken()
        return self._undo[fault.number]

    def _lose(self, node: Node) -> None:
        """End a node with its engines, and have another machine come in its place."""
        for server in self._servers:
            if server.arena_dir == node.arena_dir:
                server.send(signal.SIGKILL)
        self._departures.go(node)
        node.empty()

    def _join(self, fault: Fault) -> Undo:
        """Have a node join, and an engine on it; raises NotNow until that has answered."""
        if fault.number not in self._undo:
            if self._joined is not None:
                raise NotNow("Another node has joined.")
            node = self._machine.begin_join()
            self._joined = self._welcome(node)
            self._servers.append(self._joined)
            self._undo[fault.number] = partial(self._part, node, self._joined)
        if self._joined is None or not self._joined.served:
            raise NotYet("The engine on the node that joined has not answered yet.")
        return self._undo[fault.number]

    def _part(self, node: Node, joined: Server) -> None:
        self._servers.remove(joined)
        joined.close()
        self._machine.take_away(node)
        self._joined = None

    # -- cables -----------------------------------------------------------------------------------

    def _cut_link(self, fault: Fault) -> Undo:
        network, host = self._cable(fault)
        network.cut(host)
        return partial(network.heal, host)

    def _slow_link(self, fault: Fault) -> Undo:
        network, host = self._cable(fault)
        network.slow(host, mbit=2, latency_ms=400)
        return partial(network.speed_up, host)

    def _cable(self, fault: Fault) -> tuple[Network, int]:
        """Return the network, and the chosen node's number in it: 0 is the head."""
        assert self._machine.network is not None, "faults of cables are drawn with a network only"
        return self._machine.network, 1 + self._machine.nodes.index(self._node(fault))

    def _truncate(self, fault: Fault) -> None:
        """Slow a node's cable until a transfer comes in over it, and kill its mover then."""
        if self._machine.network is not None and not self._is_transferring(fault):
            raise NotNow("Nothing was transferred.")
        movers = self._node(fault).actors("Mover")
        if not movers:
            raise NotNow("No mover runs there.")
        movers[0].kill()
        self.end(fault)

    def _is_transferring(self, fault: Fault) -> bool:
        """Return whether much came in since the last call; the first one slows the cable."""
        network, host = self._cable(fault)
        if fault.number not in self._undo:
            network.slow(host, mbit=_TRANSFER_MBIT, latency_ms=400)
            self._undo[fault.number] = partial(network.speed_up, host)
        now, received = time.monotonic(), network.bytes_in(host)
        at, before = self._seen.get(fault.number, (now, received))
        self._seen[fault.number] = now, received
        return received - before > _TRANSFER_BYTES_PER_S * (now - at)

    # -- memory and disk --------------------------------------------------------------------------

    def _fill_tmpfs(self, fault: Fault) -> Undo:
        return _fill(self._node(fault).arena_dir / "junk")

    def _fill_disk(self, fault: Fault) -> Undo:
        return _fill(self._machine.directory / "junk")

    def _fill_arena(self, fault: Fault) -> None:
        self._vandalise("fill", fault, fault.ends_s - fault.strikes_s)

    def _flip_bytes(self, fault: Fault) -> None:
        self._vandalise("flip", fault, _FLIPS).wait(_VANDAL_TIMEOUT_S)

    def _vandalise(self, verb: str, fault: Fault, amount: float) -> "subprocess.Popen[bytes]":
        node = self._node(fault)
        directory = node.arena_dir / f"kvray-{self._cluster_name}"
        if not (directory / "arena").exists():
            raise NotNow("There is no arena.")
        arguments = [verb, str(directory), str(fault.number), str(amount)]
        vandal = subprocess.Popen(
            [sys.executable, "-m", "kvray.lab.chaos.vandal", *arguments],
            env=node.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._vandals.append(vandal)
        return vandal


def _chosen(parts: Sequence[T], fault: Fault) -> T:
    if not parts:
        raise NotNow("It is not running.")
    return parts[int(fault.choice * len(parts))]


def _fill(path: Path) -> Undo:
    """Write a file until the mount is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(_FILE_CHUNK):
            pass
    return partial(path.unlink, missing_ok=True)
