"""What the tests of the device's pool build: pages of layers, and an arena with reserved slots."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from kvray.engine.model.cache_layout import LayerRange, Part, Region
from kvray.store import Arena, ArenaSpec
from kvray.store.arena.payload import offsets
from kvray.store.arena.tables import Array
from tests.unit.store.small_arena import chain

PATIENT_S = 5.0


@contextmanager
def open_arena(*, capacity: int, slab: int, slot_min: int = 4096) -> Iterator[Arena]:
    """Give a real arena that this process has joined."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    spec = ArenaSpec(
        cluster_name="test", capacity=capacity, slab=slab, slot_min=slot_min, holders_max=8
    )
    arena = Arena.create(directory, spec, lock_wait_s=PATIENT_S)
    try:
        arena.join("test")
        yield arena
    finally:
        arena.close()
        shutil.rmtree(directory)


def reserve(arena: Arena, count: int, block_bytes: int, *, seed: str = "", part: int = 0) -> Array:
    """Return slots that this process may write for the rest of the test."""
    made = arena.reserve(
        chain(count, seed=seed), parent=None, depth=0, part=part, block_bytes=block_bytes
    )
    assert made is not None
    assert len(made.slots) == count
    return made.slots.astype(np.int64)


def slot_views(arena: Arena, slots: Sequence[int] | Array, block_bytes: int) -> list[Array]:
    """Return the bytes of each slot, as views."""
    tables = arena.tables
    starts = offsets(tables, np.asarray(slots), block_bytes).tolist()
    return [tables.data[start : start + block_bytes] for start in starts]


def even_steps(num_layers: int, layer_bytes: int) -> tuple[LayerRange, ...]:
    """Return a step a layer, in the layers' order."""
    return tuple(
        LayerRange((layer,), layer * layer_bytes, (layer + 1) * layer_bytes)
        for layer in range(num_layers)
    )


def part_of(*regions: Region, index: int = 0) -> Part:
    return Part(
        index=index, num_ranks=1, group=0, regions=regions, window_blocks=None, is_stored_here=True
    )


def region(
    num_pages: int,
    steps: tuple[LayerRange, ...],
    *,
    gap: int = 0,
    device: str = "cpu",
    fill: int = 0xFF,
) -> Region:
    """Return pages with `gap` bytes between rows; every byte is `fill`, which is NaN in floats."""
    size = steps[-1].stop
    memory = torch.full((num_pages, size + gap), fill, dtype=torch.uint8, device=device)
    return Region(pages=memory[:, :size], steps=steps)
