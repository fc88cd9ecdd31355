"""`kvray bench gpu`: loads and saves of a GPU's KV cache, and prompts loaded or computed."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from kvray.config import format_size, load_config
from kvray.errors import CapacityError
from kvray.lab.bench.gpu.copies import BlockCopies, GpuDevice
from kvray.lab.bench.gpu.prefill import LLAMA_3_8B, Prefill, Shapes, crossover
from kvray.lab.bench.report import Report, Row
from kvray.lab.bench.runner import LARGE_BYTES, SMALL_BYTES, Runner, bench_spec
from kvray.store import ArenaSpec

_TABLES_BYTES = 128 * 2**20
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

    def spec(self) -> ArenaSpec:
        """Return an arena with room for the largest measurement."""
        prompt = self.lengths[-1] // self.shapes.tokens_per_block * self.shapes.block_bytes
        copies = self.num_blocks * max(self.block_sizes)
        return bench_spec(max(prompt, copies) + _TABLES_BYTES)

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
                f" {format_size(free_bytes)} are free; end other programs there, or give --quick."
            )


def run(runner: Runner, *, config: Path | None, repeat: int | None, quick: bool) -> Report:
    """Measure the first GPU; as `measure_gpu`."""
    settings = load_config(config)
    scale, device = GpuScale.fit(repeat=repeat, quick=quick), GpuDevice("cuda:0")
    return measure_gpu(scale, device, arena_dir=settings.arena.dir, runner=runner)


def measure_gpu(scale: GpuScale, device: GpuDevice, *, arena_dir: Path, runner: Runner) -> Report:
    """Take all measurements.

    Raises:
        KVRayError: there is no room, or a step failed.
    """
    if device.is_gpu:
        scale.check_memory(int(torch.cuda.mem_get_info(device.device)[0]))
    runner.show("Starting", total=8 * len(scale.block_sizes) + len(scale.lengths))
    rows: list[Row] = []
    copied: Counter[str] = Counter()
    arena = runner.make_arena(runner.make_directory(arena_dir), scale.spec())
    arena.join("bench")

    def add(row: Row) -> None:
        rows.append(row)
        runner.show(f"Measured {row.title}")
        runner.advance()

    # One pool is open at a time, as memory is registered once; it is closed before the arena is.
    for block_bytes in scale.block_sizes:
        with runner.scope() as scope:
            copies = BlockCopies(
                device, arena, num_blocks=scale.num_blocks, block_bytes=block_bytes
            )
            scope.stack.callback(copies.close)
            for row in copies.take(scale.pairs):
                add(row)
            copied += copies.pool.copied_bytes
    with runner.scope() as scope:
        prefill = Prefill(device, arena, scale.shapes, tokens_max=scale.lengths[-1])
        scope.stack.callback(prefill.pool.close)
        for num_tokens in scale.lengths:
            add(prefill.take(num_tokens, scale.prefill_pairs))
        copied += prefill.pool.copied_bytes
    lengths = zip(scale.lengths, rows[-len(scale.lengths) :], strict=True)
    first = crossover({length: row.ratio or 0.0 for length, row in lengths})
    facts = {
        "gpu": torch.cuda.get_device_name(device.device) if device.is_gpu else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    how = ", ".join(f"{format_size(size)} {name}" for name, size in copied.items())
    faster = f"Loading is the faster way from {first:,} tokens on." if first else ""
    return Report(
        rows=rows,
        note=f"{scale.num_blocks} blocks between an arena and a paged pool on {facts['gpu']} (torch"
        f" {facts['torch']}, CUDA {facts['cuda']}), bare work: one copy of as much pinned memory."
        " A prompt is loaded but for its last block, bare work: all of it is computed. Ratios are"
        f" medians over pairs of kvray's speed over that of the bare work.\nCopied: {how}.\n"
        + (faster or "Computing was the faster way at every length."),
        facts={
            "crossover_tokens": first,
            "copied_bytes": dict(copied),
            "blocks": scale.num_blocks,
            "pairs": scale.pairs,
            "prefill_pairs": scale.prefill_pairs,
            **facts,
        },
    )
