"""Read leases that a mover holds for movers of other nodes, and what it sends from them."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvray.actors.mover.orders import LeasedGroup, LeaseRequest, ReadLease, SendOrder
from kvray.errors import CapacityError, LeaseExpired, ShardUnavailable, TransportUnavailable
from kvray.identity.block import split_keys
from kvray.store import Arena, Lease, PartRequest
from kvray.store.arena import payload
from kvray.store.arena.tables import Array, Tables
from kvray.transport import Transport

_NONE = np.empty(0, dtype=np.int64)
_BUSY_WAIT_S = 0.1
"""How long to try for the arena's lock: another node waits for it, and no engine here does."""


@dataclass(slots=True)
class _Grant:
    """One read lease, in terms of the arena and of this process."""

    leases: list[Lease | None]  # one a group; None: none of its blocks is here
    slots: Array
    sizes: Array
    offsets: Array
    transport: str
    address: bytes
    lease_s: float
    ends_at: float
    sending: int = 0
    released: bool = False


class ReadLeases:
    """The read leases of other nodes on this one. Thread-safe.

    A lease that is not renewed in time ends: its holder may be frozen or cut off. A lease that is
    being sent from stays until that has ended.
    """

    def __init__(
        self,
        arena: Arena,
        transports: Mapping[str, Transport],
        *,
        leases_max: int,
        lease_max_s: float,
    ) -> None:
        self._arena = arena
        self._transports = transports
        self._leases_max = leases_max
        self._lease_max_s = lease_max_s
        self._grants: dict[int, _Grant] = {}
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self.sent_bytes: Counter[str] = Counter()
        """Bytes sent, by transport."""

    def __len__(self) -> int:
        return len(self._grants)

    def grant(self, request: LeaseRequest) -> ReadLease:
        """Lease the blocks of `request` that are here, and choose the transport to send them by.

        Raises:
            CapacityError: there are too many read leases.
            ShardUnavailable: the arena is busy or retired.
            TransportUnavailable: the two ends have no transport in common.
        """
        self.expire()
        transport = next((name for name in request.addresses if name in self._transports), None)
        if transport is None:
            raise TransportUnavailable(
                f"This node has none of the transports {', '.join(request.addresses) or '(none)'};"
                " see `kvray doctor`."
            )
        if len(self._grants) >= self._leases_max:
            raise CapacityError(
                f"This node has {self._leases_max} read leases for others; ask again later."
            )
        leases = self._lease(request)
        groups = [_NONE if one is None else self._arena.leased_slots(one) for one in leases]
        slots = np.concatenate([*groups, _NONE])
        offsets, sizes = _places(self._arena.tables, slots)
        lease_s = min(request.lease_s, self._lease_max_s)
        grant = _Grant(
            leases=leases,
            slots=slots,
            sizes=sizes,
            offsets=offsets,
            transport=transport,
            address=request.addresses[transport],
            lease_s=lease_s,
            ends_at=time.monotonic() + lease_s,
        )
        with self._lock:
            token = next(self._tokens)
            self._grants[token] = grant
        return ReadLease(token=token, transport=transport, groups=self._described(groups))

    def send(self, order: SendOrder) -> Any:
        """Send a piece of a read lease, which renews it; as `Transport.send`.

        LeaseExpired: the lease has ended.
        """
        grant = self._enter(order.token)
        try:
            blocks = np.frombuffer(order.blocks, dtype="<u4")
            if len(blocks) and blocks.max() >= len(grant.slots):
                raise LeaseExpired(f"Read lease {order.token} has fewer blocks; ask again.")
            sizes = grant.sizes[blocks]
            parcel = self._transports[grant.transport].send(
                grant.address,
                grant.offsets[blocks],
                np.frombuffer(order.targets, dtype="<i8"),
                sizes,
                timeout_s=order.timeout_s,
            )
            with self._lock:
                self.sent_bytes[grant.transport] += int(sizes.sum())
            return parcel
        finally:
            self._leave(order.token, grant)

    def release(self, token: int, suspects: bytes) -> None:
        """End a read lease, unless it has ended, after a check of blocks that arrived wrong.

        `suspects` has the places of blocks that arrived without their checksum, u32. Those that are
        bad here too are quarantined.
        """
        places = np.frombuffer(suspects, dtype="<u4")
        with self._lock:
            grant = self._grants.get(token)
        if grant is None:
            return
        start = 0
        for one in filter(None, grant.leases) if len(places) else ():
            within = places[(places >= start) & (places < start + one.num_slots)] - start
            self._arena.valid(one, within)
            start += one.num_slots
        with self._lock:
            grant.released = True
        self._end_idle()

    def expire(self) -> None:
        """End the leases that were not renewed in time."""
        now = time.monotonic()
        with self._lock:
            for grant in self._grants.values():
                grant.released |= grant.ends_at < now
        self._end_idle()

    def close(self) -> None:
        """End all leases that nothing is sent from; the others end with this process."""
        with self._lock:
            for grant in self._grants.values():
                grant.released = True
        self._end_idle()

    def _lease(self, request: LeaseRequest) -> list[Lease | None]:
        """Lease the leading blocks of each group that are here."""
        leases: list[Lease | None] = []
        for part, keys in request.groups:
            held = None
            deadline = time.monotonic() + _BUSY_WAIT_S
            while held is None and time.monotonic() < deadline:
                held = self._arena.lease_for(
                    split_keys(keys), [[PartRequest(part)]], is_use=request.is_use
                )
            if held is None:
                self._arena.release(*filter(None, leases), wait_s=_BUSY_WAIT_S)
                raise ShardUnavailable(
                    "The arena of that node is busy, retired or has no room for another lease."
                )
            leases += held.leases or (None,)
        return leases

    def _described(self, groups: list[Array]) -> tuple[LeasedGroup, ...]:
        tables = self._arena.tables
        return tuple(
            LeasedGroup(
                sizes=tables.block_bytes(slots),
                checksums=tables.slot_checksum[slots],
                namespaces=tables.slot_namespace[slots],
                priorities=tables.slot_priority[slots],
            )
            for slots in groups
        )

    def _enter(self, token: int) -> _Grant:
        with self._lock:
            grant = self._grants.get(token)
            # The clock runs on while a process is frozen: when it wakes, it must send nothing that
            # its peer has long given up.
            if grant is None or grant.released or grant.ends_at < time.monotonic():
                raise LeaseExpired(f"Read lease {token} has ended; ask again.")
            grant.sending += 1
            grant.ends_at = time.monotonic() + grant.lease_s
            return grant

    def _leave(self, token: int, grant: _Grant) -> None:
        with self._lock:
            grant.sending -= 1
            if not grant.released and grant.ends_at >= time.monotonic():
                grant.ends_at = time.monotonic() + grant.lease_s
        if grant.released:
            self._end_idle()

    def _end_idle(self) -> None:
        with self._lock:
            over = {
                token: grant
                for token, grant in self._grants.items()
                if grant.released and not grant.sending
            }
            for token in over:
                del self._grants[token]
        for token, grant in over.items():
            if not self._arena.release(*filter(None, grant.leases), wait_s=_BUSY_WAIT_S):
                with self._lock:
                    self._grants[token] = grant  # for the next sweep


def _places(tables: Tables, slots: Array) -> tuple[Array, Array]:
    """Return where in `tables.data` the bytes of each slot start, and their number."""
    sizes = tables.block_bytes(slots)
    starts = np.empty(len(slots), dtype=np.int64)
    for size in np.unique(sizes).tolist():
        same = sizes == size
        starts[same] = payload.offsets(tables, slots[same], size)
    return starts, sizes
