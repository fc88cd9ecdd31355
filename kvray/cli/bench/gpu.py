"""A whole run of `kvray bench gpu`: an arena of its own, and everything given back at the end."""

import shutil
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvray.cli.bench.gpu_copies import Copies
from kvray.cli.bench.gpu_machine import Machine
from kvray.cli.bench.gpu_model import LLAMA_3_8B, Shapes
from kvray.cli.bench.gpu_prefill import Prefill, crossover
from kvray.cli.bench.results import Result
from kvray.cli.bench.scale import LARGE_BYTES, SMALL_BYTES
from kvray.cli.bench.stage import make_directory
from kvray.cli.interrupts import Interrupts
from kvray.cli.progress import counting_progress
from kvray.config import format_size
from kvray.errors import CapacityError
from kvray.store import Arena, ArenaOwner, ArenaSpec

_SLAB_BYTES = 64 * 2**20
_SLOT_MIN = 64 * 2**10
_LOCK_WAIT_S = 1.0
_SPARE_BYTES = 2**30
"""Of the GPU's memory for its libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuScale:
    """How much a run measures."""

    shapes: Shapes = LLAMA_3_8B
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Prompts, in tokens; each a multiple of a block's."""
    num_blocks: int = 256
    block_sizes: tuple[int, ...] = (LARGE_BYTES, SMALL_BYTES)
    pairs: int
    prefill_pairs: int

    @classmethod
    def fit(cls, *, repeat: int | None, quick: bool) -> "GpuScale":
        """Return the counts of a run with `repeat` pairs of each kind."""
        if quick:
            few = (64, 1024, 8192)
            return cls(lengths=few, pairs=repeat or 3, prefill_pairs=repeat or 1)
        return cls(pairs=repeat or 15, prefill_pairs=repeat or 5)

    @property
    def num_measurements(self) -> int:
        """Rows of copies, and lengths of prompts."""
        return 8 * len(self.block_sizes) + len(self.lengths)

    def spec(self) -> ArenaSpec:
        """Return the arena that has room for the largest of what is measured."""
        prompt = self.lengths[-1] // self.shapes.tokens_per_block * self.shapes.block_bytes
        copies = self.num_blocks * max(self.block_sizes)
        return ArenaSpec(
            cluster_name="bench",
            capacity=max(prompt, copies) + 2 * _SLAB_BYTES,
            slab=_SLAB_BYTES,
            slot_min=_SLOT_MIN,
            holders_max=16,
        )

    def check_memory(self, free_bytes: int) -> None:
        """Make sure that the model and its pages fit into the GPU's free memory.

        Raises:
            CapacityError: they do not.
        """
        shapes, num_tokens = self.shapes, self.lengths[-1]
        pages = num_tokens // shapes.tokens_per_block * shapes.block_bytes
        activations = num_tokens * 6 * shapes.mlp * shapes.dtype.itemsize  # at most, in its MLP
        needed = shapes.weight_bytes + pages + activations + _SPARE_BYTES
        if needed > free_bytes:
            raise CapacityError(
                f"The bench takes {format_size(needed)} of the GPU's memory and"
                f" {format_size(free_bytes)} are free; end what else runs there, or give --quick."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a run found."""

    results: tuple[Result, ...]
    crossover_tokens: int | None
    copied_bytes: dict[str, int]
    """By how they were copied."""
    facts: dict[str, Any]


def run(
    scale: GpuScale,
    machine: Machine,
    *,
    directory: Path,
    console: Console,
    interrupts: Interrupts,
) -> Found:
    """Take all measurements.

    Args:
        scale: how much is measured.
        machine: the device.
        directory: `arena.dir`; a directory is made in it, and removed.
        console: where progress is shown.
        interrupts: what ends it early.

    Raises:
        KVRayError: there is no room, or a step did not do what it should.
    """
    if machine.is_gpu:
        scale.check_memory(machine.free_bytes())
    progress = counting_progress(console)
    results: list[Result] = []
    copied: Counter[str] = Counter()
    with interrupts.closing() as stack, progress:
        bar = progress.add_task("Starting", total=scale.num_measurements)
        arena = _make_arena(scale.spec(), directory, stack)
        # Closed before the arena is, also when a signal ends the loop.
        for result in stack.enter_context(closing(_take(scale, machine, arena, copied))):
            results.append(result)
            progress.update(bar, description=f"Measured {result.title}", advance=1)
    ratios = {
        length: result.ratio or 0.0
        for length, result in zip(scale.lengths, results[-len(scale.lengths) :], strict=True)
    }
    return Found(
        results=tuple(results),
        crossover_tokens=crossover(ratios),
        copied_bytes=dict(copied),
        facts=machine.facts(),
    )


def _take(
    scale: GpuScale, machine: Machine, arena: Arena, copied: Counter[str]
) -> Generator[Result, None, None]:
    """Yield the rows; one pool is open at a time, as memory is registered once."""
    for block_bytes in scale.block_sizes:
        copies = Copies(machine, arena, num_blocks=scale.num_blocks, block_bytes=block_bytes)
        try:
            yield from copies.take(scale.pairs)
        finally:
            copied.update(copies.close())
    prefill = Prefill(machine, arena, scale.shapes, tokens_max=scale.lengths[-1])
    try:
        for num_tokens in scale.lengths:
            yield prefill.take(num_tokens, scale.prefill_pairs)
    finally:
        copied.update(prefill.close())


def _make_arena(spec: ArenaSpec, parent: Path, stack: ExitStack) -> Arena:
    directory = make_directory(parent)
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    arena = Arena.create(directory, spec, lock_wait_s=_LOCK_WAIT_S)
    stack.callback(arena.close)
    stack.callback(ArenaOwner(arena).retire)
    arena.join("bench")
    return arena
