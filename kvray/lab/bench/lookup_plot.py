"""How long a restarted lookup is told by tiers of up to 10,000 nodes, with 1 to 8 partitions.

`python -m kvray.lab.bench.lookup_plot FILE.png` prints and draws it, and measures real indexes of
some size; it takes some ten minutes of two cores.
"""

import logging
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

from kvray.console.output import write_picture
from kvray.lab.bench.lookup_scale import measured, told_s

NODES = 100, 300, 1_000, 3_000, 10_000
PARTITIONS = 1, 2, 4, 8
BLOCKS, BLOCKS_OF_LARGE_NODES = 16_000, 131_000


def run() -> dict[tuple[int, int], float]:
    """Print the figures, and return (partitions, nodes) -> seconds for nodes of `BLOCKS`."""
    for num_partitions in PARTITIONS[:3]:
        num_bytes, key_s = measured(100, BLOCKS, num_partitions)
        print(
            f"100 real nodes of {BLOCKS:,} blocks, {num_partitions} partitions: one has"
            f" {num_bytes / 1e6:.0f} MB, {1e6 * key_s:.2f} us of CPU a key, calls included"
        )
    cases = [(nodes, BLOCKS, one) for one, nodes in product(PARTITIONS, NODES)]
    cases += [(1_000, BLOCKS_OF_LARGE_NODES, one) for one in PARTITIONS]
    found = {}
    with ProcessPoolExecutor(initializer=logging.disable) as pool:
        results = pool.map(told_s, *zip(*cases, strict=True))
        for (nodes, blocks, one), (took_s, load) in zip(cases, results, strict=True):
            print(
                f"{one} partitions, {nodes:,} nodes of {blocks:,} blocks: {took_s:.1f} s, then"
                f" {load:.0%} of a core",
                flush=True,
            )
            found[one, nodes, blocks] = took_s
    return {(one, nodes): found[one, nodes, BLOCKS] for one, nodes in product(PARTITIONS, NODES)}


def draw(times: Mapping[tuple[int, int], float], path: Path) -> None:
    """Draw what `run` returned."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for num_partitions in PARTITIONS:
        one = "one lookup" if num_partitions == 1 else f"{num_partitions} partitions"
        seconds = [times[num_partitions, nodes] for nodes in NODES]
        axes.plot(NODES, seconds, marker="o", markersize=4, label=one)
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
    logging.disable()  # shards would say that they wait
    draw(run(), Path(sys.argv[1]))
