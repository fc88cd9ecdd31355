"""What the worker does with the engine's memory, on the host or on a device."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvray.connector.cache_layout import CacheLayout, Part
from kvray.store import Arena, PartRead
from kvray.store.tables import Array


class Load(NamedTuple):
    """Slots of one part, and the pages of its group that they are copied into."""

    part: Part
    slots: Array
    pages: Array


class Ticket(Protocol):
    """Copies that were begun."""

    sums: Array | None
    """Checksums of slots that were written, if the copy made them."""

    def done(self) -> bool:
        """Whether they have ended."""
        ...

    def wait(self) -> None:
        """Return when they have ended; other threads go on meanwhile."""
        ...


class Pool(Protocol):
    """The engine's pages. The executor's thread calls all but `save`, which is the saver's."""

    is_host: bool

    def attend(self, arena: Arena) -> None:
        """Make copies from and to `arena` as fast as they can be, from some time later on."""
        ...

    def load(self, arena: Arena, loads: Sequence[Load], stream: Any) -> Ticket:
        """Copy leased slots into pages; each layer's bytes are there when the layer runs."""
        ...

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """Have what follows on `stream` wait for the layer's bytes."""
        ...

    def mark(self, stream: Any) -> Any:
        """Return the point in `stream` behind which the blocks of this pass can be read.

        Raises:
            LayoutMismatch: the pass may have run before what it needed was loaded.
        """
        ...

    def save(self, arena: Arena, part: Part, pages: Array, slots: Array, mark: Any) -> Ticket:
        """Copy pages into reserved slots once `mark` is reached."""
        ...

    def fence(self, stream: Any) -> None:
        """Have what follows on `stream`, and later loads, wait for all copies begun before."""
        ...

    def close(self) -> None:
        """Let go of arenas and device. Twice is fine."""
        ...


class Copied:
    """The ticket of copies that have ended when it is made."""

    def __init__(self, sums: Array | None = None) -> None:
        """Carry the checksums of what was written."""
        self.sums = sums

    def done(self) -> bool:
        """See `Ticket.done`."""
        return True

    def wait(self) -> None:
        """See `Ticket.wait`."""


class HostPool:
    """Pages in host memory: copies are made by the calling thread, at once."""

    is_host = True

    def __init__(self, parts: Sequence[Part]) -> None:
        """Serve `parts`."""
        self._regions: dict[int, list[Array]] = {
            part.index: [region.pages.numpy() for region in part.regions] for part in parts
        }

    def attend(self, arena: Arena) -> None:
        """See `Pool.attend`: there is nothing to prepare."""

    def load(self, arena: Arena, loads: Sequence[Load], stream: Any) -> Ticket:
        """See `Pool.load`."""
        arena.read_slots(
            [PartRead(one.slots, self._regions[one.part.index], one.pages) for one in loads]
        )
        return Copied()

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        """See `Pool.wait_for_layer`: loads end before they return."""

    def mark(self, stream: Any) -> None:
        """See `Pool.mark`: a pass on the host has ended when it returns."""

    def save(self, arena: Arena, part: Part, pages: Array, slots: Array, mark: Any) -> Ticket:
        """See `Pool.save`."""
        return Copied(arena.write_slots(slots, self._regions[part.index], pages))

    def fence(self, stream: Any) -> None:
        """See `Pool.fence`: there are no copies under way."""

    def close(self) -> None:
        """See `Pool.close`."""


def open_pool(layout: CacheLayout, parts: Sequence[Part], *, has_hooks: bool) -> Pool:
    """Return the pool of `layout`.

    Args:
        layout: of this rank.
        parts: what the rank reads and writes of it.
        has_hooks: whether the engine calls before each layer runs.
    """
    if layout.is_host:
        return HostPool(parts)
    # Not before there is a device: its module is of no use without.
    from kvray.connector.gpu import DevicePool

    num_layers = 1 + max(layer for group in layout.groups for layer in group.layers)
    return DevicePool(parts, num_layers=num_layers, has_hooks=has_hooks)
