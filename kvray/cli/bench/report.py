"""What a run shows: a table with a verdict on each target, or one JSON object."""

import json
import platform
from collections.abc import Sequence
from typing import Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from kvray import __version__
from kvray.cli.bench.results import Result
from kvray.cli.bench.scale import Scale
from kvray.config import format_size


def make_table(results: Sequence[Result]) -> Table:
    """Return one row for each result."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("kvray", "bare work", "ratio", "target", ""):
        table.add_column(name, justify="right", no_wrap=True)
    unit = ""
    for result in results:
        if unit not in ("", result.unit):
            table.add_section()
        unit = result.unit
        table.add_row(
            result.title,
            f"{_digits(result.ours)} {unit}",
            "" if result.floor is None else f"{_digits(result.floor)} {unit}",
            "" if result.ratio is None else f"{result.ratio:.2f}",
            "" if result.target is None else f"{result.target}",
            {True: "[green]✔[/]", False: "[red]✘[/]", None: ""}[result.is_met],
        )
    return table


def print_all(console: Console, results: Sequence[Result], scale: Scale) -> None:
    """Print the table, and what it is a table of."""
    console.print(make_table(results))
    console.print(
        f"{scale.num_large} blocks of 4 MiB and {scale.num_small} of 128 KiB in an arena of"
        f" {format_size(scale.capacity)}, on {_cores()}. Ratios are medians over pairs: for copies"
        " kvray's speed over the bare copy's, for lookups kvray's time over that of hashing"
        " alone."
    )
    missed = sum(result.is_met is False for result in results)
    if missed:
        console.print(f"[red]{missed}[/] of {_num_judged(results)} targets are missed.")
    else:
        console.print(f"All {_num_judged(results)} targets are met.")


def to_json(results: Sequence[Result], scale: Scale) -> str:
    """Return all figures as one JSON object."""
    found: dict[str, Any] = {}
    for result in results:
        found.update(result.figures)
    found = {name: float(f"{value:.5g}") for name, value in found.items()}
    found |= {
        "missed": [result.title.strip() for result in results if result.is_met is False],
        "capacity_bytes": scale.capacity,
        "blocks_4mib": scale.num_large,
        "blocks_128kib": scale.num_small,
        "pairs": scale.pairs,
        "cpu_cores": psutil.cpu_count(),
        "machine": platform.machine(),
        "version": __version__,
    }
    return json.dumps(found, indent=2)


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _cores() -> str:
    return f"{psutil.cpu_count()} cores"


def _num_judged(results: Sequence[Result]) -> int:
    return sum(result.is_met is not None for result in results)
