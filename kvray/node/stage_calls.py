"""Asks the shard to stage blocks of other nodes here; the engine's scheduler waits for it.

It has a connection of its own, which no report can hold up. No call takes longer than its wait:
then it closes the connection, and drops a late answer with it.

`ShardSocket` is the client end of a shard's unix socket: one call at a time, each with a deadline.
"""

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kvray import wire
from kvray.breaker import Breaker
from kvray.errors import KVRayError, ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.store import Lease
from kvray.trace.arrival import ARRIVALS_MAX, Arrival, Arrivals
from kvray.trace.reasons import STAGE_REASONS, StageReason
from kvray.wire import SOCKET_FILE


class ShardSocket:
    """Calls to the shard whose arena lies in `directory`; connects again after a failure."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / SOCKET_FILE
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def call(self, op: str, *, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send one request and return its reply.

        Raises:
            ShardUnavailable: no answer within `timeout_s`.
            TransferError: `fields` are too long for a frame, or the answer is no frame.
            KVRayError: the shard's own answer.
        """
        if os.getpid() != self._pid:
            # The connection is the parent's: two processes would read each other's replies.
            raise ShardUnavailable("A forked process cannot use its parent's link; use spawn.")
        request = wire.encode({"op": op, **fields})
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise ShardUnavailable(f"The socket {self._path} is busy with another call.")
        try:
            reply = self._exchange(request, deadline)
        except OSError as error:
            self._disconnect()
            raise ShardUnavailable(
                f"The shard at {self._path} did not answer ({error}); see `kvray status`."
            ) from None
        except BaseException:
            self._disconnect()  # The rest of this reply must not be taken for the next one.
            raise
        finally:
            self._lock.release()
        wire.raise_for(reply)
        return reply

    def interrupt(self) -> None:
        """Have a call fail now in which another thread waits; the next call connects again."""
        peer = self._socket
        if peer is not None:
            with contextlib.suppress(OSError):  # it is closed just now
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up; the next call connects again."""
        if os.getpid() == self._pid:
            with self._lock:
                self._disconnect()

    def _exchange(self, request: bytes, deadline: float) -> dict[str, Any]:
        peer = self._connected(deadline)
        peer.settimeout(_left(deadline))
        peer.sendall(request)
        head = _receive(peer, wire.LENGTH.size, deadline)
        return wire.decode(_receive(peer, wire.body_length(head), deadline))

    def _connected(self, deadline: float) -> socket.socket:
        """Return the connection; a new one if the shard has hung up since the last call."""
        if self._socket is not None and _has_input(self._socket):
            # No input is due between calls: the shard has ended, or breaks the protocol.
            self._disconnect()
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(_left(deadline))
            self._socket.connect(str(self._path))
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _receive(peer: socket.socket, size: int, deadline: float) -> bytes:
    """Return `size` bytes; bytes that came before the deadline count, however late we look."""
    received = bytearray()
    while len(received) < size:
        peer.settimeout(max(deadline - time.monotonic(), 0.0))
        try:
            chunk = peer.recv(size - len(received))
        except BlockingIOError:
            raise TimeoutError("deadline") from None
        if not chunk:
            raise ConnectionResetError("it hung up")
        received += chunk
    return bytes(received)


def _has_input(peer: socket.socket) -> bool:
    poll = select.poll()  # `select` fails on descriptors above 1023, which engines have
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(0))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline")
    return left


_WAY_S = 0.005
_WAY_SHARE = 0.2
"""Share of the wait for the way to the shard and back; the shard has the rest."""
_KEYS_MAX = 65_536
"""Blocks of a prompt in one call; more would fill a frame."""
_UNREAD_MAX = 64
_OF_ANOTHER_KIND = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Errors from an answer that lacks its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReply:
    """The shard's answer to a call."""

    num_blocks: int
    """Leading blocks that are here, for every rank."""
    reason: StageReason
    """Why there are not more."""
    leases: dict[int, tuple[str, Lease]] = field(default_factory=dict)
    """Rank on another node -> (its arena, its lease of those blocks); the caller ends them."""
    arrivals: Arrivals = field(default=(), compare=False)
    """How the blocks came here, for people."""


class StageCalls:
    """The calls of one engine, for its scheduler's thread alone."""

    def __init__(self, directory: Path) -> None:
        self._socket = ShardSocket(directory)
        self._breaker = Breaker(Random(os.getpid()))
        self._name = secrets.token_hex(8)
        self._num_calls = 0
        self._unread: deque[str] = deque(maxlen=_UNREAD_MAX)
        """Tokens of calls without an answer: ranks on other nodes may have leases."""

    @property
    def can_ask(self) -> bool:
        """Whether to ask the shard now: not for a while after it did not answer."""
        return self._breaker.state(time.monotonic()) != "open"

    def stage(
        self,
        keys: Sequence[BlockKey],
        *,
        replica: str,
        rank: int,
        wait_s: float,
        tokens_per_s: float,
        verify_from: int | None = None,
        stored_by: int | None = None,
    ) -> StageReply:
        """Return which of `keys` are here, after `wait_s` at most; raises no error of the shard.

        Args:
            keys: of a prompt's blocks, from its root.
            replica: the asking replica, as registered.
            rank: its rank, as registered.
            wait_s: longest time that this call takes.
            tokens_per_s: speed of computing the blocks instead; 0: not known.
            verify_from: first block that ranks on other nodes verify; None: none.
            stored_by: ranks that the blocks' bytes are dealt to; None: as many as the engine has.
        """
        began = time.monotonic()
        asked = keys[:_KEYS_MAX]
        self._num_calls += 1
        token = f"{self._name}-{self._num_calls}"
        unread = list(self._unread)
        try:
            reply = self._socket.call(
                "stage",
                timeout_s=wait_s,
                replica=replica,
                rank=rank,
                keys=b"".join(asked),
                wait_s=wait_s - min(wait_s / 2, max(_WAY_S, wait_s * _WAY_SHARE)),
                tokens_per_s=tokens_per_s,
                verify_from=verify_from,
                token=token,
                unread=unread,
                stored_by=stored_by,
            )
            staged = _read(reply, num_keys=len(asked))
        except (KVRayError, *_OF_ANOTHER_KIND) as error:
            is_late = time.monotonic() - began >= wait_s
            self._unread.append(token)
            self._breaker.fail(time.monotonic(), str(error))
            return StageReply(num_blocks=0, reason="too_slow" if is_late else "store_down")
        self._breaker.succeed()
        if staged.reason == "store_down":
            # The shard answers, but cannot reach others now; it has breakers of its own.
            self._breaker.fail(time.monotonic(), staged.reason)
        else:
            self._unread.clear()
        return staged

    def interrupt(self) -> None:
        """Have a call fail now in which another thread waits."""
        self._socket.interrupt()

    def close(self) -> None:
        """Hang up. Twice is fine."""
        self._socket.close()


def _read(reply: dict[str, Any], *, num_keys: int) -> StageReply:
    reason = reply["reason"]
    return StageReply(
        num_blocks=min(max(int(reply["num_blocks"]), 0), num_keys),
        reason=reason if reason in STAGE_REASONS else "store_down",
        leases={
            int(rank): (str(arena_id), _lease(*numbers))
            for rank, (arena_id, *numbers) in (reply.get("leases") or {}).items()
        },
        arrivals=tuple(
            Arrival(int(stop), str(way), str(source))
            for stop, way, source in (reply.get("arrivals") or ())[:ARRIVALS_MAX]
        ),
    )


def _lease(lease_id: int, page: int, num_slots: int, check: int) -> Lease:
    return Lease(lease_id=int(lease_id), page=int(page), num_slots=int(num_slots), check=int(check))
