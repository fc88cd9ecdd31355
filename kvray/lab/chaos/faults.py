"""Lets the faults of a schedule strike when they can; one node at a time may be ordered to go."""

import contextlib
import heapq
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from kvray.errors import KVRayError
from kvray.lab.chaos.judge import IN_FLIGHT_MIN, Strike
from kvray.lab.chaos.machine import Machine, Node, begin
from kvray.lab.chaos.network import Network
from kvray.lab.chaos.schedule import Fault
from kvray.lab.chaos.servers import Server

PREEMPTION_S = 5
"""How long a preempted node is told that it has; it is lost before that."""
_FLIPS = 24
_TRANSFER_MBIT = 8
_TRANSFER_BYTES_PER_S = 500_000
"""Only a transfer brings so much over a cable of that speed."""
_CORRUPT_TIMEOUT_S = 30.0


class _Departures:
    """Orders nodes of a machine away by commands, as people and clouds do."""

    def __init__(self, machine: Machine, config: str) -> None:
        self._machine = machine
        self._config = config
        self._node: Node | None = None
        self._node_id = ""
        self._is_staying = False
        self._command: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None

    def require_all_there(self) -> None:
        """Raise NotNow while a node is down or about to go: the others have to serve."""
        if self._node is not None or not all(one.ray.has_started for one in self._machine.nodes):
            raise NotNow("Another node is down.")

    def drain(self, node: Node) -> None:
        self._begin(node, "kvray", "drain", "ID", "--no-wait", "-c", self._config)

    def preempt(self, node: Node) -> None:
        ray = ("ray.scripts.scripts", "drain-node", f"--address={self._machine.address}")
        reason = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot")
        deadline = f"--deadline-remaining-seconds={PREEMPTION_S}"
        self._begin(node, *ray, "--node-id", "ID", *reason, deadline)

    def require_taken(self) -> None:
        if self._process is None or self._process.poll() != 0:
            raise NotYet("The order to go was not taken.")

    def stay(self, node: Node) -> None:
        """Begin to have a node stay after all; until that was taken no other node goes."""
        if node.node_id == self._node_id:  # another start has forgotten the order
            self._begin(node, "kvray", "drain", "ID", "--cancel", "-c", self._config)
            self._is_staying = True

    def go(self, node: Node) -> None:
        self.close()
        node.kill()

    def tend(self) -> None:
        """Repeat an order that failed, as somebody would; call it often."""
        if self._node is None or self._process is None or self._process.poll() is None:
            return
        if self._node.node_id != self._node_id:
            self.close()
        elif self._process.returncode:
            self._process = self._machine.begin(*self._command)
        elif self._is_staying:
            self.close()

    def close(self) -> None:
        """Order nothing more. Twice is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._node = self._process = None
        self._is_staying = False

    def _begin(self, node: Node, *command: str) -> None:
        if (node_id := node.node_id) is None:
            raise NotNow("It is not running.")
        self.close()
        self._node, self._node_id = node, node_id
        self._command = tuple(node_id if one == "ID" else one for one in command)
        self._process = self._machine.begin(*self._command)


class NotNow(KVRayError):
    """The fault has no target now, or too few requests are in flight; it may be tried again."""

    patience_s = 15.0  # how long it is tried


class NotYet(NotNow):
    """The fault has begun, by a process that takes its time to start on a busy machine."""

    patience_s = 90.0


class Campaign:
    """A schedule under way: call `advance` often. A fault that waits holds up no other."""

    def __init__(
        self,
        schedule: Sequence[Fault],
        strike: Callable[[Fault], None],
        end: Callable[[Fault], None],
        in_flight: Callable[[], int],
        *,
        ends_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now; after `ends_s` no fault of the `schedule`, by its times, strikes or lasts.

        `strike` makes a fault happen, or raises `NotNow`; `end` undoes it, and its preparations,
        where twice is fine. `in_flight` returns how many requests wait for an answer.
        """
        self.strikes: list[Strike] = []
        self._strike = strike
        self._end = end
        self._in_flight = in_flight
        self._now = now
        self._began = now()
        self._ends = self._began + ends_s
        self._coming = list(reversed(schedule))
        self._due: list[Fault] = []
        self._endings: list[tuple[float, int, Fault]] = []

    def advance(self) -> None:
        """Undo the faults that are over, and let those strike that are due."""
        while self._endings and self._endings[0][0] <= self._now():
            self._end(heapq.heappop(self._endings)[2])
        while self._coming and self._began + self._coming[-1].strikes_s <= self._now():
            self._due.append(self._coming.pop())
        self._due = [fault for fault in self._due if not self._is_done_with(fault)]

    def _is_done_with(self, fault: Fault) -> bool:
        """Let a fault strike if it can; return whether it did, or is given up."""
        now, in_flight = self._now(), self._in_flight()
        ended, skipped = now, None
        try:
            if in_flight < IN_FLIGHT_MIN:
                raise NotNow(f"Fewer than {IN_FLIGHT_MIN} requests were in flight.")
            self._strike(fault)
        except NotNow as error:
            if now < min(self._began + fault.strikes_s + error.patience_s, self._ends):
                return False
            self._end(fault)
            skipped = str(error)
        else:
            # The strike itself may take long; the fault lasts its whole length after it.
            ended = max(now, min(self._now() + fault.ends_s - fault.strikes_s, self._ends))
            heapq.heappush(self._endings, (ended, fault.number, fault))
        self.strikes.append(
            Strike(kind=fault.kind, began=now, ended=ended, in_flight=in_flight, skipped=skipped)
        )
        return True


_FILE_CHUNK = bytes(4 * 2**20)

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
        """Strike `machine`, its tier and `servers`; `welcome` begins a replica on a new node."""
        self._machine = machine
        self._servers = list(servers)
        self._cluster_name = config_path.stem
        self._welcome = welcome
        self._departures = _Departures(machine, str(config_path))
        self._joined: Server | None = None
        self._undo: dict[int, Undo] = {}
        self._seen: dict[int, tuple[float, int]] = {}
        """Fault -> time of the last look at its node's cable, and the bytes received until then."""
        self._corruptors: list[subprocess.Popen[bytes]] = []

    def strike(self, fault: Fault) -> None:
        """Make a fault happen; NotNow: it has no target."""
        verb, _, part = fault.kind.partition("_")
        if fault.kind == "kill_engine":
            self._send(signal.SIGKILL, fault)
        elif fault.kind == "kill_raylet":
            self._departures.require_all_there()
            self._node(fault).kill()
        elif verb == "kill":
            self._process(part, fault).kill()
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
            if not node.ray.is_running:
                node.kill()  # some of its processes may be left
                node.ray.begin()
        self._corruptors = [one for one in self._corruptors if one.poll() is None]

    def close(self) -> None:
        """Undo everything. Twice is fine."""
        while self._undo:
            self._undo.popitem()[1]()
        self._departures.close()
        for corruptor in self._corruptors:
            corruptor.kill()
            corruptor.wait()

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

    def _cut_link(self, fault: Fault) -> Undo:
        network, host = self._cable(fault)
        network.cut(host)
        return partial(network.heal, host)

    _cut_links = _cut_link  # the schedule has one for each node

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

    def _fill_tmpfs(self, fault: Fault) -> Undo:
        return _fill(self._node(fault).arena_dir / "junk")

    def _fill_disk(self, _: Fault) -> Undo:
        return _fill(self._machine.directory / "junk")

    def _fill_arena(self, fault: Fault) -> None:
        self._corrupt("fill", fault, fault.ends_s - fault.strikes_s)

    def _flip_bytes(self, fault: Fault) -> None:
        self._corrupt("flip", fault, _FLIPS).wait(_CORRUPT_TIMEOUT_S)

    def _corrupt(self, verb: str, fault: Fault, amount: float) -> "subprocess.Popen[bytes]":
        node = self._node(fault)
        directory = node.arena_dir / f"kvray-{self._cluster_name}"
        if not (directory / "arena").exists():
            raise NotNow("There is no arena.")
        arguments = (verb, str(directory), str(fault.number), str(amount))
        self._corruptors.append(begin("kvray.lab.chaos.corruptor", *arguments, env=node.environ))
        return self._corruptors[-1]


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
