"""Miss-ratio curves as a picture."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvray.lab.replay import Comparison

_BOUND = "#8a8f98"


def make_figure(found: Comparison) -> Figure:
    """Return the share of blocks that each policy missed, by the size of the host tier.

    The y axis starts at 0, so that distances do not deceive.
    """
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
