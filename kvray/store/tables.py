"""The tables of an arena as numpy views on its mapping."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvray.store.layout import HEADER, Geometry

Array = npt.NDArray[Any]

ONE = np.int32(1)
"""What `np.add.at` adds to a count: of the counts' own type it costs a thirtieth."""


class Tables:
    """One attribute a table of `Geometry.tables`, and the header.

    Views on a buffer that may be shared with other processes. All functions that take a `Tables`
    expect the caller to hold the arena's lock, unless they say otherwise.
    """

    slab_block_bytes: Array
    slot_state: Array
    slot_key: Array
    slot_part: Array
    slot_depth: Array
    slot_parent: Array
    slot_children: Array
    slot_leases: Array
    slot_holder: Array
    slot_version: Array
    slot_tick: Array
    slot_checksum: Array
    slot_since: Array
    index_slot: Array
    index_tag: Array
    holder_live: Array
    holder_generation: Array
    holder_pid: Array
    holder_since: Array
    holder_label: Array
    page_holder: Array
    page_lease: Array
    page_next: Array
    page_count: Array
    page_since: Array
    page_slots: Array

    def __init__(self, buffer: Any, geometry: Geometry) -> None:
        """Lay views over `buffer`, which holds at least the tables of `geometry`."""
        self.geometry = geometry
        self.header: Array = np.ndarray((), HEADER, buffer)
        offsets = geometry.offsets()
        for name, dtype, shape in geometry.tables():
            setattr(self, name, np.ndarray(shape, dtype, buffer, offsets[name]))
        self.data: Array = np.ndarray((geometry.capacity,), "u1", buffer, offsets["data"])

    def next_tick(self) -> int:
        """Advance and return the arena's logical time, the measure of recency."""
        self.header["tick"] += 1
        return int(self.header["tick"])

    def changed(self, slots: Array) -> None:
        """Note that `slots` became or ceased to be READY, for whoever announces it."""
        self.slot_version[slots] += 1
        self.header["changes"] += 1

    def rows(self, slab: int) -> Array:
        """Return a slab's slots as bytes, shape [slots, stride]."""
        geometry = self.geometry
        stride = geometry.stride(int(self.slab_block_bytes[slab]))
        count = geometry.slab_bytes // stride
        start = slab * geometry.slab_bytes
        return self.data[start : start + count * stride].reshape(count, stride)
