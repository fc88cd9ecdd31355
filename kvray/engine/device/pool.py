"""The engine's pages in host memory, and what loads and saves of any pool are made of.

A load to a device brings the bytes of its pages stage by stage, layer by layer. What a layer reads
must have landed before it runs; what later layers read may land meanwhile. A stage is the unit that
a layer waits for. Small stages let the first layers start early, but a copy of few bytes costs as
much as one of many, and so does an event.

Pieces are what one batch of copies moves: addresses and sizes that numpy makes for all blocks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvray.engine.cache_layout import LayerRange, Part
from kvray.errors import LayoutMismatch
from kvray.store import Arena
from kvray.store.arena.payload import Strip, offsets, runs, scatter
from kvray.store.arena.tables import Array, Tables

if TYPE_CHECKING:
    from kvray.engine.device.cuda_device import Event

PIECE_BYTES = 512 * 2**10
"""Copies of less do not reach the speed of the bus: layers of less are brought together."""
STAGE_BYTES = 8 * 2**20
"""A stage of less lands in the time that it takes to ask for it."""

BEFORE_ALL = -1
"""Key of what must have landed before the pass, as no layer of the engine's will wait for it."""


class Load(NamedTuple):
    """Slots of one part, and the pages of its group that they are copied into."""

    part: Part
    slots: Array
    pages: Array


class Ticket:
    """Copies that were begun; those without an event have ended when the ticket is made."""

    def __init__(self, event: "Event | None" = None, *, sums: Array | None = None) -> None:
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
        self._strips = {(part.num_ranks, part.index): strips_of(part) for part in parts}
        self._regions = {
            part.index: [region.pages.numpy() for region in part.regions]
            for part in parts
            if part.is_stored_here
        }

    def load(self, arena: Arena, loads: Sequence[Load], stream: Any) -> Ticket:
        for part, slots, pages in loads:
            strips = self._strips[part.num_ranks, part.index]
            arena.read_slots(slots, strips, pages, block_bytes=part.block_bytes)
        return Ticket()

    def make_room(self, num_bytes: int) -> Array:
        """Return memory of this process for `load_held`; it is touched when it is first used."""
        return np.empty(num_bytes, dtype=np.uint8)

    def load_held(self, rows: Array, one: Load, stream: Any) -> Ticket:
        """Copy blocks from rows of `make_room`'s memory, u8 [num_rows, block_bytes], to pages.

        `one.slots` are numbers of rows.
        """
        strips = self._strips[one.part.num_ranks, one.part.index]
        scatter(_row_runs(rows, one), strips, one.pages)
        return Ticket()

    def save(self, arena: Arena, part: Part, pages: Array, slots: Array, mark: Any) -> Ticket:
        return Ticket(sums=arena.write_slots(slots, self._regions[part.index], pages))

    def _nothing(self, *_: Any) -> None:
        """Return at once: passes and copies on the host have ended when they return."""

    attend = wait_for_layer = mark = fence = settle = close = _nothing


def _row_runs(rows: Array, one: Load) -> Iterator[tuple[int, int, Array]]:
    breaks = (np.diff(one.slots) != 1) | (np.diff(one.pages) != 1)
    for start, stop in runs(breaks, len(one.slots)):
        first = int(one.slots[start])
        yield start, stop, rows[first : first + stop - start]


def strips_of(part: Part) -> list[Strip]:
    """Return the bytes of a part on the host, runs that are evenly apart as one strip."""
    strips: list[list[_Run]] = []
    at = 0
    for region in part.regions:
        run = _Run(region.pages, at)
        at += region.size
        if region.is_gap:
            continue
        if strips and _goes_on(strips[-1], run):
            strips[-1].append(run)
        else:
            strips.append([run])
    return list(map(_strip, strips))


class _Run(NamedTuple):
    pages: torch.Tensor  # u8 [num_pages, size]
    at: int  # where it begins in a slot

    def behind(self, other: "_Run") -> tuple[int, int]:
        """Return how many bytes it is behind another in a page, and in a slot."""
        return self.pages.data_ptr() - other.pages.data_ptr(), self.at - other.at


def _goes_on(strip: list[_Run], run: _Run) -> bool:
    last = strip[-1]
    is_alike = (
        run.pages.untyped_storage().data_ptr() == last.pages.untyped_storage().data_ptr()
        and run.pages.shape == last.pages.shape
        and run.pages.stride() == last.pages.stride()
        and run.pages.data_ptr() > last.pages.data_ptr()
    )
    return is_alike and (len(strip) == 1 or run.behind(last) == last.behind(strip[-2]))


def _strip(runs: list[_Run]) -> Strip:
    first, (num_pages, size) = runs[0], runs[0].pages.shape
    in_page, in_slot = runs[1].behind(first) if len(runs) > 1 else (size, size)
    pages = first.pages.as_strided(
        (num_pages, len(runs), size), (first.pages.stride(0), in_page, 1)
    )
    return Strip(pages.numpy(), first.at, in_slot)


class Span(NamedTuple):
    """Bytes of a page of one region."""

    part: int  # `Part.index`
    region: int  # place among the regions of the part
    start: int
    size: int


class Spans(NamedTuple):
    """Those of one part, as columns: i64 [num_spans, 1] each."""

    regions: Array
    starts: Array
    sizes: Array


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Bytes that land together, before the first of `layers` runs."""

    layers: frozenset[int]
    """Those that read some of it; `BEFORE_ALL`: the pass must not begin without it."""
    spans: tuple[Span, ...]

    @cached_property
    def by_part(self) -> dict[int, Spans]:
        """The spans of each part, by its index."""
        rows: dict[int, list[tuple[int, ...]]] = {}
        for part, *row in self.spans:
            rows.setdefault(part, []).append(tuple(row))
        return {part: Spans(*np.array(each).T[:, :, None]) for part, each in rows.items()}


class Stages:
    """The stages of a pool's pages, finer for large loads than for small ones."""

    def __init__(self, parts: Sequence[Part], *, num_layers: int) -> None:
        self._by_layer = _by_first_layer(parts, num_layers)
        self._finest = _cut(self._by_layer)
        self._cuts: dict[int, tuple[Stage, ...]] = {}

    def of(self, num_bytes: int) -> tuple[Stage, ...]:
        """Return the stages for a load of `num_bytes`, in the order in which they are to land."""
        count = max(1, min(len(self._finest), num_bytes // STAGE_BYTES))
        if count not in self._cuts:
            each = math.ceil(len(self._finest) / count)
            stages = [self._finest[at : at + each] for at in range(0, len(self._finest), each)]
            self._cuts[count] = tuple(
                _stage([self._by_layer[key] for keys in some for key in keys]) for some in stages
            )
        return self._cuts[count]


Steps = list[tuple[int, int, LayerRange]]
"""(part, region, step) of what must have landed before one layer."""


def _by_first_layer(parts: Sequence[Part], num_layers: int) -> dict[int, Steps]:
    """Return the steps of all pages for the first layer that reads them, in the layers' order."""
    found: dict[int, Steps] = {}
    for part in parts:
        for region_index, region in enumerate(part.regions):
            for step in region.steps:
                if not step.layers or not all(0 <= one < num_layers for one in step.layers):
                    step = step._replace(layers=(BEFORE_ALL,))  # noqa: PLW2901
                found.setdefault(min(step.layers), []).append((part.index, region_index, step))
    return {layer: found[layer] for layer in sorted(found)}


def _cut(by_layer: dict[int, Steps]) -> list[list[int]]:
    """Return the keys of `by_layer` in runs whose pieces have `PIECE_BYTES` on average."""
    cut: list[list[int]] = []
    run: list[int] = []
    for layer in by_layer:
        run.append(layer)
        spans = _stage([by_layer[key] for key in run]).spans
        if sum(span.size for span in spans) >= PIECE_BYTES * len(spans):
            cut.append(run)
            run = []
    return [*cut, run] if run else cut


def _stage(steps_by_layer: Sequence[Steps]) -> Stage:
    """Return the steps of some layers as one stage, bytes that touch made one span."""
    steps = [one for steps in steps_by_layer for one in steps]
    spans: list[Span] = []
    for part, region, step in sorted(steps, key=lambda one: (*one[:2], one[2].start)):
        last, size = spans[-1] if spans else None, step.stop - step.start
        if last and last[:2] == (part, region) and last.start + last.size == step.start:
            spans[-1] = last._replace(size=last.size + size)
        else:
            spans.append(Span(part, region, step.start, size))
    layers = frozenset(layer for _, _, step in steps for layer in step.layers)
    return Stage(layers=layers, spans=tuple(spans))


class Pieces(NamedTuple):
    """Copies that do not depend on each other; u64 [num_pieces] each."""

    targets: Array  # addresses
    sources: Array  # addresses
    sizes: Array  # bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that are copied."""
        return int(self.sizes.sum())


class Ends(NamedTuple):
    """Where blocks begin in each region of their part, and in their slots.

    Addresses, i64 [num_regions, num_blocks].
    """

    pages: Array
    slots: Array


class PartPages:
    """A part's regions as columns of numbers: asking torch for each takes longer than a copy."""

    def __init__(self, part: Part) -> None:
        paged = [region for region in part.regions if not region.is_gap]
        at = [int(one.pages.data_ptr()) if not one.is_gap else 0 for one in part.regions]
        strides = [one.pages.stride(0) if not one.is_gap else 0 for one in part.regions]
        sizes = np.array([one.size for one in part.regions])[:, None]
        self._at = np.array(at)[:, None]
        self._strides = np.array(strides)[:, None]
        self._in_slot = np.cumsum(sizes, axis=0) - sizes
        self._num_pages = min(len(region.pages) for region in paged)
        regions = np.array([index for index, one in enumerate(part.regions) if not one.is_gap])
        self.whole = Spans(regions[:, None], np.zeros((len(regions), 1), dtype=int), sizes[regions])
        """All bytes that have a page."""

    def ends(self, slots: Array, pages: Array) -> Ends:
        """Return where blocks are that begin at the addresses `slots`; gaps have no address.

        LayoutMismatch: there is no such page.
        """
        num_pages = self._num_pages
        if len(pages) != len(slots) or ((pages < 0) | (pages >= num_pages)).any():
            raise LayoutMismatch(
                f"{len(pages)} pages for {len(slots)} slots, each to be one of {num_pages}, do"
                " not fit; report this with the engine's version."
            )
        return Ends(self._at + pages * self._strides, slots + self._in_slot)


def addresses(tables: Tables, slots: Array, block_bytes: int) -> Array:
    """Return where each slot begins; LayoutMismatch: one is of another size."""
    return tables.data.ctypes.data + offsets(tables, slots, block_bytes)


def pieces_of(ends: Ends, spans: Spans, *, is_load: bool) -> Pieces:
    """Return the copies of `spans` of blocks, to their pages or from them."""
    regions = spans.regions[:, 0]
    pages, slots = ((one[regions] + spans.starts).ravel() for one in ends)
    sizes = np.repeat(spans.sizes, ends.pages.shape[1])
    targets, sources = (pages, slots) if is_load else (slots, pages)
    return Pieces(*(one.astype(np.uint64) for one in (targets, sources, sizes)))


def concatenate(batches: Sequence[Pieces]) -> Pieces:
    """Return all copies of `batches` as one."""
    if len(batches) == 1:
        return batches[0]
    return Pieces(*(np.concatenate(column) for column in zip(*batches, strict=True)))


class HostMemory(NamedTuple):
    """What copies leave from or go to."""

    base: int  # its address
    registered_bytes: int  # from its start on, registered with the device
    chunk_bytes: int
    """One copy may not reach over a multiple of it: such ranges were registered one by one."""


def join(pieces: Pieces, in_memory: Array, *, base: int, chunk_bytes: int) -> Pieces:
    """Return the same copies with neighbours made one where both sides go on without a gap.

    `in_memory` is that of `targets` and `sources` which lies in host memory, see `HostMemory`. No
    copy reaches over a multiple of `chunk_bytes` there, unless one piece already does.
    """
    targets, sources, sizes = pieces
    if len(sizes) < 2:
        return pieces
    chunks = (in_memory - np.uint64(base)) // np.uint64(chunk_bytes)
    goes_on = (
        (targets[1:] == targets[:-1] + sizes[:-1])
        & (sources[1:] == sources[:-1] + sizes[:-1])
        & (chunks[1:] == chunks[:-1])
    )
    firsts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
    if len(firsts) == len(sizes):
        return pieces
    return Pieces(targets[firsts], sources[firsts], np.add.reduceat(sizes, firsts))
