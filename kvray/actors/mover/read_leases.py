"""Read leases that a mover holds for movers of other nodes, and what it sends from them."""

import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvray.actors.mover.orders import (
    LeasedGroup,
    LeaseGroup,
    LeaseRequest,
    ReadLease,
    SendOrder,
)
from kvray.errors import CapacityError, LeaseExpired, TransportUnavailable
from kvray.identity.block import BlockKey, split_keys
from kvray.store import Arena, Lease, PartRequest
from kvray.store.arena import payload
from kvray.store.arena.layout import DEFAULT_PRIORITY
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
        self._late: list[Lease] = []
        """Leases that are over, but for an arena that was busy."""
        # At random: a mover that is started again must not know the tokens of the one before.
        self._tokens = itertools.count(1 + secrets.randbits(62))
        self._lock = threading.Lock()
        self.sent_bytes: Counter[str] = Counter()
        """Bytes sent, by transport."""

    def __len__(self) -> int:
        return len(self._grants) + len(self._late)

    def grant(self, request: LeaseRequest) -> ReadLease:
        """Lease the blocks of `request` that are here, and send those that have targets.

        The asker has reserved slots for those and named targets for its best transport. A group of
        other blocks than it expected is leased only, as are all if another transport is the best
        that both have. A lease of which nothing is left to send or to copy has ended.

        Raises:
            CapacityError: there are too many read leases, or the arena is busy or retired.
            TransportUnavailable: the two ends have no transport in common.
            TransferError: as `Transport.send`; before that nothing was sent.
        """
        self.expire(time.monotonic())
        transport = next((name for name in request.addresses if name in self._transports), None)
        if transport is None:
            raise TransportUnavailable(
                f"This node has none of the transports {', '.join(request.addresses) or '(none)'};"
                " see `kvray doctor`."
            )
        if len(self) >= self._leases_max:
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
        are_meant = transport == next(iter(request.addresses))
        described, targets = [], [_NONE]
        for one, held in zip(request.groups, groups, strict=True):
            made, goes_to = self._describe(one, held, may_send=are_meant)
            described.append(made)
            targets.append(goes_to)
        goes_to = np.concatenate(targets)
        blocks, parcel = np.flatnonzero(goes_to >= 0), None
        try:
            if len(blocks):
                parcel = self._send(token, blocks, goes_to[blocks], request.timeout_s)
        except BaseException:
            self.release(token)
            raise
        # What a parcel has is copied from here after this call.
        if len(blocks) and len(blocks) == len(slots) and parcel is None:
            self.release(token)
            token = 0
        return ReadLease(token=token, transport=transport, groups=tuple(described), parcel=parcel)

    def send(self, order: SendOrder) -> Any:
        """Send a piece of a read lease, which renews it; as `Transport.send`.

        LeaseExpired: the lease has ended.
        """
        blocks = np.frombuffer(order.blocks, dtype="<u4")
        return self._send(
            order.token, blocks, np.frombuffer(order.targets, dtype="<i8"), order.timeout_s
        )

    def _send(self, token: int, blocks: Array, targets: Array, timeout_s: float) -> Any:
        grant = self._enter(token)
        try:
            if len(blocks) and blocks.max() >= len(grant.slots):
                raise LeaseExpired(f"Read lease {token} has fewer blocks; ask again.")
            sizes = grant.sizes[blocks]
            parcel = self._transports[grant.transport].send(
                grant.address, grant.offsets[blocks], targets, sizes, timeout_s=timeout_s
            )
            with self._lock:
                self.sent_bytes[grant.transport] += int(sizes.sum())
            return parcel
        finally:
            self._leave(token, grant)

    def release(self, token: int, suspects: Sequence[tuple[int, bytes]] = ()) -> None:
        """End a read lease, unless it has ended, and check blocks that arrived wrong.

        `suspects` has part and key of blocks that arrived without their checksum. Those that are
        bad here too are quarantined.
        """
        with self._lock:
            if (grant := self._grants.get(token)) is not None:
                grant.released = True
        self._end_idle()
        for part, key in suspects:
            held = self._arena.lease_for([BlockKey(key)], [[PartRequest(part)]], is_use=False)
            for lease in held.leases if held is not None else ():
                self._arena.valid(lease, slice(None))
                self._end([lease])

    def expire(self, now: float) -> None:
        """End the leases that were not renewed until `now`; those that are sent from end later."""
        with self._lock:
            for grant in self._grants.values():
                grant.released |= grant.ends_at < now
        self._end_idle()

    def _lease(self, request: LeaseRequest) -> list[Lease | None]:
        """Lease the leading blocks of each group that are here."""
        leases: list[Lease | None] = []
        try:
            for group in request.groups:
                held = self._arena.lease_for(
                    split_keys(group.keys),
                    [[PartRequest(group.part)]],
                    is_use=request.is_use,
                    wait_s=_BUSY_WAIT_S,
                )
                if held is None:
                    raise CapacityError(
                        "The arena of that node is busy, retired or has no room for another lease."
                    )
                leases += held.leases or (None,)
        except BaseException:
            self._end(filter(None, leases))
            raise
        return leases

    def _describe(
        self, group: LeaseGroup, slots: Array, *, may_send: bool
    ) -> tuple[LeasedGroup, Array]:
        """Return what the leased blocks of a group are, and where each goes now; -1: nowhere."""
        tables = self._arena.tables
        targets = np.full(len(slots), -1)
        asked = np.frombuffer(group.targets, dtype="<i8")[: len(slots)]
        targets[: len(asked)] = asked
        sizes, namespaces = tables.block_bytes(slots), tables.slot_namespace[slots]
        priorities = tables.slot_priority[slots]
        is_expected = (sizes == group.block_bytes) & (namespaces == group.namespace)
        is_expected &= priorities == DEFAULT_PRIORITY
        if not (may_send and is_expected[targets >= 0].all()):
            targets[:], may_send = -1, False
        return LeasedGroup(
            sizes=sizes,
            checksums=tables.slot_checksum[slots],
            namespaces=namespaces,
            priorities=priorities,
            was_sent=may_send,
        ), targets

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
        self._end(one for grant in over.values() for one in grant.leases if one is not None)

    def _end(self, leases: Iterable[Lease]) -> None:
        """Release leases, and what is late; those of a busy arena are late until the next sweep."""
        with self._lock:
            over, self._late = [*self._late, *leases], []
        if not self._arena.release(*over, wait_s=_BUSY_WAIT_S):
            with self._lock:
                self._late += over


def _places(tables: Tables, slots: Array) -> tuple[Array, Array]:
    """Return where in `tables.data` the bytes of each slot start, and their number."""
    sizes = tables.block_bytes(slots)
    starts = np.empty(len(slots), dtype=np.int64)
    for size in np.unique(sizes).tolist():
        same = sizes == size
        starts[same] = payload.offsets(tables, slots[same], size)
    return starts, sizes
