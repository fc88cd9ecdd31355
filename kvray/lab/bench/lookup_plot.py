"""How long a restarted lookup is told by tiers of up to 10,000 nodes, with 1 to 16 partitions.

`python -m kvray.lab.bench.lookup_plot FILE.png` prints and draws it, and measures real indexes of
some size; it takes some minutes.
"""

import logging
import sys
from pathlib import Path

from kvray.console.picture import write_picture
from kvray.lab.bench.lookup_scale import measured, told_s

NODES = 100, 300, 1_000, 3_000, 10_000
PARTITIONS = 1, 2, 4, 8
BLOCKS, BLOCKS_OF_LARGE_NODES = 16_000, 131_000


def draw(path: Path) -> None:
    """Print and draw the times of lookups of one and of several partitions."""
    from matplotlib.figure import Figure

    for num_partitions in PARTITIONS[:3]:
        num_bytes, key_s = measured(100, BLOCKS, num_partitions)
        print(
            f"100 real nodes of {BLOCKS:,} blocks, {num_partitions} partitions: one has"
            f" {num_bytes / 1e6:.0f} MB, {1e6 * key_s:.2f} us of CPU a key, calls included"
        )
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for num_partitions in PARTITIONS:
        times = []
        for num_shards in NODES:
            took_s, load = told_s(num_shards, BLOCKS, num_partitions)
            times.append(took_s)
            print(
                f"{num_partitions} partitions, {num_shards} nodes: {took_s:.1f} s, then {load:.0%}",
                flush=True,
            )
        one = "one lookup" if num_partitions == 1 else f"{num_partitions} partitions"
        axes.plot(NODES, times, marker="o", markersize=4, label=one)
        large_s, _ = told_s(1_000, BLOCKS_OF_LARGE_NODES, num_partitions)
        print(f"    1,000 nodes of {BLOCKS_OF_LARGE_NODES:,} blocks: {large_s:.1f} s", flush=True)
    axes.set_title(f"A lookup that restarts, nodes with {BLOCKS:,} blocks each", loc="left")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(NODES, [f"{nodes:,}" for nodes in NODES])
    axes.minorticks_off()
    axes.set_xlabel("nodes")
    axes.set_ylabel("seconds until it knows all")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    write_picture(figure, path)


if __name__ == "__main__":
    logging.disable()  # thousands of shards would say that they wait
    draw(Path(sys.argv[1]))
