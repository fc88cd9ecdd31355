"""A node that is ordered to go: the order, and its end or its call-off. One node at a time."""

import subprocess

from kvray.lab.chaos.campaign import NotNow, NotYet
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.node import Node

PREEMPTION_S = 5
"""How long a preempted node is told that it has; it is lost before that."""


class Departures:
    """Orders nodes of a machine away by commands, as people and clouds do."""

    def __init__(self, machine: Machine, config: str) -> None:
        """Order nodes away from the tier of the configuration at the path `config`."""
        self._machine = machine
        self._config = config
        self._node: Node | None = None
        self._node_id = ""
        self._is_staying = False
        self._command: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None

    def require_all_there(self) -> None:
        """Raise NotNow while a node is down or about to go: the others have to serve."""
        if self._node is not None or not all(one.has_started for one in self._machine.nodes):
            raise NotNow("Another node is down.")

    def drain(self, node: Node) -> None:
        """Begin to have a node drained by hand."""
        self._begin(node, "kvray", "drain", "ID", "--no-wait", "-c", self._config)

    def preempt(self, node: Node) -> None:
        """Begin to tell Ray that a node will be lost."""
        ray = ("ray.scripts.scripts", "drain-node", f"--address={self._machine.address}")
        reason = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot")
        deadline = f"--deadline-remaining-seconds={PREEMPTION_S}"
        self._begin(node, *ray, "--node-id", "ID", *reason, deadline)

    def require_taken(self) -> None:
        """Raise NotYet until the last order was taken."""
        if self._process is None or self._process.poll() != 0:
            raise NotYet("The order to go was not taken.")

    def stay(self, node: Node) -> None:
        """Begin to have a node stay after all; until that was taken no other node goes."""
        if node.node_id == self._node_id:  # another start has forgotten the order
            self._begin(node, "kvray", "drain", "ID", "--cancel", "-c", self._config)
            self._is_staying = True

    def go(self, node: Node) -> None:
        """End a node's processes at once."""
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
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._node, self._node_id = node, node_id
        self._command = tuple(node_id if one == "ID" else one for one in command)
        self._process = self._machine.begin(*self._command)
