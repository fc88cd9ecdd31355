"""The output of a replay: a table, one JSON object, or miss-ratio curves as a picture."""

from __future__ import annotations

import json
import platform
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from kvray import __version__
from kvray.lab.replay import Comparison, Outcome, Trace
from kvray.lab.replay.comparison import BASELINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ALWAYS = ("blocks", "policy", "hit ratio", "of tokens", "gain")
_DISK = ("host", "NVMe", "written", "per hit", "of LRU's")
_HITS = ("hit_ratio", "token_hit_ratio", "hit_blocks", "hit_tokens")
_RUN = (
    *("policy", "admission", "host_blocks", "nvme_blocks", *_HITS, "host_hit_blocks"),
    *("nvme_hit_blocks", "nvme_written_blocks", "written_per_hit", "seconds", "refs_per_s"),
    *("gain", "write_share"),
)
_BOUND = "#8a8f98"


def make_table(found: Comparison) -> Table:
    """Return one row for each run, and the bounds below those of each size."""
    has_disk = found.plan.nvme_blocks > 0
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    for name in _ALWAYS + (_DISK if has_disk else ()) + ("refs/s",):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for host_blocks in found.plan.host_blocks:
        size = f"{host_blocks:,}"
        for outcome in found.outcomes:
            if outcome.host_blocks == host_blocks:
                table.add_row(size, *_cells(outcome, has_disk=has_disk))
                size = ""
        table.add_row("", "Belady", *_hit_cells(found.belady[host_blocks]), style="dim")
        table.add_section()
    table.add_row("∞", "infinite", *_hit_cells(found.infinite), style="dim")
    return table


def print_all(console: Console, found: Comparison) -> None:
    """Print the trace's size, the table, and the mean gains."""
    print_trace(console, found.trace)
    console.print(make_table(found))
    console.print(
        "Hits are blocks of contiguous prefixes. Gain: 0 is LRU, 1 is Belady's optimum, which"
        " knows the future."
    )
    if found.plan.nvme_blocks:
        console.print(
            f"Below the host tier are {found.plan.nvme_blocks:,} blocks of NVMe; Belady has one"
            " tier as large as both. Written: blocks. Per hit: bytes written for each byte found"
            " there. Of LRU's: relative to LRU with a disk that takes every block."
        )
    titles = {(one.policy, one.admission): one.title for one in found.outcomes}
    for name, gain in found.mean_gains().items():
        if gain is not None and titles[name] != BASELINE:
            console.print(f"Mean gain of {titles[name]} over all sizes: {gain:+.3f}")


def print_trace(console: Console, trace: Trace) -> None:
    """Print what the trace asks for."""
    once = int((np.bincount(trace.ids) == 1).sum())
    console.print(
        f"{trace.name}: {trace.num_requests:,} requests in"
        f" {timedelta(seconds=round(trace.seconds))} with {trace.prompt_tokens:,} tokens ask for"
        f" {trace.num_refs:,} blocks of {trace.block_tokens} tokens; {trace.num_unique:,} of them"
        f" differ, and {percent(once / trace.num_unique)} of these are asked for once."
    )


def to_json(found: Comparison, *, concurrent: int, seed: int) -> str:
    """Return everything as one JSON object; `concurrent` and `seed` are the command's options."""
    return json.dumps(
        {
            **trace_figures(found.trace),
            "concurrent": concurrent,
            "seed": seed,
            "nvme_blocks": found.plan.nvme_blocks,
            "infinite": _figures(found.infinite, _HITS),
            "belady": [
                {"host_blocks": size, "blocks": bound.host_blocks, **_figures(bound, _HITS)}
                for size, bound in found.belady.items()
            ],
            "results": [_figures(one, _RUN) for one in found.outcomes],
            "mean_gains": [
                {"policy": policy, "admission": admission, "mean_gain": gain}
                for (policy, admission), gain in found.mean_gains().items()
            ],
            **machine_figures(),
        },
        indent=2,
    )


def trace_figures(trace: Trace) -> dict[str, Any]:
    """Return what JSON says of a trace."""
    return {
        "trace": trace.name,
        "block_tokens": trace.block_tokens,
        "requests": trace.num_requests,
        "refs": trace.num_refs,
        "unique_blocks": trace.num_unique,
        "prompt_tokens": trace.prompt_tokens,
        "trace_seconds": trace.seconds,
    }


def machine_figures() -> dict[str, Any]:
    """Return what JSON says of the machine and of kvray."""
    return {
        "cpu_cores": psutil.cpu_count(),
        "machine": platform.machine(),
        "version": __version__,
    }


def percent(ratio: float) -> str:
    """Return a ratio as people read it."""
    return f"{100 * ratio:.1f} %"


def _cells(outcome: Outcome, *, has_disk: bool) -> list[str]:
    gain, per_hit, share = outcome.gain, outcome.written_per_hit, outcome.write_share
    cells = [outcome.title, *_hit_cells(outcome), "" if gain is None else f"{gain:+.2f}"]
    if has_disk:
        cells += [
            percent(outcome.host_hit_blocks / max(1, outcome.refs)),
            percent(outcome.nvme_hit_blocks / max(1, outcome.refs)),
            f"{outcome.nvme_written_blocks:,}",
            "" if per_hit is None else f"{per_hit:.2f}",
            "" if share is None else percent(share),
        ]
    return [*cells, f"{outcome.refs_per_s:,.0f}"]


def _hit_cells(outcome: Outcome) -> list[str]:
    return [percent(outcome.hit_ratio), percent(outcome.token_hit_ratio)]


def _figures(outcome: Outcome, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in names}


def make_figure(found: Comparison) -> Figure:
    """Return the share of blocks that each policy missed, by the size of the host tier.

    The y axis starts at 0, so that distances do not deceive.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    sizes = list(found.plan.host_blocks)
    lines: dict[str, list[float]] = {}
    for outcome in found.outcomes:
        lines.setdefault(outcome.title, []).append(100 * (1 - outcome.hit_ratio))
    for name, misses in lines.items():
        axes.plot(sizes, misses, marker="o", markersize=4, label=name)
    best = [100 * (1 - found.belady[size].hit_ratio) for size in sizes]
    axes.plot(sizes, best, color=_BOUND, linestyle="--", marker="o", markersize=4, label="Belady")
    least = 100 * (1 - found.infinite.hit_ratio)
    axes.axhline(least, color=_BOUND, linestyle=":", label="infinite cache")
    disk = f", {found.plan.nvme_blocks:,} blocks of NVMe below" if found.plan.nvme_blocks else ""
    axes.set_title(f"{found.trace.name}{disk}", loc="left")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(f"host tier, blocks of {found.trace.block_tokens} tokens")
    axes.set_ylabel("blocks missed, %")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
