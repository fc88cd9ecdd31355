"""Blocks that a mover keeps leased for movers of other nodes, and sends them."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvray.actors.orders import Offer, OfferedGroup, SendOrder, Want
from kvray.block import split_keys
from kvray.errors import CapacityError, LeaseExpired, ShardUnavailable, TransportUnavailable
from kvray.store import Arena, Lease, Wanted, payload
from kvray.store.tables import Array, Tables
from kvray.transport import Transport

_NONE = np.empty(0, dtype=np.int64)
_BUSY_WAIT_S = 0.1
"""How long the arena's lock is tried: another node waits, and nobody of this one."""


@dataclass(slots=True)
class _Given:
    """One offer, in the arena's and this process's own terms."""

    leases: list[Lease | None]
    """One a group; None: there is nothing of it."""
    slots: Array
    sizes: Array
    offsets: Array
    transport: str
    address: bytes
    lease_s: float
    ends_at: float
    sending: int = 0
    released: bool = False


class Offers:
    """What this node has given to others. Thread-safe.

    A lease that is not renewed for as long as it was asked for ends: whoever asked may be frozen or
    cut off. One that is being read from is kept until that has ended.
    """

    def __init__(
        self,
        arena: Arena,
        transports: Mapping[str, Transport],
        *,
        offers_max: int,
        lease_max_s: float,
    ) -> None:
        """Offer blocks of `arena` by `transports`.

        Args:
            arena: joined by this process.
            transports: by name.
            offers_max: how many there may be at once.
            lease_max_s: longest lease that is given.
        """
        self._arena = arena
        self._transports = transports
        self._offers_max = offers_max
        self._lease_max_s = lease_max_s
        self._given: dict[int, _Given] = {}
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self.sent_bytes: Counter[str] = Counter()
        """Bytes that were sent, by transport."""

    def __len__(self) -> int:
        return len(self._given)

    def make(self, want: Want) -> Offer:
        """Lease what is there of `want`, and say by which transport it will be sent.

        Raises:
            CapacityError: too many offers are under way.
            ShardUnavailable: the arena is busy or retired.
            TransportUnavailable: both ends have no transport in common.
        """
        self.expire()
        transport = next((name for name in want.addresses if name in self._transports), None)
        if transport is None:
            raise TransportUnavailable(
                f"This node has none of the transports {', '.join(want.addresses) or '(none)'};"
                " see `kvray doctor`."
            )
        if len(self._given) >= self._offers_max:
            raise CapacityError(
                f"This node has {self._offers_max} offers under way; ask again later."
            )
        leases = self._lease(want)
        groups = [_NONE if one is None else self._arena.leased_slots(one) for one in leases]
        slots = np.concatenate([*groups, _NONE])
        offsets, sizes = _places(self._arena.tables, slots)
        lease_s = min(want.lease_s, self._lease_max_s)
        given = _Given(
            leases=leases,
            slots=slots,
            sizes=sizes,
            offsets=offsets,
            transport=transport,
            address=want.addresses[transport],
            lease_s=lease_s,
            ends_at=time.monotonic() + lease_s,
        )
        with self._lock:
            token = next(self._tokens)
            self._given[token] = given
        return Offer(token=token, transport=transport, groups=self._described(groups))

    def send(self, order: SendOrder) -> Any:
        """Send a piece of an offer, whose lease begins anew; as `Transport.send`.

        Raises:
            LeaseExpired: there is no such offer any more.
            TransferError: as `Transport.send`.
        """
        given = self._enter(order.token)
        try:
            blocks = np.frombuffer(order.blocks, dtype="<u4")
            if len(blocks) and blocks.max() >= len(given.slots):
                raise LeaseExpired(f"Offer {order.token} has not that many blocks; ask anew.")
            sizes = given.sizes[blocks]
            parcel = self._transports[given.transport].send(
                given.address,
                given.offsets[blocks],
                np.frombuffer(order.targets, dtype="<i8"),
                sizes,
                timeout_s=order.timeout_s,
            )
            with self._lock:
                self.sent_bytes[given.transport] += int(sizes.sum())
            return parcel
        finally:
            self._leave(order.token, given)

    def release(self, token: int, suspects: bytes) -> None:
        """End an offer, after a look at blocks that arrived without their checksum.

        Args:
            token: of the offer; one that has ended is passed over.
            suspects: places of such blocks, u32; those that are bad here are quarantined.
        """
        places = np.frombuffer(suspects, dtype="<u4")
        with self._lock:
            given = self._given.get(token)
        if given is None:
            return
        start = 0
        for one in filter(None, given.leases) if len(places) else ():
            within = places[(places >= start) & (places < start + one.num_slots)] - start
            self._arena.sound(one, within)
            start += one.num_slots
        with self._lock:
            given.released = True
        self._end_idle()

    def expire(self) -> None:
        """End the offers that nobody has renewed in time."""
        now = time.monotonic()
        with self._lock:
            for given in self._given.values():
                given.released |= given.ends_at < now
        self._end_idle()

    def close(self) -> None:
        """End all offers that are not being sent; the others end with this process."""
        with self._lock:
            for given in self._given.values():
                given.released = True
        self._end_idle()

    def _lease(self, want: Want) -> list[Lease | None]:
        """Return a lease for each group, of its leading blocks that are here."""
        leases: list[Lease | None] = []
        for part, keys in want.groups:
            held = None
            deadline = time.monotonic() + _BUSY_WAIT_S
            while held is None and time.monotonic() < deadline:
                held = self._arena.lease_for(split_keys(keys), [[Wanted(part)]])
            if held is None:
                self._arena.release(*filter(None, leases), wait_s=_BUSY_WAIT_S)
                raise ShardUnavailable(
                    "The arena of that node is busy, retired or has no room for another lease."
                )
            leases += held.leases or (None,)
        return leases

    def _described(self, groups: list[Array]) -> tuple[OfferedGroup, ...]:
        tables = self._arena.tables
        return tuple(
            OfferedGroup(
                sizes=_places(tables, slots)[1].astype("<u8").tobytes(),
                checksums=tables.slot_checksum[slots].tobytes(),
                namespaces=tables.slot_namespace[slots].tobytes(),
                priorities=tables.slot_priority[slots].tobytes(),
            )
            for slots in groups
        )

    def _enter(self, token: int) -> _Given:
        with self._lock:
            given = self._given.get(token)
            # The clock goes on while a process is frozen: one that wakes sends nothing that its
            # peer has long given up.
            if given is None or given.released or given.ends_at < time.monotonic():
                raise LeaseExpired(f"Offer {token} has ended; ask anew.")
            given.sending += 1
            given.ends_at = time.monotonic() + given.lease_s
            return given

    def _leave(self, token: int, given: _Given) -> None:
        with self._lock:
            given.sending -= 1
            if not given.released and given.ends_at >= time.monotonic():
                given.ends_at = time.monotonic() + given.lease_s
        if given.released:
            self._end_idle()

    def _end_idle(self) -> None:
        """End the leases of offers that are over and from which nothing is being sent."""
        with self._lock:
            over = {
                token: given
                for token, given in self._given.items()
                if given.released and not given.sending
            }
            for token in over:
                del self._given[token]
        for token, given in over.items():
            if not self._arena.release(*filter(None, given.leases), wait_s=_BUSY_WAIT_S):
                with self._lock:
                    self._given[token] = given  # for the next sweep


def _places(tables: Tables, slots: Array) -> tuple[Array, Array]:
    """Return where in `tables.data` the bytes of each slot start, and how many they are."""
    sizes = tables.slab_block_bytes[slots // tables.geometry.slots_per_slab].astype(np.int64)
    starts = np.empty(len(slots), dtype=np.int64)
    for size in np.unique(sizes).tolist():
        same = sizes == size
        starts[same] = payload.offsets(tables, slots[same], size)
    return starts, sizes
