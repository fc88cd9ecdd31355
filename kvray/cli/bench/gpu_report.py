"""What a run of `kvray bench gpu` shows: a table with verdicts, or one JSON object."""

import json
from typing import Any

from rich.console import Console

from kvray import __version__
from kvray.cli.bench.gpu import Found, GpuScale
from kvray.cli.bench.report import make_table
from kvray.config import format_size


def print_all(console: Console, found: Found, scale: GpuScale) -> None:
    """Print the table, and what it is a table of."""
    console.print(make_table(found.results))
    facts = found.facts
    console.print(
        f"{scale.num_blocks} blocks between an arena and a paged pool on {facts['gpu']} (torch"
        f" {facts['torch']}, CUDA {facts['cuda']}), bare work: one copy of as much pinned memory."
        " A prompt is loaded but for its last block, bare work: all of it is computed. Ratios are"
        " medians over pairs of kvray's speed over that of the bare work."
    )
    how = ", ".join(f"{format_size(size)} {name}" for name, size in found.copied_bytes.items())
    console.print(f"Copied: {how}.")
    if found.crossover_tokens is None:
        console.print("Computing was the faster way at every length.")
    else:
        console.print(f"Loading is the faster way from {found.crossover_tokens:,} tokens on.")
    judged = [result for result in found.results if result.is_met is not None]
    missed = sum(not result.is_met for result in judged)
    if missed:
        console.print(f"[red]{missed}[/] of {len(judged)} targets are missed.")
    else:
        console.print(f"All {len(judged)} targets are met.")


def to_json(found: Found, scale: GpuScale) -> str:
    """Return all figures as one JSON object."""
    figures: dict[str, Any] = {}
    for result in found.results:
        figures.update(result.figures)
    figures = {name: float(f"{value:.5g}") for name, value in figures.items()}
    figures |= {
        "crossover_tokens": found.crossover_tokens,
        "missed": [result.title for result in found.results if result.is_met is False],
        "copied_bytes": found.copied_bytes,
        "blocks": scale.num_blocks,
        "pairs": scale.pairs,
        "prefill_pairs": scale.prefill_pairs,
        "version": __version__,
        **found.facts,
    }
    return json.dumps(figures, indent=2)
