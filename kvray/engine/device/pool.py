"""The engine's pages in host memory, and what loads and saves of any pool are told by."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvray.engine.device.cuda_device import Event
from kvray.engine.model.cache_layout import Part
from kvray.store import Arena, PartRead
from kvray.store.arena.tables import Array


class Load(NamedTuple):
    """Slots of one part, and the pages of its group that they are copied into."""

    part: Part
    slots: Array
    pages: Array


class Ticket:
    """Copies that were begun; those without an event have ended when the ticket is made."""

    def __init__(self, event: Event | None = None, *, sums: Array | None = None) -> None:
        self.sums = sums  # checksums of slots that were written, if the copy made them
        self._event = event

    def done(self) -> bool:
        """Whether they have ended."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return when they have ended; TierError: the device failed. Others go on meanwhile."""
        if self._event is not None:
            self._event.synchronize()


class HostPool:
    """Pages in host memory: copies are made by the calling thread, at once."""

    is_host = True

    def __init__(self, parts: Sequence[Part]) -> None:
        self._regions: dict[tuple[int, int], list[Array]] = {
            (part.num_ranks, part.index): [region.pages.numpy() for region in part.regions]
            for part in parts
        }

    def attend(self, arena: Arena) -> None:
        """Do nothing: copies in host memory need no preparation."""

    def load(self, arena: Arena, loads: Sequence[Load], stream: Any) -> Ticket:
        arena.read_slots(
            [PartRead(one.slots, self._regions_of(one.part), one.pages) for one in loads]
        )
        return Ticket()

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """Return at once: loads end before they return."""

    def mark(self, stream: Any) -> None:
        """Return no mark: a pass on the host has ended when it returns."""

    def save(self, arena: Arena, part: Part, pages: Array, slots: Array, mark: Any) -> Ticket:
        return Ticket(sums=arena.write_slots(slots, self._regions_of(part), pages))

    def fence(self, stream: Any) -> None:
        """Return at once: no copies are under way."""

    def close(self) -> None:
        """Do nothing: the pages belong to the engine."""

    def _regions_of(self, part: Part) -> list[Array]:
        return self._regions[part.num_ranks, part.index]
