"""One-sided pushes by NIXL, over RDMA where UCX finds a device and over TCP otherwise.

Each end has two agents. Others push through the *inbound* one, which does nothing by itself. To
destroy it is the fence: earlier pushes cannot write after that. This node's own pushes go through
the *outbound* one. It is replaced after an error, so that a broken push harms no other push, in
either direction. Every agent has a name of its own: peers cannot mistake one incarnation for the
next.

NIXL knows no deadline: a push to a frozen peer never ends, and one that was given up may still
write. It runs in a process of its own, because a frozen peer that wakes can abort that process.
"""

import importlib
import os
import secrets
import struct
import threading
import time
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvray.errors import TransferError, TransferTimeout, TransportUnavailable
from kvray.transport.transport import Array, require_inside, runs

_MODULES = ("nixl", "nixl_cu13", "nixl_cu12")

_DEVICES = Path("/sys/class/infiniband")

_PROGRESS_DELAY_US = 10_000
"""Fallback wake-up of an agent's progress thread, which poll drives; NIXL's own value of 0 keeps a
whole core busy."""

_POLL_S = 0.0002
_PEERS_MAX = 256
"""An outbound agent with so many targets, most of them long gone, is replaced."""

_HEAD = struct.Struct("<8sQQQ")
"""Magic, address of the memory, its bytes, address for handshakes; the agent's metadata follows."""
_MAGIC = b"kvrynixl"
_HANDSHAKE_BYTES = 8


def choose_wires(environ: MutableMapping[str, str], drivers: Collection[str]) -> None:
    """Tell UCX what to use, before the first agent of the process makes it read that.

    Variables that `environ` has stay. `drivers` are from `rdma_drivers`. Without an RDMA device
    nodes have only TCP between them. Shared memory is never used: where two nodes share a machine,
    a frozen sender that wakes writes by it, even to an agent that was destroyed meanwhile.

    A machine without EFA devices goes without UCX's module for them. The module loads the system's
    libefa, and with it a second libibverbs and libnl beside those of NIXL's wheel. When the process
    ends, one libnl frees what the other allocated, which is a segmentation fault.
    """
    environ.setdefault("UCX_TLS", "^shm" if drivers else "tcp")
    if "efa" not in drivers:
        environ.setdefault("UCX_MODULES", "^efa")


def rdma_drivers(devices: Path = _DEVICES) -> list[str]:
    """Return the kernel driver's name of each RDMA device of this machine."""
    try:
        return [(device / "device" / "driver").resolve().name for device in devices.iterdir()]
    except OSError:
        return []


def has_rdma() -> bool:
    """Return whether this machine has an RDMA device."""
    return bool(rdma_drivers())


class NixlTransport:
    """This node's end of the `Transport`; the owner of the bytes pushes."""

    name = "nixl"
    writes_late = True
    piece_bytes = 128 * 2**20
    bytes_max: int | None = None

    def __init__(self, memory: Array) -> None:
        """Register `memory` with NIXL.

        Raises:
            TransportUnavailable: NIXL is not installed, or cannot be used here.
        """
        self._nixl = bindings()
        self._memory = memory
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._closed = False
        self._incarnation = 0
        self._inbound: _Agent | None = _Agent(self._nixl, memory, has_thread=True)
        self._outbound: _Agent | None = _Agent(self._nixl, memory, has_thread=False)

    @property
    def address(self) -> bytes:
        """The address of the inbound agent."""
        inbound = self._inbound
        if inbound is None:
            raise TransportUnavailable("The transport nixl of this node has no agent at present.")
        return inbound.address

    def send(
        self, address: bytes, sources: Array, targets: Array, sizes: Array, *, timeout_s: float
    ) -> None:
        """Push a piece."""
        deadline = time.monotonic() + timeout_s
        target = _parse(address, targets, sizes)
        require_inside(sources, sizes, len(self._memory), whose="this node's")
        outbound = self._sender()
        try:
            outbound.push(target, (sources, targets, sizes), deadline=deadline)
        except TransferError:
            with self._lock:
                # The pushes of other threads go on; the agent is destroyed after the last.
                if self._outbound is outbound:
                    self._outbound = None
            raise

    def receive(self, parcel: Any, targets: Array, sizes: Array) -> None:
        """Do nothing: when the push has ended, the bytes are here."""

    def renew(self) -> None:
        """Replace the inbound agent."""
        with self._renewing:  # not `_lock`: to register much memory takes long, and pushes go on
            self._inbound = None  # which destroys it: there is no other reference
            self._incarnation += 1
            if not self._closed:
                self._inbound = _Agent(self._nixl, self._memory, has_thread=True)

    def status(self) -> dict[str, Any]:
        """Return figures for people."""
        return {
            "incarnation": self._incarnation,
            "rdma": has_rdma(),
            "library": self._nixl.__name__,
        }

    def close(self) -> None:
        """End both ends. Twice is fine."""
        with self._renewing, self._lock:
            self._closed = True
            self._inbound = self._outbound = None
            self._memory = self._memory[:0]

    def _sender(self) -> "_Agent":
        with self._lock:
            if self._closed:
                raise TransferError("The transport nixl of this node was closed.")
            if self._outbound is None or len(self._outbound.peers) >= _PEERS_MAX:
                self._outbound = _Agent(self._nixl, self._memory, has_thread=False)
            return self._outbound


class _Agent:
    """One agent with the memory registered; destroyed with its last reference."""

    def __init__(self, nixl: Any, memory: Array, *, has_thread: bool) -> None:
        """Register `memory`; without a thread, bytes move only while a push is waited for."""
        self._nixl = nixl
        # Both stay mapped for as long as they are registered.
        self._memory = memory
        self._handshake = np.zeros(_HANDSHAKE_BYTES, dtype=np.uint8)
        self._base = memory.ctypes.data
        self.peers: dict[bytes, _RemoteAgent] = {}
        self._peers_lock = threading.Lock()
        config = nixl.nixlAgentConfig()
        config.useProgThread = has_thread
        config.pthrDelay = _PROGRESS_DELAY_US
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        try:
            with _mapped(nixl):
                self._agent = nixl.nixlAgent(f"kvray-{secrets.token_hex(8)}", config)
                backend = self._agent.createBackend("UCX", {})
                handshake = self._handshake.ctypes.data
                areas = [(self._base, len(memory), 0, ""), (handshake, _HANDSHAKE_BYTES, 0, "")]
                self._agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, areas), [backend])
                metadata = bytes(self._agent.getLocalMD())
        except TransferError as error:
            raise TransportUnavailable(f"NIXL cannot be used on this node ({error}).") from None
        self.address = _HEAD.pack(_MAGIC, self._base, len(memory), handshake) + metadata

    def push(
        self, target: "_Target", blocks: tuple[Array, Array, Array], *, deadline: float
    ) -> None:
        """Write blocks (sources, targets, sizes) into a target's memory; without any, shake hands.

        The first write to a target takes some 50 ms more than the next: a handshake spends them.
        """
        sources, targets, sizes = blocks
        if not len(sources):
            own = self._handshake.ctypes.data - self._base
            sources, targets = np.array([own]), np.array([target.handshake - target.base])
            sizes = np.array([_HANDSHAKE_BYTES])
        edges = runs(sources, sizes, targets)
        first, last = edges[:-1], edges[1:] - 1
        lengths = sources[last] + sizes[last] - sources[first]
        local = self._descriptors(self._base + sources[first], lengths)
        remote = self._descriptors(target.base + targets[first], lengths)
        peer = self._peer(target.metadata)
        # One piece after the other: each is whole sooner, and is checked while the next one moves.
        if not peer.turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TransferTimeout(
                "A push waited too long for the one before it; the other node is slow or frozen."
            )
        try:
            with _mapped(self._nixl):
                self._write(local, remote, peer.name, deadline)
        finally:
            peer.turn.release()

    def _write(self, local: Any, remote: Any, name: str, deadline: float) -> None:
        nixl, agent = self._nixl, self._agent
        handle = agent.createXferReq(nixl.NIXL_WRITE, local, remote, name)
        try:
            state = agent.postXferReq(handle)
            while state == nixl.NIXL_IN_PROG:
                if time.monotonic() >= deadline:
                    raise TransferTimeout(
                        "A push did not end in time; the other node is slow, frozen or cut off."
                    )
                time.sleep(_POLL_S)
                state = agent.getXferStatus(handle)
            if state != nixl.NIXL_SUCCESS:
                raise TransferError(f"A push to another node failed ({state}).")
        finally:
            agent.releaseXferReq(handle)

    def _descriptors(self, addresses: Array, lengths: Array) -> Any:
        rows = np.zeros((len(addresses), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = addresses, lengths
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, rows)

    def _peer(self, metadata: bytes) -> "_RemoteAgent":
        """Return the remote agent of that metadata; load it the first time."""
        with self._peers_lock:
            peer = self.peers.get(metadata)
            if peer is None:
                with _mapped(self._nixl):
                    name = self._agent.loadRemoteMD(metadata)
                name = name.decode() if isinstance(name, bytes) else name
                peer = self.peers[metadata] = _RemoteAgent(name, threading.Lock())
            return peer


class _RemoteAgent(NamedTuple):
    """An agent of another node that this one pushes to."""

    name: str
    turn: threading.Lock


def bindings() -> Any:
    """Return NIXL's bindings; its Python classes would fix the progress thread's delay at 0.

    Every agent is made after this call, so this is where UCX is told what to use.

    Raises:
        TransportUnavailable: NIXL is not installed, or its wheel does not load.
    """
    choose_wires(os.environ, rdma_drivers())
    for name in _MODULES:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == name:
                continue
            raise _broken(name, error) from None
        except ImportError as error:
            raise _broken(name, error) from None
    raise TransportUnavailable(
        "NIXL is not installed; run `pip install 'kvray[nixl]'`, or `pip install nixl-cu12` for the"
        " wheel of one CUDA version."
    )


def _broken(name: str, error: ImportError) -> TransportUnavailable:
    return TransportUnavailable(
        f"{name} is installed and does not load ({error}); install another version of it, or leave"
        " nixl out of staging.transports."
    )


class _Target(NamedTuple):
    """The fields of an address."""

    base: int
    handshake: int
    metadata: bytes


def _parse(address: bytes, targets: Array, sizes: Array) -> _Target:
    """Read an address; its memory has to have room for `targets`."""
    if len(address) <= _HEAD.size or not address.startswith(_MAGIC):
        raise TransferError("nixl cannot send a piece to an address of another transport.")
    _, base, length, handshake = _HEAD.unpack_from(address)
    require_inside(targets, sizes, length, whose="the other node's")
    return _Target(base, handshake, address[_HEAD.size :])


@contextmanager
def _mapped(nixl: Any) -> Iterator[None]:
    """Turn NIXL's exceptions, which have no base class of their own, into ours."""
    try:
        yield
    except tuple(
        value
        for name, value in vars(nixl).items()
        if name.startswith("nixl") and name.endswith("Error")
    ) as error:
        raise TransferError(f"NIXL: {type(error).__name__} {error}".strip()) from None
