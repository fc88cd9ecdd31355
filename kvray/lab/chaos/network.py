"""Network namespaces for nodes with addresses and cables; they live as long as their processes."""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvray.errors import ConfigError

_TOOLS = ("ip", "tc", "nsenter", "unshare")
_PREFIX = "10.77.0"
_SWITCH = f"{_PREFIX}.254"
_MAKE_TIMEOUT_S = 5.0
_COMMAND_TIMEOUT_S = 20.0
_DEVICE = "eth0"

Spawn = Callable[[list[str]], int]
"""Starts a process that lives as long as the cluster, and returns its pid."""


def why_impossible() -> str | None:
    """Return the reason why this process cannot make network namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs the commands {', '.join(missing)} (packages iproute2 and util-linux)"
    probe = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return None if probe.returncode == 0 else "network namespaces are not allowed here"


class Network:
    """A switch, and a namespace for each host that is plugged into it; numbers begin at 0."""

    def __init__(self, spawn: Spawn, *, num_hosts: int) -> None:
        """Make the hosts, in processes that `spawn` starts; ConfigError: it is not allowed."""
        if (reason := why_impossible()) is not None:
            raise ConfigError(f"A network of several nodes on one machine {reason}.")
        self._spawn = spawn
        self._cuts: Counter[int] = Counter()
        self._limits: Counter[int] = Counter()
        self._switch = self._hold()
        made = ("link add br0 type bridge", f"addr add {_SWITCH}/24 dev br0", "link set br0 up")
        _ip(self._switch, *made)
        self._hosts: list[int] = []
        for number in range(num_hosts):
            self.plug_in(number)

    def address(self, number: int) -> str:
        """Return a host's address."""
        return f"{_PREFIX}.{number + 1}"

    def enter(self, number: int) -> list[str]:
        """Return the beginning of a command that runs on a host."""
        return _enter(self._hosts[number])

    def cut(self, number: int) -> None:
        """Pull a host's cable; overlapping cuts end with the last `heal`."""
        self._cuts[number] += 1
        _ip(self._switch, f"link set port{number} down")

    def heal(self, number: int) -> None:
        """Put a host's cable back."""
        self._cuts[number] -= 1
        if not self._cuts[number]:
            _ip(self._switch, f"link set port{number} up")

    def slow(self, number: int, *, mbit: int, latency_ms: int) -> None:
        """Limit a host's traffic, and its queue; the last limit counts until all are taken away."""
        self._limits[number] += 1
        self._shape(number, "replace", f"tbf rate {mbit}mbit burst 32kb latency {latency_ms}ms")

    def speed_up(self, number: int) -> None:
        """Take a limit away."""
        self._limits[number] -= 1
        if not self._limits[number]:
            self._shape(number, "del")

    def bytes_in(self, number: int) -> int:
        """Return the bytes that a host has got over its cable so far."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self._hosts[number]}/net/dev").read_text()
            if found := re.search(rf"{_DEVICE}:\s*(\d+)", text):
                return int(found[1])
        return 0

    def plug_in(self, number: int) -> None:
        """Make the namespace and the cable of a host; `number` is the next one."""
        holder = self._hold()
        self._hosts.append(holder)
        _ip(
            self._switch,
            f"link add port{number} type veth peer name {_DEVICE} netns {holder}",
            f"link set port{number} master br0",
            f"link set port{number} up",
        )
        _ip(
            holder,
            "link set lo up",
            f"addr add {self.address(number)}/24 dev {_DEVICE}",
            f"link set {_DEVICE} up",
            # Libraries find their own address as that of the default route.
            f"route add default via {_SWITCH}",
        )

    def _shape(self, number: int, verb: str, shape: str = "") -> None:
        """Change the queues at both ends of a host's cable."""
        for holder, device in ((self._hosts[number], _DEVICE), (self._switch, f"port{number}")):
            _run_in(holder, ["tc", *f"qdisc {verb} dev {device} root {shape}".split()])

    def _hold(self) -> int:
        """Start a process in a namespace of its own and return its pid."""
        pid = self._spawn(["unshare", "--net", "sleep", "infinity"])
        ours = os.readlink("/proc/self/ns/net")
        deadline = time.monotonic() + _MAKE_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/net") != ours:
                    return pid
            time.sleep(0.005)
        raise ConfigError("A network namespace could not be made; run `unshare --net true`.")


def _enter(holder: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder}/ns/net"]


def _ip(holder: int, *commands: str) -> None:
    """Run commands of `ip` in the namespace of process `holder`."""
    _run_in(holder, ["ip", "-batch", "-"], told="\n".join(commands) + "\n")


def _run_in(holder: int, command: list[str], told: str = "") -> None:
    try:
        subprocess.run(
            [*_enter(holder), *command],
            input=told,
            text=True,
            capture_output=True,
            check=True,
            timeout=_COMMAND_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`{' '.join(command)}` did not end.") from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"`{' '.join(command)}` failed: {error.stderr.strip()}.") from None
