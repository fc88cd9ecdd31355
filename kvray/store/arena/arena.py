"""An engine's access to its node's arena: lease, read, reserve, write and commit blocks."""

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from kvray.errors import CapacityError, ConfigError, CorruptBlock
from kvray.identity.block import BlockKey
from kvray.store.arena import key_index, lease, payload, slots
from kvray.store.arena.layout import DEFAULT_PRIORITY, READY
from kvray.store.arena.lease import Held, Lease, Membership, PartRequest
from kvray.store.arena.mapped import MappedArena
from kvray.store.arena.payload import Copier, Strip
from kvray.store.arena.slots import Reservation
from kvray.store.arena.tables import Array

_PATIENT_S = 5.0
"""How long work behind the engine's back (committing, giving back) tries for the lock."""

_ROOM_TRIES = 4
"""How often a writer looks for blocks to evict that turn out to be in use, before it drops some."""


class Arena(MappedArena):
    """One process's access to the blocks of an arena; all methods may be called from any thread.

    A method that answers None or False could not get the lock within `lock_wait_s`: treat it as a
    miss (`arena_busy`), or try again. A retired arena gives no new lease and no new slot; earlier
    leases and reservations stay usable.

    It inherits, against the house's rule: whoever leases or writes needs mapping, membership and
    section too.
    """

    def __init__(self, directory: Path, *, lock_wait_s: float) -> None:
        super().__init__(directory, lock_wait_s=lock_wait_s)
        self._copier = Copier()

    def close(self) -> None:
        """Leave, unmap, and end the copier's thread. Twice is fine."""
        super().close()
        self._copier.close()

    # -- leases -------------------------------------------------------------------------------

    def lease(
        self,
        keys: Sequence[BlockKey],
        *,
        block_bytes: int | None = None,
        wait_s: float | None = None,
    ) -> list[Lease] | None:
        """Lease the longest run of leading `keys` whose part 0 is here, of `block_bytes` if given.

        Returns one lease; [] without the first block; None as `lease_for`.
        """
        held = self.lease_for(keys, [[PartRequest(0, None, block_bytes)]], wait_s=wait_s)
        return held if held is None else list(held.leases)

    def lease_for(
        self,
        keys: Sequence[BlockKey],
        readers: Sequence[Sequence[PartRequest]],
        *,
        member: Membership | None = None,
        lease_id: int | None = None,
        is_counted_on: bool = False,
        is_use: bool = True,
        wait_s: float | None = None,
    ) -> Held | None:
        """Lease the longest prefix of `keys` that has, for every reader, the parts it requests.

        The leases go to `member`, by default this process, with one `lease_id` (see `lease.id_of`)
        or a number each. A retired arena leases only blocks that are leased and promised already,
        which `is_counted_on` says. `is_use` counts the lease as their use. `wait_s`: see
        `reserve`.

        Returns one lease a reader, its parts one after the other; none without the first block, or
        if `member` has left; None if the arena was busy or has too many leases. Raises ConfigError
        for `keys` that are none, and LeaseExpired if this process is no holder and no other was
        given.
        """
        packed = key_index.pack_keys(keys)
        holder = self.holder if member is None else member.row
        with self.section(self.lock_wait_s if wait_s is None else wait_s) as entered:
            if not entered or (member is None and self._holder != holder):
                return None
            if not is_counted_on and self.retired:
                return None
            if member is not None and not lease.is_member(self.tables, member):
                return Held(num_blocks=0, leases=())
            requests = dict.fromkeys(chain.from_iterable(readers))
            run, found = lease.match(self.tables, packed, requests)
            if not run:
                return Held(num_blocks=0, leases=())
            chosen, asked = list[Array](), list[Array]()
            for reader in readers:
                slots, words = lease.reader_of(packed, run, found, reader)
                chosen.append(slots)
                asked.append(words)
            taken = lease.take(
                self.tables,
                chosen,
                holder=holder,
                now=time.monotonic(),
                asked=asked,
                lease_id=lease_id,
                is_use=is_use,
            )
            if taken is None:
                return None
            return Held(num_blocks=run, leases=tuple(taken), slots=tuple(chosen))

    def lease_slots(self, chosen: Array) -> Lease | None:
        """Lease the READY ones of `chosen`, without counting it as their use; None if busy."""
        holder = self.holder
        with self.section(self.lock_wait_s) as entered:
            if not entered or not self._is_open(holder):
                return None
            ready = chosen[self.tables.slot_state[chosen] == READY]
            now = time.monotonic()
            taken = lease.take(self.tables, [ready], holder=holder, now=now, is_use=False)
            return None if taken is None else taken[0]

    def note_use(self, keys: Sequence[BlockKey], part: int) -> bool:
        """Count a use of the leading `keys` whose `part` is here; False if busy."""
        packed = key_index.pack_keys(keys)
        with self.section(self.lock_wait_s) as entered:
            if entered and not self.retired:
                request = PartRequest(part)
                lease.note_use(self.tables, lease.match(self.tables, packed, [request])[1][request])
            return entered

    def present(self, keys: Sequence[BlockKey], parts: Sequence[int]) -> list[Array]:
        """Return one mask a part: which of `keys` are here now.

        Read without the lock, so that a long prompt makes nobody wait. Only a lease makes sure of
        the answer.
        """
        packed = key_index.pack_keys(keys)
        return [lease.present(self.tables, packed, part) for part in parts]

    def has_slots_of(self, namespaces: Sequence[int]) -> list[bool]:
        """Return for each namespace whether a slot has, or lately had, a block of it.

        Read without the lock: the answer is a hint.
        """
        held = self.tables.slot_namespace[self.tables.backed]
        return [bool((held == np.uint32(one)).any()) for one in namespaces]

    def release(self, *leases: Lease, wait_s: float | None = None) -> bool:
        """End leases, of any process of this node; False if busy: retry."""
        if not leases:
            return True
        with self.section(self.lock_wait_s if wait_s is None else wait_s) as entered:
            for one in leases if entered else ():
                lease.release(self.tables, one)
            return entered

    def release_ids(self, lease_ids: Iterable[int]) -> bool:
        """End all leases that have one of these ids, whoever took them; False if busy: retry.

        Nobody may take a lease of such an id meanwhile, because the search holds no lock.
        """
        found = [(one, lease.records(self.tables, one)) for one in lease_ids]
        found = [(one, pages) for one, pages in found if len(pages)]
        if not found:
            return True
        with self.section(self.lock_wait_s) as entered:
            for one, pages in found if entered else ():
                lease.release_records(self.tables, one, pages)
            return entered

    # -- reading ------------------------------------------------------------------------------

    def read(
        self, held: Lease, pool: Array, block_ids: Array, *, first: int = 0, verify: bool
    ) -> None:
        """Copy the blocks of a lease from its `first` on into the rows `block_ids` of `pool`.

        `pool` has bytes of shape [num_blocks, block_bytes]. With `verify` every block is checked.

        Raises:
            ConfigError: the lease has fewer blocks.
            CorruptBlock: a block does not have its checksum; its slot is quarantined.
            LayoutMismatch: the pool's blocks are of another size.
            LeaseExpired: the lease was released, perhaps during the copy.
        """
        chosen = self.leased_slots(held)[first : first + len(block_ids)]
        with self.making_sense:
            valid = payload.read(
                self.tables, chosen, pool, block_ids, verify=verify, copier=self._copier
            )
        self._refuse_invalid(held, chosen, valid)

    def read_valid(self, held: Lease, places: slice, pool: Array, block_ids: Array) -> Array:
        """Copy blocks at `places` of a lease into rows of `pool`; return a mask of the valid ones.

        The copies are checked, not the slots: nothing that changes a slot afterwards matters. The
        slots of the others are quarantined.

        Raises:
            CorruptBlock, LeaseExpired, LayoutMismatch: as `read`; no copy is to be used.
        """
        holder, chosen = self.held_by(held)
        chosen = chosen[places]
        with self.making_sense:
            copied = payload.read(
                self.tables, chosen, pool, block_ids, verify=True, copier=self._copier
            )
        self.held_by(held, since=holder)
        valid: Array = copied & (self.tables.slot_state[chosen] == READY)
        if 0 in valid.tobytes():
            self.quarantine(chosen[~valid])
        return valid

    def read_slots(
        self, slots: Array, strips: Sequence[Strip], pages: Array, *, block_bytes: int
    ) -> None:
        """Copy slots into pages; the caller has a lease on them, and calls `check` afterwards.

        `pages` has a row of each strip for each slot, of which `block_bytes` are read or passed.
        """
        with self.making_sense:
            areas = payload.areas(self.tables, slots, pages, block_bytes)
            payload.scatter(areas, strips, pages)

    def check(
        self, held: Lease, chosen: Array, *, verify: bool, holder: Membership | None = None
    ) -> None:
        """Accept the copy of the leased slots `chosen`, or raise as `read` does.

        `holder` had the lease before the copy; it must have it still.
        """
        with self.making_sense:
            valid = payload.verify(self.tables, chosen) if verify else None
        self._refuse_invalid(held, chosen, valid, holder)

    def valid(
        self, held: Lease, places: Array | slice, *, slots_known: Array | None = None
    ) -> Array:
        """Return which blocks at `places` of a lease are valid; quarantine the others.

        `slots_known`: those of the lease, from who has just taken it. What its record names is
        checked afterwards in any case.
        """
        chosen = (self.leased_slots(held) if slots_known is None else slots_known)[places]
        with self.making_sense:
            summed = payload.verify(self.tables, chosen)
        self.held_by(held)  # raises if what was read is void
        valid: Array = summed & (self.tables.slot_state[chosen] == READY)
        if 0 in valid.tobytes():  # told from bytes at a tenth of the price
            self.quarantine(chosen[~valid])
        return valid

    def quarantine(self, chosen: Array, *, wait_s: float | None = None) -> None:
        """Take slots whose bytes proved wrong out of service; if busy, the next reader will."""
        with self.section(self.lock_wait_s if wait_s is None else wait_s) as entered:
            if entered:
                slots.quarantine(self.tables, chosen)

    def _refuse_invalid(
        self, held: Lease, chosen: Array, valid: Array | None, holder: Membership | None = None
    ) -> None:
        self.held_by(held, since=holder)
        ready = self.tables.slot_state[chosen] == READY
        bad = chosen[~(ready if valid is None else ready & valid)]
        if len(bad):
            self.quarantine(bad)
            raise CorruptBlock(
                f"Block {self.tables.name(bad[0])} in the host tier does not have its checksum; it"
                " is quarantined."
            )

    # -- writing ------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        parent: BlockKey | None,
        depth: int,
        part: int,
        block_bytes: int,
        namespace: int = 0,
        priority: int | Array = DEFAULT_PRIORITY,
        head: int = 0,
        needs_parent: bool = True,
        wait_s: float | None = None,
    ) -> Reservation | None:
        """Reserve slots for the `keys` that are not here; None if the arena was busy.

        Args:
            keys: keys in prefix order.
            parent: key before the first one; None at the root.
            depth: place of the first key in its chain.
            part: part that will be written.
            block_bytes: bytes of the part.
            namespace: owner of the blocks, see `block.namespace_id`; 0: not known.
            priority: retention priority, 0 to 100, one or one a key: lower goes first. A block that
                is here keeps the higher one.
            head: `block.head_number` of the chain; 0: not known, unless a parent that is here has
                it.
            needs_parent: whether nothing is reserved if `parent` is not here.
            wait_s: longest try for the lock; None: `lock_wait_s`.

        Raises:
            CapacityError: a block of this size fits into no slab.
            ConfigError: `keys` are no keys or not all different, or a number is out of range.
        """
        packed, holder = key_index.pack_keys(keys), self.holder
        priority = slots.checked(
            packed, depth=depth, part=part, block_bytes=block_bytes, priority=priority
        )
        geometry = self.tables.geometry
        if geometry.stride(block_bytes) > geometry.slab_bytes:
            raise CapacityError(
                f"A block of {block_bytes} bytes is larger than a slab of {geometry.slab_bytes};"
                " raise arena.slab, and arena.capacity to at least four slabs."
            )
        before = None if parent is None else key_index.pack_keys([parent])
        candidates = slots.Candidates()  # mostly nothing has to go
        for attempt in range(_ROOM_TRIES):
            is_last = attempt == _ROOM_TRIES - 1 or (attempt > 0 and not candidates)
            with self.section(self.lock_wait_s if wait_s is None else wait_s) as entered:
                if not entered or not self._is_open(holder):
                    return None
                made = slots.reserve(
                    self.tables,
                    packed,
                    parent=before,
                    depth=depth,
                    part=part,
                    block_bytes=block_bytes,
                    holder=holder,
                    candidates=candidates,
                    namespace=namespace,
                    priority=priority,
                    head=head,
                    needs_parent=needs_parent,
                    is_last=is_last,
                )
            if made is not None:
                return made
            with self.making_sense:
                candidates = slots.find_candidates(
                    self.tables, packed, parent=before, part=part, block_bytes=block_bytes
                )
        raise AssertionError("the last try makes do with what there is")

    def write(self, reservation: Reservation, pool: Array, block_ids: Array) -> Array:
        """Copy rows `block_ids` of `pool`, one a reserved key; return checksums for `commit`."""
        return self.write_slots(reservation.slots, [pool], block_ids)

    def write_slots(self, slots: Array, regions: Sequence[Array], pages: Array) -> Array:
        """Copy pages that consist of `regions` into reserved slots; otherwise as `write`."""
        with self.making_sense:
            return payload.write(self.tables, slots, regions, pages, copier=self._copier)

    def sums(self, reservation: Reservation) -> Array:
        """Return the checksums of reserved slots that something else has written, for `commit`."""
        with self.making_sense:
            return payload.sum_slots(self.tables, reservation.slots)

    def slot_bytes(self, slot: int) -> Array:
        """Return the bytes of a slot that this process has reserved, or that another one named."""
        return payload.slot_bytes(self.tables, slot)

    def commit(
        self, reservation: Reservation, checksums: Array, *, wait_s: float = _PATIENT_S
    ) -> bool:
        """Make written slots READY; False if busy: retry.

        Slots that this process has given back since, by `abort` or `leave`, are passed over.
        """
        sums = np.asarray(checksums, dtype="<u8")
        if sums.shape != reservation.slots.shape:
            raise ConfigError(
                f"{len(reservation.slots)} slots cannot be committed with checksums of shape"
                f" {list(sums.shape)}; give what write returned."
            )
        if not len(sums):
            return True
        with self.section(wait_s) as entered:
            if entered:
                slots.commit(self.tables, reservation, sums)
            return entered

    def abort(self, reservation: Reservation, *, wait_s: float = _PATIENT_S) -> bool:
        """Give reserved slots back unwritten; False if busy: retry."""
        if not len(reservation.slots) or self._holder is None:
            return True
        with self.section(wait_s) as entered:
            if entered:
                slots.abort(self.tables, reservation)
            return entered
