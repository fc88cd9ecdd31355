"""Holds pinned blocks in the arena with a lease of the shard, so that nobody can evict them.

What comes later is leased when a look finds it. The lease ends with the shard's process; the next
shard takes its own before it ends those of the dead, and a shard that ends in order leaves its
pinned blocks as those that were used last.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.shard.pinning.choice import Kept, kept_by, slots_of
from kvray.actors.shard.pinning.pin import Pin, Pins
from kvray.actors.shard.pinning.pin_file import read_pins, save_pins
from kvray.actors.staging.peers import Peers
from kvray.config import PinsConfig
from kvray.errors import KVRayError
from kvray.store import Arena, Lease
from kvray.store.arena.tables import Array

_log = logging.getLogger("kvray.shard")

_LOOK_S, _PAUSES = 2.0, 100
"""Between two looks for what has come; so many times as long as a look takes."""
_ASK_S, _ASK_FIRST_S = 30.0, 2.0
"""How often another shard is asked for its pins; until one has answered, more often."""
_TRIES = 3
_PATIENT_S = 1.0


class PinKeeper:
    """The pins of one shard; used by its event loop, `status` from any thread."""

    def __init__(
        self,
        arena: Arena,
        directory: Path,
        settings: PinsConfig,
        peers: Peers,
        *,
        renew_s: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Keep what the file in `directory` names; a lease gets at most `renew_s` old.

        `wall` is the clock by which pins end, in seconds since 1970.
        """
        self._wall = wall
        self._arena = arena
        self._directory = directory
        self._peers = peers
        self._renew_s = renew_s
        capacity = arena.tables.geometry.capacity
        self._limits = {
            "bytes_max": int(settings.share * capacity),
            "owner_bytes_max": int(settings.owner_share * capacity),
        }
        self._pins = Pins()
        self._lease: Lease | None = None
        self._leased_at = self._look_at = self._ask_at = 0.0
        self._kept: list[Kept] = []
        self._asking: asyncio.Task[None] | None = None
        self._num_asked = 0
        self._pins.take(read_pins(directory), now=self._wall())
        self.look()

    def tick(self, now: float, *, num_shards: int) -> None:
        """Look and ask where that is due; called often, waits for nothing."""
        if now >= self._look_at:
            self.look()
        is_asking = self._asking is not None and not self._asking.done()
        if num_shards > 1 and now >= self._ask_at and not is_asking:
            self._ask_at = now + (_ASK_S if self._num_asked else _ASK_FIRST_S)
            self._asking = asyncio.get_running_loop().create_task(self._ask_another())
            self._asking.add_done_callback(self._note_defect)

    def look(self) -> None:
        """Hold all pinned blocks that are here; what cannot be held now is held the next time."""
        began = time.monotonic()
        if self._pins.take((), now=self._wall()):
            save_pins(self._directory, self._pins.beyond({}))
        for _ in range(_TRIES):
            kept = self._chosen()
            slots = slots_of(kept)
            is_old = self._lease is not None and began - self._leased_at > self._renew_s
            if not is_old and np.array_equal(slots, slots_of(self._kept)):
                break
            if not self._try_hold(slots):
                kept = self._kept
                break
            # Other blocks may have got into the slots before they were leased.
            if np.array_equal(slots, slots_of(self._chosen())):
                break
        self._kept = kept
        ended = time.monotonic()
        self._look_at = ended + max(_LOOK_S, _PAUSES * (ended - began))

    def take(self, pins: Iterable[Pin]) -> None:
        """Take over pins, and removals of pins, that are later than what is known."""
        if self._pins.take(pins, now=self._wall()):
            save_pins(self._directory, self._pins.beyond({}))
            self.look()

    def check(self, pin: Pin) -> float:
        """Return a time for it that counts more than what is known; raises as `Pins.check`."""
        now = self._wall()
        self._pins.check(pin, now=now, **self._limits)
        return self._pins.later_than_known(pin.name, now)

    def remove(self, name: str) -> None:
        """End a pin; ConfigError: there is none of that name."""
        self.take([self._pins.removed(name, now=self._wall())])

    def beyond(self, known: Mapping[str, float]) -> list[Pin]:
        """See `Pins.beyond`."""
        return self._pins.beyond(known)

    @property
    def slots(self) -> Array:
        """The slots that are held, each once."""
        return slots_of(self._kept)

    async def close(self) -> None:
        """End asking; the lease ends as the shard leaves the arena. Twice is fine."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
        tables, slots = self._arena.tables, self.slots
        with self._arena.section(_PATIENT_S if len(slots) else 0.0) as entered:
            if entered:
                tables.slot_tick[slots] = tables.next_tick()

    def status(self) -> dict[str, Any]:
        """Return the pins, and how much of each is here; from any thread."""
        now, kept = self._wall(), list(self._kept)
        return {
            "bytes": int(self._arena.tables.block_bytes(slots_of(kept)).sum()),
            "bytes_max": self._limits["bytes_max"],
            "pins": [_status_of(one, now) for one in kept if one.pin.until > now],
        }

    def _chosen(self) -> list[Kept]:
        pins = self._pins.live(self._wall())
        return kept_by(self._arena.tables, pins, **self._limits) if pins else []

    def _try_hold(self, slots: Array) -> bool:
        try:
            return self._hold(slots)
        except KVRayError as error:
            _log.warning("%s: pinned blocks cannot be held: %s", self._peers.shard, str(error))
            return False

    def _hold(self, slots: Array) -> bool:
        """Lease `slots` in place of what was leased; False: the arena is busy."""
        new = None
        if len(slots):
            self._arena.join("shard")
            new = self._arena.lease_slots(slots)
            if new is None:
                return False
        if self._lease is not None and not self._arena.release(self._lease):
            if new is not None:
                self._arena.release(new)
            return False
        self._lease, self._leased_at = new, time.monotonic()
        return True

    def _note_defect(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (defect := task.exception()) is not None:
            _log.error("%s: asking for pins ended by a defect", self._peers.shard, exc_info=defect)

    async def _ask_another(self) -> None:
        """Learn from another shard the pins that this one has missed."""
        try:
            shards: Sequence[str] = await self._peers.call(LOOKUP_NAME, "targets")
            others = sorted(set(shards) - {self._peers.shard})
            if others:
                other = others[self._num_asked % len(others)]
                self.take(await self._peers.call(other, "pins", self._pins.known()))
                self._num_asked += 1
        except (KVRayError, AttributeError) as error:  # a shard of an older version keeps no pins
            _log.debug("%s: no shard told its pins: %s", self._peers.shard, error)


def _status_of(kept: Kept, now: float) -> dict[str, Any]:
    pin = kept.pin
    return {
        "name": pin.name,
        "owner": pin.owner,
        "seconds_left": round(pin.until - now, 1),
        "num_tokens": pin.num_tokens,
        "num_blocks": pin.num_blocks,
        "blocks_here": kept.num_blocks,
    }
