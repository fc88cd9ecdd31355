"""Miss-ratio curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvray.cli.picture import write_picture
from kvray.cli.replay_report import title
from kvray.replay import Comparison

_BOUND = "#8a8f98"


def draw(found: Comparison, path: Path) -> None:
    """Write a PNG with the share of blocks that each policy missed, by the size of the host tier.

    Raises:
        ConfigError: the file cannot be written.
    """
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    sizes = list(found.plan.host_blocks)
    for name, misses in curves(found).items():
        axes.plot(sizes, misses, marker="o", markersize=4, label=name)
    best = [_missed(found.belady[size].hit_ratio) for size in sizes]
    axes.plot(sizes, best, color=_BOUND, linestyle="--", marker="o", markersize=4, label="Belady")
    no_end = _missed(found.infinite.hit_ratio)
    axes.axhline(no_end, color=_BOUND, linestyle=":", label="a cache without an end")
    _label(axes, found, sizes)
    write_picture(figure, path)


def curves(found: Comparison) -> dict[str, list[float]]:
    """Return for each policy, by its title, the blocks missed at each size, in percent."""
    lines: dict[str, list[float]] = {}
    for outcome in found.outcomes:
        lines.setdefault(title(outcome), []).append(_missed(outcome.hit_ratio))
    return lines


def _label(axes: Axes, found: Comparison, sizes: Sequence[int]) -> None:
    disk = f", {found.plan.nvme_blocks:,} blocks of NVMe below" if found.plan.nvme_blocks else ""
    axes.set_title(f"{found.trace.name}{disk}", loc="left")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(f"host tier, blocks of {found.trace.block_tokens} tokens")
    axes.set_ylabel("blocks missed, %")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _missed(hit_ratio: float) -> float:
    return 100 * (1 - hit_ratio)
